"""Choose compilation and CUDA graphs of a training step by measuring them."""

from __future__ import annotations

import gc
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Compile
from raytrain_opt.data.base import Batch
from raytrain_opt.models.dry_run import preserve_model
from raytrain_opt.train.compilation import compile_model, eager
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.network_graph import NetworkGraph
from raytrain_opt.train.precision import autocast_dtype
from raytrain_opt.train.reductions import reduce_max

_TIMED_PASSES = 3
# Compiling takes a minute or more, which a short training would not gain back.
_TRIAL_AFTER_S = 300.0
# Gradients of the same network may differ by this fraction of their norm.
_ROUNDING = 0.01


class StepChoices:
    """Measures once what compiling the model and CUDA graphs of it bring.

    `compile: auto` keeps what is faster on all ranks: it compiles a model that is not compiled
    after five minutes of training, on trial. `cuda_graphs` stay where they are faster, which
    includes the exchange of gradients, and have the same gradients on all ranks; they are captured
    anew after that trial. Nothing is measured where the forward pass needs all workers. All ranks
    must make the same calls.
    """

    def __init__(self, learner: Learner, *, auto_compile: bool, cuda_graphs: bool) -> None:
        self._learner, self._auto, self._try_graphs = learner, auto_compile, cuda_graphs
        self._trained_s = 0.0
        # Seconds of forward and backward of a micro-batch, and why there are no graphs.
        self.measured: dict[str, float | str | None] = {}

    def after_phase(self, trained_s: float) -> None:
        """Measure or decide after a phase of training that took this long."""
        learner = self._learner
        if learner.config.batch_norm.sync:
            return
        if "compiled_s" not in self.measured:
            self._choose_compiling(trained_s)
        if self._try_graphs and ("compiled_s" in self.measured or learner.compiled == "off"):
            self._try_graphs = False
            learner.network_graph, measured = try_graphs(learner)
            self.measured |= measured

    def _choose_compiling(self, trained_s: float) -> None:
        learner = self._learner
        if learner.compiled != "off":
            compiled_s, eager_s = reduce_max(time_compiled(learner), learner.device)
            if self._auto and compiled_s >= eager_s:
                self._compile("off")
            eager = eager_s if math.isfinite(eager_s) else None
            self.measured |= {"compiled_s": compiled_s, "eager_s": eager}
        elif self._auto:
            [self._trained_s] = reduce_max([self._trained_s + trained_s], learner.device)
            if self._trained_s >= _TRIAL_AFTER_S:
                self._compile("default")

    def _compile(self, setting: Compile) -> None:
        """Compile the model, or no longer; graphs are of the code that there was before."""
        learner = self._learner
        learner.compiled = compile_model(setting, learner.model, learner.device)
        if learner.network_graph is not None:
            learner.network_graph, self._try_graphs = None, True


def describe_step(learner: Learner) -> dict[str, object]:
    """Return precision, kernels, memory format, compiling, optimizer and loaders of the steps."""
    precision, optimizer = learner.config.precision, learner.optimizer
    if precision == "auto":
        precision = "fp32" if autocast_dtype("auto", learner.device) is None else "bf16"
    is_image = len(learner.info.sample_shape) == 3
    kinds = [kind for kind in ("fused", "foreach") if optimizer.defaults.get(kind)]
    return {
        "precision": precision,
        "kernels": learner.kernels,
        "memory_format": "channels_last"
        if learner.config.channels_last and is_image
        else "contiguous",
        "compile": learner.compiled,
        "cuda_graphs": learner.network_graph is not None,
        "optimizer": " ".join([*kinds, type(optimizer).__name__]),
        "loader_processes": learner.data.processes,
    }


def time_compiled(learner: Learner) -> tuple[float, float]:
    """Return the seconds of forward and backward of a micro-batch, compiled and eager.

    Call it after a phase of training, in which the model was compiled. The state stays the same.
    Eager passes need more memory: infinite where there is not enough of it.
    """
    model = learner.model
    [batch] = learner.micro_batches_at([(0, 0)])
    with preserve_model(model, learner.device, learner.task):
        model.train()
        compiled_s, eager_s = _fastest(learner, model, batch)[0], math.inf
        with suppress(torch.OutOfMemoryError), eager(model):
            eager_s = _fastest(learner, model, batch)[0]
    learner.release_memory()
    return compiled_s, eager_s


