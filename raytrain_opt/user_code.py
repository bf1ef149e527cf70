"""What the package does when code of the user ends the process, or hangs."""

from __future__ import annotations

import signal
import sysconfig
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import UserCodeError

# Asks a loader process that reads a sample where it hangs.
LOADER_SIGNAL = signal.SIGUSR1


class Stalled(KeyboardInterrupt):
    """Raised by a signal in code that hangs, which may catch every Exception."""

    def __init__(self, frame: FrameType | None, since_s: float) -> None:
        super().__init__(
            f"{_user_frame(traceback.extract_stack(frame))} hangs: no progress for "
            f"{monotonic_s() - since_s:.0f} s, more than timeouts.no_progress_s"
        )


@contextmanager
def exits_as_errors() -> Iterator[None]:
    """Raise UserCodeError for SystemExit, and for whatever else is no error and no Ctrl-C.

    Code of the user, whatever calls it, must not choose the exit code: 0 means that the work is
    done and its result is written.
    """
    try:
        yield
    except Stalled as error:
        raise UserCodeError(str(error)) from error
    except (Exception, KeyboardInterrupt):
        raise
    except BaseException as error:
        name = type(error).__name__
        call = f"called sys.exit({error})" if isinstance(error, SystemExit) else f"raised {name}"
        raise UserCodeError(
            f"{_user_frame(traceback.extract_tb(error.__traceback__))} {call}, which must not end "
            "the process here; let it return, or raise an exception"
        ) from error


def _user_frame(frames: Sequence[traceback.FrameSummary]) -> str:
    """Return function, file and line of the innermost call of user code, else of any code."""
    paths = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib", "scripts")]
    others = (f"{Path(__file__).parent}/", *(f"{path}/" for path in paths), "<frozen")
    user = [frame for frame in frames if not frame.filename.startswith(others)]
    frame = (user or frames)[-1]
    return f"{frame.name} ({frame.filename}:{frame.lineno})"
