"""Scaling rules: published pairs, laws, errors, and no import of torch."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest

from raytrain_opt.optim.scaling import scale_lr

RULES = ["linear", "sqrt", "none"]


@pytest.mark.parametrize(
    ("rule", "lr", "from_size", "to_size", "expected"),
    [
        ("linear", 0.1, 256, 8192, 3.2),  # Goyal et al.
        ("linear", 0.1, 256, 32768, 12.8),  # Akiba et al., who then train with half of it
        ("linear", 0.1, 256, 64, 0.025),
        ("sqrt", 0.01, 128, 512, 0.02),
        ("sqrt", 0.4, 1024, 64, 0.1),
        ("none", 0.3, 256, 8192, 0.3),
    ],
)
def test_rate_for_another_batch(
    rule: Any, lr: float, from_size: int, to_size: int, expected: float
) -> None:
    assert scale_lr(rule, lr, from_size, to_size) == pytest.approx(expected, rel=1e-12)


def test_schedules_steps_and_scaling_do_not_import_torch() -> None:
    code = "import sys; from raytrain_opt.optim import epoch_steps, scaling, schedules; "
    code += "sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
