"""LARS compared step by step with the reference and timm; its laws; checkpoints."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from raytrain_opt.optim.large_batch import LARS, _adapted
from tests.support.reference_lars import ReferenceLARS, trust_ratio

SHAPES = [(8, 3, 3, 3), (40, 40), (5, 7), (1, 1), (6,), (1,)]
LRS = [0.5, 2.0, 2.0, 0.1, 8.0]
Grads = Sequence[Tensor | None]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "decay": {"weight_decay": 0.1},
    "no momentum": {"weight_decay": 0.1, "momentum": 0.0},
    "large trust": {"weight_decay": 0.01, "trust_coefficient": 0.5, "eps": 0.01},
}


def weights(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    scales = [0.01, 1.0, 30.0, 1.0, 1.0, 2.0]
    return [
        nn.Parameter((torch.randn(shape, generator=random, dtype=torch.float64) * scale).to(dtype))
        for shape, scale in zip(SHAPES, scales, strict=True)
    ]


def random_grads(step: int, dtype: torch.dtype = torch.float64) -> list[Tensor | None]:
    random = torch.Generator().manual_seed(step + 1)
    scales = [1.0, 1e-3, 10.0, 1.0, 1.0, 0.1]
    return [
        (torch.randn(shape, generator=random, dtype=torch.float64) * scale).to(dtype)
        for shape, scale in zip(SHAPES, scales, strict=True)
    ]


def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
    """Return two groups; the last two parameters are biases."""
    return [{"params": params[:4]}, {"params": params[4:], "weight_decay": 0.0, "adapt": False}]


def train(
    make: Callable[..., torch.optim.Optimizer],
    params: list[nn.Parameter],
    grads: Sequence[Grads],
    **settings: Any,
) -> torch.optim.Optimizer:
    optimizer = make(groups(params), lr=LRS[0], **settings)
    for lr, step_grads in zip(LRS, grads, strict=False):
        step(optimizer, params, step_grads, lr)
    return optimizer


def step(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: Grads, lr: float
) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    optimizer.step()


def both(
    dtype: torch.dtype, grads: Sequence[Grads], **settings: Any
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Return the weights after training with LARS, and with the reference."""
    lars_params, reference = weights(dtype), weights(dtype)
    train(LARS, lars_params, grads, **settings)
    train(ReferenceLARS, reference, grads, **settings)
    return lars_params, reference


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_every_step_equals_the_reference(settings: dict[str, Any]) -> None:
    for steps in range(1, len(LRS) + 1):
        lars_params, reference = both(
            torch.float64, [random_grads(s) for s in range(steps)], **settings
        )
        torch.testing.assert_close(lars_params, reference, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_lower_precision_differs_by_rounding_only(
    dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    grads = [random_grads(s, dtype) for s in range(len(LRS))]
    lars_params, reference = both(dtype, grads, **settings)
    exact = [nn.Parameter(param.double()) for param in weights(dtype)]
    train(
        ReferenceLARS,
        exact,
        [[g.double() for g in step_grads] for step_grads in grads],
        **settings,
    )  # type: ignore[union-attr]
    for lars_param, reference_param, exact_param in zip(
        lars_params, reference, exact, strict=True
    ):
        assert lars_param.dtype == dtype
        largest = exact_param.abs().max().item()
        reference_error = (reference_param.double() - exact_param).abs().max()
        tolerance = 1.5 * reference_error + torch.finfo(dtype).eps * largest
        assert (lars_param.double() - exact_param).abs().max() <= tolerance


def test_the_norms_of_low_precision_are_float32() -> None:
    """In float16 they would overflow: 300^2 is more than 65504."""
    param, copied = (nn.Parameter(torch.full((4, 4), 300.0, dtype=torch.float16)) for _ in "12")
    for p, make in ((param, LARS), (copied, ReferenceLARS)):
        p.grad = torch.full((4, 4), 300.0, dtype=torch.float16)
        make([p], lr=100.0, momentum=0.0).step()
    assert param[0, 0].item() == copied[0, 0].item() == 270.0


@pytest.mark.parametrize("value", [0.0, 1e30, -1e30, 1e-42, math.inf, math.nan])
def test_extreme_gradients_equal_the_reference(value: float) -> None:
    """All elements of one layer, or one of them; the other layers are not affected."""
    settings = OPTIONS["decay"]
    for element in (slice(None), (0, 0)):
        grads = [random_grads(s, torch.float32) for s in range(3)]
        special: Any = grads[1][1]
        special[element] = value
        lars_params, reference = both(torch.float32, grads, **settings)
        torch.testing.assert_close(lars_params, reference, equal_nan=True)
        ordinary, _ = both(
            torch.float32, [random_grads(s, torch.float32) for s in range(3)], **settings
        )
        for layer in {*range(len(SHAPES))} - {1}:
            assert torch.equal(lars_params[layer], ordinary[layer])


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_a_group_that_does_not_adapt_equals_torchs_sgd(settings: dict[str, Any]) -> None:
    lars_params, sgd_params = weights(torch.float32), weights(torch.float32)
    sgd = {k: v for k, v in settings.items() if k not in ("trust_coefficient", "eps")}
    lars_optimizer = LARS([{"params": lars_params, "adapt": False}], lr=0.1, **settings)
    sgd_optimizer = torch.optim.SGD(sgd_params, lr=0.1, fused=True, **{"momentum": 0.9, **sgd})
    for seed in range(4):
        for params, optimizer in ((lars_params, lars_optimizer), (sgd_params, sgd_optimizer)):
            step(optimizer, params, random_grads(seed, torch.float32), 0.1)
    assert all(map(torch.equal, lars_params, sgd_params))


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_parameters_without_gradient_do_not_change(settings: dict[str, Any]) -> None:
    """Some get their first gradient, and so their buffer, later; others have none later on."""
    grads = [random_grads(s) for s in range(len(LRS))]
    grads[0][1] = grads[0][5] = grads[2][0] = grads[3][0] = None
    lars_params, reference = both(torch.float64, grads, **settings)
    torch.testing.assert_close(lars_params, reference, rtol=1e-12, atol=1e-14)
    no_grads: list[Tensor | None] = [None] * len(SHAPES)
    unchanged = weights()
    assert not train(LARS, unchanged, [no_grads]).state_dict()["state"]
    assert all(map(torch.equal, unchanged, weights()))


def test_one_group_may_hold_two_types() -> None:
    trained = []
    for make in (LARS, ReferenceLARS):
        params = [*weights(torch.float64), *weights(torch.float32)]
        optimizer = make(params, lr=0.5, weight_decay=0.1)
        for seed in range(3):
            step(optimizer, params, [*random_grads(seed), *random_grads(seed, torch.float32)], 0.5)
        trained.append(params)
    torch.testing.assert_close(trained[0], trained[1])


def test_memory_layouts_may_differ() -> None:
    """Weights are channels_last; gradients and a loaded buffer are contiguous."""
    shape, trained = (4, 6, 3, 3), []
    for make in (LARS, ReferenceLARS):
        torch.manual_seed(0)
        param = nn.Parameter(torch.randn(shape).to(memory_format=torch.channels_last))
        optimizer = make([param], lr=0.5, weight_decay=0.1)
        buffer = {"state": {0: {"momentum_buffer": torch.randn(shape)}}}
        optimizer.load_state_dict({**optimizer.state_dict(), **buffer})
        for _ in range(3):
            param.grad = torch.randn(shape)
            optimizer.step()
        trained.append(param)
    torch.testing.assert_close(trained[0], trained[1])


def saved_and_loaded(state: dict[str, Any]) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("settings", OPTIONS.values(), ids=OPTIONS)
def test_a_saved_state_resumes_bit_identically(settings: dict[str, Any]) -> None:
    first = weights(torch.float32)
    optimizer = train(LARS, first, [random_grads(s, torch.float32) for s in range(2)], **settings)
    second = [nn.Parameter(param.detach().clone()) for param in first]
    other = LARS(groups(second), lr=7.0)
    step(other, second, [torch.zeros_like(p) for p in second], 0.0)
    other.load_state_dict(saved_and_loaded(optimizer.state_dict()))
    copied = copy.deepcopy(optimizer)
    third = [param for group in copied.param_groups for param in group["params"]]
    for seed, lr in enumerate(LRS):
        for params, its_optimizer in ((first, optimizer), (second, other), (third, copied)):
            step(its_optimizer, params, random_grads(seed, torch.float32), lr)
    assert all(map(torch.equal, first, second))
    assert all(map(torch.equal, first, third))


def test_all_layers_together_are_adapted_as_one_by_one() -> None:
    """The route of other devices: r (g + d w), in the layout of each gradient."""
    group = {"weight_decay": 0.1, "trust_coefficient": 0.5, "eps": 1e-8, "adapt": True}
    params = [nn.Parameter(p.detach()) for p in weights()]
    params[0].data = params[0].data.contiguous(memory_format=torch.channels_last)
    grads = [torch.empty_like(p).copy_(g) for p, g in zip(params, random_grads(0), strict=True)]
    adapted = _adapted(params, grads, group)
    for param, grad, change in zip(params, grads, adapted, strict=True):
        expected = trust_ratio(param, grad, group) * (grad + 0.1 * param.detach())
        torch.testing.assert_close(change, expected)
        assert change.stride() == grad.stride()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"lr": -0.1}, "lr must be at least 0"),
        ({"lr": math.nan}, "lr must be at least 0 and finite, not nan"),
        ({"momentum": -0.1}, "momentum"),
        ({"weight_decay": -0.1}, "weight_decay"),
        ({"trust_coefficient": -0.1}, "trust_coefficient"),
        ({"eps": math.inf}, "eps"),
    ],
)
def test_values_out_of_range_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LARS(weights(), **{"lr": 0.1, **settings})
