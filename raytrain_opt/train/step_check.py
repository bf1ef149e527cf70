"""Check before a run that a training step depends on the state and the batch only.

Candidates, restarts and resumed runs all start from `state_dict()`. So the first step is computed
twice from one state, and an evaluation is repeated by a network that only has a state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from raytrain_opt.data.base import Batch
from raytrain_opt.data.batch_reader import cause
from raytrain_opt.errors import JobError, Problem, first_of
from raytrain_opt.models.factory import check_output, preserve_model
from raytrain_opt.optim.update import set_lr
from raytrain_opt.random_state import find_generators, seed_all
from raytrain_opt.train.checkpoint import require_readable
from raytrain_opt.train.state import capture, restore
from raytrain_opt.train.task import Classification, Task, evaluate_once, explained, require_scalar

# The same operations on a CPU give the same bits, unless memory is aligned in another way.
_RTOL, _ATOL = 1e-4, 1e-7
_LR = 0.1  # of updates on trial
# A gradient step this much smaller would change a parameter, too. Other gradients are rounding
# errors, such as the ones of biases before a BatchNorm layer.
_VISIBLE = 1e3
_UPDATES = 16


def check_steps(
    task: Task,
    model: nn.Module,
    train: Batch,
    test: Batch,
    num_classes: int,
    optimizers: Sequence[torch.optim.Optimizer] = (),
) -> None:
    """Try the first step and an evaluation on the CPU.

    `train` and `test` hold two real samples, or one. `optimizers`: of the user's own. Model and
    task are preserved. Raises DataError for an exception of their code. Raises JobError: the loss
    needs no gradient or depends on parameters outside the network, gradients are sparse, a result
    depends on something that `state_dict()` does not hold, an optimizer does not train all
    parameters, or its state cannot be saved and loaded.
    """
    if isinstance(task, Classification):
        check_output(model, test.x, num_classes)
    cpu, parameters = torch.device("cpu"), dict(model.named_parameters())
    start = _copies(model.state_dict())
    with preserve_model(model, cpu, task):
        before = _not_saved(model, task)
        first = _step(task, model, train)
        between = _not_saved(model, task)
        _require_same_tensors(model, start, parameters)
        reached, used = _copies(model.state_dict()), _evaluate(task, model, test)
        model.load_state_dict(start)
        again = _step(task, model, train)
        changed = _different(before, between)
        if _different(first, again) or _different(reached, model.state_dict()):
            raise _depends("a second training step from the same weights", changed)
        counting = set(changed) & set(_different(between, _not_saved(model, task)))
        if counters := [n for n in counting if isinstance(before.get(n), int | Tensor)]:
            raise _depends("each training step", counters)
        for optimizer in optimizers:
            _try_update(model, optimizer)
    with preserve_model(model, cpu, task):
        try:
            model.load_state_dict(reached)
        except RuntimeError as error:
            rule = f"a state_dict() of this network cannot be loaded again: {error}"
            raise JobError([Problem("model.name", rule)]) from error
        if _different(used, _evaluate(task, model, test)):
            raise _depends("an evaluation with weights that were loaded", changed)
    model.zero_grad(set_to_none=True)


def _step(task: Task, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Compute a step without the update; return the loss and the gradients' norms."""
    model.zero_grad(set_to_none=True)
    seed_all(0, generators=find_generators(task, model))
    model.train()
    # As DistributedDataParallel has them: parameters and mode, but no attributes of the model.
    module: Any = nn.Module()
    module.module, module.forward = model, model.__call__
    try:
        with torch.enable_grad():
            loss = task.training_loss(module, batch.content)
            require_scalar(loss)
            own = {id(p) for p in model.parameters()}
            others = [str(list(p.shape)) for p in _parameters_of(loss) if id(p) not in own]
            if loss.requires_grad:
                loss.backward()  # type: ignore[no-untyped-call]
    except Exception as error:
        raise explained(task, error, batch, "training_loss", module) from error
    field = "model.name" if isinstance(task, Classification) else "task.name"
    if not loss.requires_grad:
        hint = "remove no_grad, detach, argmax, round or item from what computes it"
        raise JobError([Problem(field, "the training loss needs no gradient", None, hint)])
    if others:
        rule = f"the loss depends on parameters outside the network; shapes: {first_of(others)}"
        hint = "make them attributes of the network, or freeze them: requires_grad_(False)"
        raise JobError([Problem("task", rule, None, hint)])
    gradients = {n: p.grad.detach() for n, p in model.named_parameters() if p.grad is not None}
    if sparse := [n for n, gradient in gradients.items() if gradient.layout != torch.strided]:
        rule = f"has sparse gradients ({first_of(sparse)}), which are not supported"
        hint = "without sparse=True, Embedding computes the same with dense ones"
        raise JobError([Problem("model.name", rule, None, hint)])
    norms = {name: torch.linalg.vector_norm(gradient) for name, gradient in gradients.items()}
    return {"loss": loss.detach(), **norms}


