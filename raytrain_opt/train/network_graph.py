"""The forward and backward pass of a network as CUDA graphs, by `make_graphed_callables` of torch.

Each pass is one launch, however many kernels it has. Loss, exchange of gradients, clipping and
update stay outside, so every optimizer, number format and way to exchange works as it does
without. The CPU launches their kernels while the GPU computes the graphs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_map_only

from raytrain_opt.train.compilation import eager


class NetworkGraph:
    """Graphs of a network for inputs of the shapes of `inputs`.

    Where the network gets others, it runs without graphs and not compiled. `trained` are the
    parameters that its backward pass reaches. Parameters must stay where they are in memory, and
    DDP must not wrap the network during the capture, in which some passes change its buffers. The
    memory of the activations is kept. `autocast` must not cache casts of the weights.

    Raises RuntimeError or AssertionError: the network cannot be captured, for example because it
    reads values of the device.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: tuple[Any, ...],
        trained: Sequence[nn.Parameter],
        autocast: AbstractContextManager[object],
    ) -> None:
        self._model, self._forward, self._trained = model, model.forward, trained
        self._shapes = _shapes(inputs)
        inputs = tree_map_only(Tensor, Tensor.clone, inputs)
        with autocast, _same_stream(next(model.parameters()).device):
            self._graphed: Any = torch.cuda.make_graphed_callables(
                _Network(model), inputs, allow_unused_input=True
            )

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model's calls run the graphs, in place of compiled code, if any."""
        model = self._model
        own = {key: value for key, value in vars(model).items() if key == "forward"}
        model.forward = self.forward
        try:
            with eager(model):
                yield
        finally:
            del model.forward
            vars(model).update(own)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph of the forward pass; its backward pass runs the other one."""
        if not kwargs and _shapes(args) == self._shapes:
            return self._graphed(*args)
        return self._forward(*args, **kwargs)

    def zero_grad(self) -> None:
        """Set the gradients to zero, in memory of their own.

        Where there is none, the backward pass would leave that of its graph, which the next
        micro-batch of the update overwrites.
        """
        for parameter in self._trained:
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        torch._foreach_zero_([p.grad for p in self._trained if p.grad is not None])


def _same_stream(device: torch.device) -> AbstractContextManager[object]:
    """Return to the current stream afterwards: a failed capture of torch before 2.15 does not."""
    if device.type != "cuda":
        return nullcontext()
    return torch.cuda.stream(torch.cuda.current_stream(device))


class _Network(nn.Module):
    """Calls a network as its owner does, compiled or not; torch changes `forward` of this one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *args: Any) -> Any:
        return self.model(*args)


def _shapes(inputs: tuple[Any, ...]) -> tuple[object, ...]:
    """Return the nesting of the inputs, and the shape and type of each tensor."""
    leaves, nesting = tree_flatten(inputs)
    return nesting, *((v.shape, v.dtype) if isinstance(v, Tensor) else type(v) for v in leaves)
