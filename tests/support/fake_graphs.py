"""`torch.cuda.make_graphed_callables` without a GPU: what a caller of it can notice.

Inputs, outputs and gradients have fixed memory, which each pass overwrites; capturing runs some
passes, which change buffers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

WARM_UP_PASSES = 3


class FakeGraphs:
    """Counts captured networks, and passes that ran as graphs.

    `factor` multiplies their outputs, as if the network had decided something at the capture.
    """

    def __init__(self, *, fails: bool = False) -> None:
        self.captured, self.replayed, self.factor, self._fails = 0, 0, 1.0, fails

    def clock(self, graph_s: float = 0.5) -> Callable[[], float]:
        """Return a clock on which a pass takes a second, and one that runs as graphs `graph_s`."""
        now, replayed = 0.0, self.replayed

        def now_s() -> float:
            nonlocal now, replayed
            now += graph_s if self.replayed > replayed else 1.0
            replayed = self.replayed
            return now

        return now_s

    def make_graphed_callables(
        self, network: Any, inputs: tuple[Tensor, ...], *, allow_unused_input: bool
    ) -> Any:
        """See torch."""
        assert allow_unused_input
        assert not torch.is_autocast_cache_enabled() or not torch.is_autocast_enabled()
        assert network.training
        if self._fails:
            raise RuntimeError("planted failure")
        self.captured += 1
        parameters = [p for p in network.parameters() if p.requires_grad]
        fixed: dict[str, Any] = {}

        captured = network.model.forward  # a graph does not call what is called instead later

        def run() -> Tensor:
            with torch.enable_grad():
                output: Tensor = captured(*inputs) * self.factor
            return output

        for _ in range(WARM_UP_PASSES):
            output = network(*inputs)
        fixed["output"] = output.detach().clone()
        fixed["gradients"] = [torch.empty_like(p) for p in parameters]
        fakes = self

        class Graphed(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, *args: Tensor) -> Tensor:
                fakes.replayed += 1
                for own, given in zip(inputs, args, strict=False):
                    own.copy_(given)
                output = run()
                ctx.output = output
                fixed["output"].copy_(output.detach())
                returned: Tensor = fixed["output"].detach()
                return returned

            @staticmethod
            def backward(ctx: Any, gradient: Tensor) -> Any:
                results = torch.autograd.grad(ctx.output, parameters, gradient, allow_unused=True)
                returned: list[Tensor | None] = [None] * len(inputs)
                for own, result in zip(fixed["gradients"], results, strict=True):
                    returned.append(None if result is None else own.copy_(result).detach())
                return tuple(returned)

        return lambda *args: Graphed.apply(*args, *parameters)