def try_graphs(learner: Learner) -> tuple[NetworkGraph | None, dict[str, float | str | None]]:
    """Capture graphs of the network, and compare them with passes without, on another batch.

    Returns them if they are worth it on all ranks, and what was measured. The state stays the
    same. All ranks must call this together.
    """
    model, graph, graph_s, refused = learner.model, None, math.inf, ""
    steps = learner.info.steps_per_epoch(learner.config.global_batch_size)
    passes = max(1, len(learner.parallel.indices(0)))  # of an update; 0 before the first phase
    first, other = learner.micro_batches_at([(0, 0), (min(1, steps - 1), 0)])
    with preserve_model(model, learner.device, learner.task), learner.parallel.unwrapped():
        model.train()
        no_graph_s, expected = _fastest(learner, model, other)
        reached = zip(_parameters(model), expected, strict=True)
        trained = [parameter for parameter, gradient in reached if gradient is not None]
        try:
            inputs = _inputs(learner, first)
            gc.collect()  # no older graph may be freed during a capture
            graph = NetworkGraph(model, inputs, trained, learner.autocast(cache=False))
            graph_s, gradients = _fastest(learner, graph.forward, other)
            if not _are_equal(gradients, expected):
                refused = "its gradients differ"
            # Inputs of other shapes need memory beside that of the graphs.
            _gradients(learner, model, other)
        except Exception as error:  # noqa: BLE001 - whatever a network does that no graph can
            refused = f"{type(error).__name__}: {error}".splitlines()[0]
        inputs = gradients = ()  # they may lie in the memory of a graph that is not kept
    values = [graph_s, no_graph_s, learner.parallel.exchange_s(), float(bool(refused))]
    graph_s, no_graph_s, exchange_s, is_refused = reduce_max(values, learner.device)
    if is_refused:
        refused = refused or "another worker cannot"
    elif graph_s >= no_graph_s:
        refused = "not faster"
    # The gradients of a graph are all ready at its end; others are exchanged meanwhile.
    elif passes * graph_s + exchange_s >= (passes - 1) * no_graph_s + max(no_graph_s, exchange_s):
        refused = "not faster, because the exchange of gradients begins later"
    if refused:
        graph = None
        gc.collect()  # torch's graphs are parts of cycles of references
        learner.release_memory()
    return graph, {
        "graph_s": graph_s if math.isfinite(graph_s) else None,
        "no_graph_s": no_graph_s,
        "graph_refused": refused or None,
    }


def _inputs(learner: Learner, batch: Batch) -> tuple[Any, ...]:
    """Return what the task calls the network with.

    Raises ValueError or RuntimeError if no graph can do that: before a capture, which should not
    fail, because torch before 2.13 cannot go on after that.
    """
    calls: list[tuple[Any, ...]] = []
    buffers = list(learner.model.buffers())

    def forward(*args: Any, **kwargs: Any) -> Any:
        if kwargs or calls:
            raise ValueError("the task calls the network twice, or with keyword arguments")
        calls.append(args)
        with _refuse_waiting(learner.device):
            return learner.model(*args)

    _gradients(learner, forward, batch)
    if {*map(id, learner.model.buffers())} != {*map(id, buffers)}:
        raise ValueError("the network replaces a buffer, which a graph would go on to read")
    return calls[0]


@contextmanager
def _refuse_waiting(device: torch.device) -> Iterator[None]:
    """Raise a RuntimeError where the host waits for a GPU."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch calls this a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _fastest(
    learner: Learner, forward: Callable[..., Any], batch: Batch
) -> tuple[float, Sequence[Tensor | None]]:
    """Return the seconds of the fastest of some forward and backward passes, and the gradients."""
    times_s = []
    for _ in range(1 + _TIMED_PASSES):  # the first one warms up
        started_s = monotonic_s()
        gradients = _gradients(learner, forward, batch)
        learner.wait_for_device()
        times_s.append(monotonic_s() - started_s)
    return min(times_s[1:]), gradients


def _gradients(
    learner: Learner, forward: Callable[..., Any], batch: Batch
) -> Sequence[Tensor | None]:
    torch.manual_seed(0)  # each micro-batch of a training has its own seed
    with learner.autocast():
        loss = learner.task.training_loss(forward, batch.content)  # type: ignore[arg-type]
    # Unlike a backward pass, this leaves the parameters' gradients and DDP alone.
    return torch.autograd.grad(loss, _parameters(learner.model), allow_unused=True)


def _parameters(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def _are_equal(gradients: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Return whether two gradients are equal within rounding, which bfloat16 makes coarse."""
    if [g is None for g in gradients] != [g is None for g in expected]:
        return False
    left, right = ([g for g in given if g is not None] for given in (gradients, expected))
    difference = get_total_norm(torch._foreach_sub(left, right))
    return bool(difference <= _ROUNDING * get_total_norm(right))
