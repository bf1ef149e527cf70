"""What the package does when code of the user ends the process, or hangs."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from raytrain_opt.clock import monotonic_s
from raytrain_opt.errors import UserCodeError, origin, user_frame

# Asks a loader process that reads a sample where it hangs.
LOADER_SIGNAL = signal.SIGUSR1


class Stalled(KeyboardInterrupt):
    """Raised by a signal in code that hangs, which may catch every Exception."""

    def __init__(self, frame: FrameType | None, since_s: float) -> None:
        super().__init__(
            f"{user_frame(traceback.extract_stack(frame))} hangs: no progress for "
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
            f"{origin(error)} {call}, which must not end the process here; let it return, or "
            "raise an exception"
        ) from error
