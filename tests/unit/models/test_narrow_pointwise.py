"""Strided 1 x 1 convolutions of few channels, whose gradients oneDNN computes wrongly."""

from __future__ import annotations

import subprocess
import sys

# In a process of its own: a library that fails here writes past its memory.
PROGRAM = """
import torch
from torch.nn.functional import cross_entropy
from raytrain_opt.config.schema import ModelSection
from raytrain_opt.models import build_model

torch.set_num_threads(1)
torch.manual_seed(0)  # with others, rounding may turn a ReLU off, which changes gradients
section = ModelSection(name="resnet8", args={"width": 4})
x, y = torch.rand(8, 1, 28, 28), torch.arange(8)
gradients = []
for enabled in (True, False):
    shape = {"num_classes": 10, "sample_shape": (1, 28, 28), "seed": 0}
    model = build_model(section, **shape, channels_last=True)
    for _ in range(30):
        model.zero_grad()
        with torch.backends.mkldnn.flags(enabled=enabled):
            cross_entropy(model(x.contiguous(memory_format=torch.channels_last)), y).backward()
    gradients.append([p.grad for p in model.parameters()])
for ours, reference in zip(*gradients, strict=True):
    torch.testing.assert_close(ours, reference)
print("ok")
"""


def test_gradients_of_narrow_strided_pointwise_convolutions_are_right() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr
