"""What code of the user may not do: end the process."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

import pytest

from raytrain_opt.errors import UserCodeError
from raytrain_opt.user_code import exits_as_errors


def parse() -> None:
    argparse.ArgumentParser().parse_args(["--unknown"])


def leave() -> NoReturn:
    raise GeneratorExit


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (lambda: sys.exit(0), r"test_user_code.py:\d+ in <lambda> called sys.exit\(0\)"),
        (lambda: sys.exit(), r"called sys.exit\(\)"),
        (parse, r"test_user_code.py:\d+ in parse called sys.exit\(2\)"),
        (leave, r"test_user_code.py:\d+ in leave raised GeneratorExit"),
    ],
)
def test_an_exit_is_an_error_that_names_the_function(
    code: Callable[[], object], words: str
) -> None:
    with pytest.raises(UserCodeError, match=words), exits_as_errors():
        code()


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_errors_and_ctrl_c_stay_what_they_are(error: type[BaseException]) -> None:
    with pytest.raises(error), exits_as_errors():
        raise error
