"""A complete training step with LARS on a GPU: captured, compiled, and in fp16 with a GradScaler.

make test-gpu      or, in an environment with torch and without Ray:
python -m pytest -m gpu tests/gpu
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from raytrain_opt.models.small_cnn import small_cnn
from raytrain_opt.optim.factory import set_lr
from raytrain_opt.optim.lars import LARS

# The compiler and the debug mode warn about themselves, each version of torch differently.
pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

CUDA = torch.device("cuda")
# Higher ones let rounding grow beyond the tolerances.
LRS = [0.6, 0.6, 0.3, 0.15, 0.9, 0.075]
WARM_UP = 3


@pytest.fixture(autouse=True)
def _same_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """cuDNN's fastest weight gradients add up in no fixed order; graphs need another stream."""
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    torch.set_float32_matmul_precision("highest")
    with torch.cuda.stream(torch.cuda.Stream()):
        yield


class Trained:
    """A small network and LARS, both the same every time; `forward` may be compiled."""

    def __init__(self, *, dtype: torch.dtype | None = None, scale: float = 2.0**10) -> None:
        torch.manual_seed(0)
        self.model = small_cnn(num_classes=10, sample_shape=(3, 16, 16), width=16).to(CUDA)
        self.model = self.model.to(memory_format=torch.channels_last)
        self.forward: nn.Module = self.model
        self.optimizer = LARS(groups(self.model), torch.tensor(LRS[0], device=CUDA))
        self.dtype = dtype
        self.scaler = torch.amp.GradScaler(
            "cuda", init_scale=scale, enabled=dtype is torch.float16
        )

    def step(self, x: Tensor, y: Tensor) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=self.dtype, enabled=self.dtype is not None):
            loss = cross_entropy(self.forward(x), y, label_smoothing=0.1)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        return loss.detach()

    def weights(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def momentum(self) -> list[Tensor]:
        return [state["momentum_buffer"] for state in self.optimizer.state.values()]


def groups(model: nn.Module) -> list[dict[str, object]]:
    """Vectors, biases and normalization, without decay and trust ratio."""
    layers = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    rest = {"params": vectors, "adapt": False, "weight_decay": 0.0, "lr": 0.01}
    return [{"params": layers, "weight_decay": 1e-4, "trust_coefficient": 0.02}, rest]


def batches() -> list[tuple[Tensor, Tensor]]:
    """One for each of LRS."""
    random = torch.Generator(CUDA).manual_seed(1)
    return [
        (
            torch.randn(32, 3, 16, 16, device=CUDA, generator=random).to(
                memory_format=torch.channels_last
            ),
            torch.randint(0, 10, (32,), device=CUDA, generator=random),
        )
        for _ in LRS
    ]


def train(trained: Trained, lrs: Sequence[float] = LRS) -> list[Tensor]:
    """Warm up on the first batch, as a capture must, and do a step with each; their losses."""
    for _ in range(WARM_UP):
        trained.step(*batches()[0])
    losses = []
    for lr, batch in zip(lrs, batches(), strict=True):
        set_lr_of_layers(trained, lr)
        losses.append(trained.step(*batch))
    return losses


def set_lr_of_layers(trained: Trained, lr: float) -> None:
    """`set_lr` reaches all groups; the vectors have a rate of their own here."""
    own = trained.optimizer.param_groups[1]["lr"]
    set_lr(trained.optimizer, lr)
    trained.optimizer.param_groups[1]["lr"] = own


def train_captured(trained: Trained) -> list[Tensor]:
    """The same as `train`, with the steps as replays of one graph."""
    x, y = (tensor.clone() for tensor in batches()[0])
    for _ in range(WARM_UP):
        trained.step(x, y)
    trained.optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
        loss = trained.step(x, y)
    losses = []
    for lr, batch in zip(LRS, batches(), strict=True):
        set_lr_of_layers(trained, lr)
        x.copy_(batch[0])
        y.copy_(batch[1])
        graph.replay()
        losses.append(loss.clone())
    return losses


def assert_same(one: Trained, other: Trained, *, rtol: float, atol: float) -> None:
    for name, weight in one.weights().items():
        torch.testing.assert_close(other.weights()[name], weight, rtol=rtol, atol=atol, msg=name)
    for mine, theirs in zip(one.momentum(), other.momentum(), strict=True):
        torch.testing.assert_close(theirs, mine, rtol=rtol, atol=atol)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_captured_step_trains_as_an_eager_one(dtype: torch.dtype | None) -> None:
    eager, captured = Trained(dtype=dtype), Trained(dtype=dtype)
    expected, losses = train(eager), train_captured(captured)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-3, atol=1e-4)
    assert_same(eager, captured, rtol=1e-3, atol=1e-4)


def test_a_captured_step_reads_the_current_rate() -> None:
    captured, constant = Trained(), Trained()
    train_captured(captured)
    train(constant, [LRS[0]] * len(LRS))
    differences = [
        (value - constant.weights()[name]).abs().max().item()
        for name, value in captured.weights().items()
        if value.dim() > 1
    ]
    assert min(differences) > 2e-3


def test_a_compiled_network_trains_as_an_eager_one() -> None:
    eager, compiled = Trained(), Trained()
    compiled.forward = torch.compile(compiled.model)
    expected, losses = train(eager), train(compiled)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-2, atol=1e-3)
    assert_same(eager, compiled, rtol=1e-2, atol=1e-3)


def test_a_compiled_network_can_be_captured() -> None:
    eager, both = Trained(), Trained()
    both.forward = torch.compile(both.model)
    expected, losses = train(eager), train_captured(both)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=1e-2, atol=1e-3)
    assert_same(eager, both, rtol=1e-2, atol=1e-3)


def test_a_compiled_update_is_that_of_the_eager_one() -> None:
    eager, compiled = Trained(), Trained()
    update = torch.compile(lambda: LARS.step(compiled.optimizer))
    compiled.optimizer.step = update  # type: ignore[method-assign]
    train(eager)
    train(compiled)
    assert_same(eager, compiled, rtol=1e-3, atol=1e-4)


def test_fp16_trains_as_fp32_does() -> None:
    full, half = Trained(), Trained(dtype=torch.float16)
    expected, losses = train(full), train(half)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=2e-2, atol=2e-2)
    assert losses[0].item() < cross_entropy(torch.zeros(1, 10), torch.zeros(1).long()).item()
    for name, weight in full.weights().items():
        if weight.dim() > 1:
            distance = (half.weights()[name] - weight).norm() / weight.norm()
            assert distance < 0.1, name


def test_an_overflow_of_fp16_changes_no_weight() -> None:
    trained = Trained(dtype=torch.float16, scale=2.0**40)
    before = [p.detach().clone() for p in trained.model.parameters()]
    trained.step(*batches()[0])
    assert all(map(torch.equal, trained.model.parameters(), before))
    assert trained.scaler.get_scale() == 2.0**39


def test_a_step_does_not_wait_for_the_device() -> None:
    trained = Trained(dtype=torch.bfloat16)
    x, y = batches()[0]
    for _ in range(WARM_UP):
        trained.step(x, y)
    try:
        torch.cuda.set_sync_debug_mode("error")
        trained.step(x, y)
    finally:
        torch.cuda.set_sync_debug_mode("default")