def _parameters_of(loss: Tensor) -> Iterator[nn.Parameter]:
    nodes = [loss.grad_fn] if loss.grad_fn is not None else []
    seen = set(nodes)
    for node in nodes:  # which grows
        if isinstance(leaf := getattr(node, "variable", None), nn.Parameter):
            yield leaf
        inputs = {n: None for n, _ in node.next_functions if n is not None and n not in seen}
        seen.update(inputs)
        nodes += inputs


def _try_update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raise JobError if updates cannot be computed, leave parameters out, or cannot be saved."""
    set_lr(optimizer, _LR)
    before = _copies(dict(model.named_parameters()))
    try:
        for _ in range(_UPDATES):  # a warm-up may begin at 0, and not every call may update
            optimizer.step()
    except (TypeError, AttributeError, AssertionError) as error:
        rule = f"its step() raised {cause(error)}"
        hint = "the loop computes the gradients and then calls step() without arguments"
        raise JobError([Problem("optimizer.name", rule, None, hint)]) from error
    except Exception:  # noqa: BLE001 - it may need a GPU, which the driver's node need not have
        return
    rates = {p: float(g["lr"]) for g in optimizer.param_groups for p in g["params"]}
    if untrained := [
        name
        for name, p in model.named_parameters()
        if p.grad is not None
        and torch.equal(p, before[name])
        and not torch.equal(p, p - rates.get(p, 0.0) / _VISIBLE * p.grad)
    ]:
        rule = f"does not change parameters that have a gradient: {first_of(untrained)}"
        hint = "train them in `step`, or freeze them: model.freeze"
        raise JobError([Problem("optimizer.name", rule, None, hint)])
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    try:
        state = capture(model, optimizer, scaler, copy=True)
        require_readable(state)
        restore(state, model, optimizer, scaler)
    except JobError:
        raise
    except Exception as error:  # whatever an own state_dict raises
        rule = f"its state after a step cannot be saved and loaded: {cause(error)}"
        hint = "keep tensors, numbers, texts, lists and dicts in its groups and state"
        raise JobError([Problem("optimizer.name", rule, None, hint)]) from error


def _evaluate(task: Task, model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    seed_all(0, generators=find_generators(task, model))
    values = evaluate_once(task, model, batch)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _require_same_tensors(
    model: nn.Module, start: Mapping[str, Tensor], parameters: Mapping[str, nn.Parameter]
) -> None:
    old, new = ({n: t.shape for n, t in s.items()} for s in (start, model.state_dict()))
    changed = [n for n in sorted(old.keys() | new.keys()) if old.get(n) != new.get(n)]
    own = dict(model.named_parameters())
    changed += [n for n in own if own[n] is not parameters.get(n, own[n])]
    if changed:
        rule = f"the first training step replaces tensors, or their shapes: {first_of(changed)}"
        hint = "build all of them in the constructor, in their final shape"
        raise JobError([Problem("model.name", rule, None, hint)])


def _not_saved(model: nn.Module, task: Task) -> dict[str, Any]:
    """Return what `state_dict()` does not hold: attributes of layers and task, other buffers."""
    layers = {f"{name}.".lstrip("."): layer for name, layer in model.named_modules()}
    owners: dict[str, Any] = {**layers, "task.": task}
    ordinary, saved = vars(nn.Module()).keys(), model.state_dict().keys()
    attributes = {
        f"{prefix}{name}": value
        for prefix, owner in owners.items()
        for name, value in getattr(owner, "__dict__", {}).items()
        if name not in ordinary
    }
    return {
        name: value.detach().clone() if isinstance(value, Tensor) else _summary(value)
        for name, value in (*attributes.items(), *model.named_buffers())
        if name not in saved
    }


def _summary(value: Any) -> Any:
    if isinstance(value, bool | int | float | str):
        return value
    return id(value), len(value) if isinstance(value, Collection) else 0


def _depends(what: str, names: Iterable[str]) -> JobError:
    names = sorted(names)
    owner = "the task" if names and all(n.startswith("task.") for n in names) else "the network"
    held = first_of(names) if names else "a value, such as a random generator of its own,"
    rule = (
        f"{what} depends on {held} that {owner} changes and state_dict() does not hold: "
        "candidates and resumed runs would use another value"
    )
    hint = "register it in the network as a buffer (register_buffer) that is changed in place"
    field = "task.name" if owner == "the task" else "model.name"
    return JobError([Problem(field, rule, None, hint)])


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def _different(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    names = sorted(before.keys() | after.keys())
    return [n for n in names if not _is_close(before.get(n), after.get(n))]


def _is_close(before: Any, after: Any) -> bool:
    if not (isinstance(before, Tensor) and isinstance(after, Tensor)):
        return type(before) is type(after) and bool(before == after)
    if before.shape != after.shape or before.dtype != after.dtype:
        return False
    if not (before.is_floating_point() or before.is_complex()):
        return torch.equal(before, after)
    return torch.allclose(before, after, _RTOL, _ATOL, equal_nan=True)
