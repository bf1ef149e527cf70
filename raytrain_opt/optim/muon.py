"""Muon: momentum whose matrices are orthogonalized (Jordan et al. 2024).

    G        gradient of a weight as a matrix [rows, columns]: a filter bank [out, in, k, k] is
             [out, in k k], as in Jordan's implementation
    M        momentum buffer, initially 0          m      momentum
    W        weight                                d      decoupled weight decay
    |X|      Frobenius norm                        a b c  coefficients, 3.4445 -4.7750 2.0315

    M = m M + (1 - m) G                                                                (1)
    U = (1 - m) G + m M                    (Nesterov's momentum)                       (2)
    X = U / max(|U|, 1e-7)                                                             (3)
    X = a X + (b A + c A A) X, A = X X^T   five times (Newton-Schulz)                  (4)
    W = (1 - lr d) W - lr sqrt(max(1, rows / columns)) X                               (5)

(4) moves all singular values of U to about 1. A matrix with more rows than columns is transposed
for it. This is `torch.optim.Muon`, which takes matrices only. Learned positions [1, length, width]
are the matrix [length, width]. What is no matrix (biases, normalization, embeddings) follows a
second rule at a fixed part of the rate: torch's SGD with momentum, or AdamW; its weight decay is
decoupled too.

Matrices of equal shape are computed together, by few kernels. In a process group each rank
computes (3) and (4) of a part of them only, as in ZeRO (Rajbhandari et al. 2020, stage 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.optimizer import ParamsT

from raytrain_opt.config.updates import MUON_AUX_LR_MULTIPLIERS
from raytrain_opt.optim.batched import BatchedOptimizer, descend, divide_evenly

# Jordan's, which raise small singular values fastest; they end between 0.7 and 1.2, not at 1.
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS, _EPS = 5, 1e-7
# Of the second rule by AdamW.
_BETAS, _AUX_EPS = (0.9, 0.95), 1e-8
# Matrices that are computed together, at most: few kernels, and many batches to share.
_BATCH = 4


class Muon(BatchedOptimizer):
    """Momentum with orthogonalized updates, for any network. See `parameter_groups` for groups.

    Groups with `"use_muon": False` follow the second rule, `aux`: "sgd" (with `momentum`) or
    "adamw". Their rate is `lr` times `aux_lr_multiplier` (default: 0.05 with adamw, 1 with sgd):
    it becomes the group's `lr_multiplier`, by which schedules multiply. With `distributed`, the
    ranks of the default process group share the work: all take each step together, with equal
    weights and gradients.

    Raises ValueError: a value out of its range, or a parameter of a Muon group without two
    dimensions. RuntimeError: sparse or complex gradients.
    """

    # A copy has those of the class: torch copies the groups and the state.
    _aux_lr_multiplier, distributed = 1.0, False

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        *,
        momentum: float = 0.6,
        weight_decay: float = 0.0,
        aux: Literal["sgd", "adamw"] = "sgd",
        aux_lr_multiplier: float | None = None,
        distributed: bool = False,
    ) -> None:
        if aux not in MUON_AUX_LR_MULTIPLIERS:
            raise ValueError(f"Muon: aux must be one of 'adamw' and 'sgd', not {aux!r}")
        settings = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        if aux_lr_multiplier is None:
            aux_lr_multiplier = MUON_AUX_LR_MULTIPLIERS[aux]
        self._check({**settings, "aux_lr_multiplier": aux_lr_multiplier})
        self._aux_lr_multiplier, self.distributed = aux_lr_multiplier, distributed
        defaults = {**settings, "aux": aux, "betas": _BETAS, "use_muon": True}
        super().__init__(params, {**defaults, "lr_multiplier": 1.0})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; see `torch.optim.Optimizer`."""
        use_muon = param_group.get("use_muon", True)
        multiplier = param_group.get("lr_multiplier", 1.0)
        multiplier *= 1.0 if use_muon else self._aux_lr_multiplier
        lr = self.defaults["lr"] * multiplier
        super().add_param_group({"lr": lr, **param_group, "lr_multiplier": multiplier})
        for param in self.param_groups[-1]["params"] if use_muon else ():
            if param.dim() < 2:
                raise ValueError(
                    f"Muon: a parameter of shape {list(param.shape)} is no matrix; put it into a "
                    'group with "use_muon": False'
                )

    def _update_group(self, group: dict[str, Any], params: list[Any]) -> None:
        update = self._update_matrices if group["use_muon"] else self._update_others
        for batch in self._batches(params):
            if group["weight_decay"] != 0:
                torch._foreach_mul_(batch, 1.0 - float(group["lr"]) * group["weight_decay"])
            update(batch, group)

    def _update_matrices(self, params: list[Any], group: dict[str, Any]) -> None:
        grads, momentum = [p.grad for p in params], group["momentum"]
        buffers = self._buffers("momentum_buffer", params)
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum)
        matrices = [_to_matrix(u, p) for u, p in zip(updates, params, strict=True)]
        shapes = [matrix.shape for matrix in matrices]
        results = self._orthogonalize(matrices, iteration_dtype(params[0]))
        for indices in _equal_shapes(shapes):
            rows, columns = shapes[indices[0]]
            lr = float(group["lr"]) * math.sqrt(max(1, rows / columns))
            changes = [_from_matrix(results[i], params[i]).to(params[i].dtype) for i in indices]
            torch._foreach_add_([params[i] for i in indices], changes, alpha=-lr)

    def _orthogonalize(self, matrices: Sequence[Tensor], dtype: torch.dtype) -> dict[int, Tensor]:
        """Return the results of (4), by index; of all matrices, whoever computed them."""
        shapes = [matrix.shape for matrix in matrices]
        owned = divide_work(shapes, dist.get_world_size() if self.distributed else 1)
        results: dict[int, Tensor] = {}
        for indices in owned[dist.get_rank() if self.distributed else 0]:
            batch = torch.stack([matrices[i] for i in indices]).to(dtype)
            results |= zip(indices, orthogonalize(batch), strict=True)
        if self.distributed:
            indices_by_rank = [sorted(chain.from_iterable(batches)) for batches in owned]
            like = matrices[0].new_empty(0, dtype=dtype)
            return _exchange(results, shapes, indices_by_rank, like)
        return results

    def _update_others(self, params: list[Any], group: dict[str, Any]) -> None:
        lr, grads = float(group["lr"]), [p.grad for p in params]
        if group["aux"] == "sgd":
            buffers = self._buffers("momentum_buffer", params)
            descend(params, grads, buffers, group, nesterov=group["momentum"] > 0, may_fuse=False)
            return
        adamw(
            params,
            grads,
            self._buffers("exp_avg", params),
            self._buffers("exp_avg_sq", params),
            [],
            [self.state[p].setdefault("step", torch.zeros(())) for p in params],
            foreach=True,
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=lr,
            weight_decay=0.0,
            eps=_AUX_EPS,
            maximize=False,
        )


def orthogonalize(matrices: Tensor) -> Tensor:
    """Compute (3) and (4) for matrices of one shape, [n, rows, columns], in their type."""
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=_EPS)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def orthogonalization_flops(shapes: Iterable[torch.Size]) -> int:
    """Return the operations of (4) for gradients of these shapes, 2 for each product."""
    flops = 0
    for shape in shapes:
        rows, columns = sorted(without_batch(torch.empty(shape, device="meta")).flatten(1).shape)
        flops += _ITERATIONS * (4 * rows**2 * columns + 2 * rows**3)
    return flops


def divide_work(shapes: Sequence[torch.Size], ranks: int) -> list[list[list[int]]]:
    """Return the batches of matrices, as indices, of each rank, about equal in work."""
    # The same for any number of ranks, because a kernel may round by their size.
    batches = [
        indices[start : start + _BATCH]
        for indices in _equal_shapes(shapes)
        for start in range(0, len(indices), _BATCH)
    ]
    costs = [len(batch) * min(s := shapes[batch[0]]) * s.numel() for batch in batches]
    return [[batches[i] for i in own] for own in divide_evenly(costs, ranks)]


def _exchange(
    own: Mapping[int, Tensor],
    shapes: Sequence[torch.Size],
    owned: Sequence[Sequence[int]],
    like: Tensor,
) -> dict[int, Tensor]:
    """Return the results of all ranks, typed as `like`, with one all-gather of padded bytes."""
    lengths = [[shapes[i].numel() for i in indices] for indices in owned]
    longest = max(map(sum, lengths))
    flat = [own[i].reshape(-1) for i in sorted(own)]
    message = torch.cat([*flat, like.new_zeros(longest - sum(map(len, flat)))])
    gathered = like.new_empty(len(owned) * longest)
    dist.all_gather_into_tensor(gathered.view(torch.uint8), message.view(torch.uint8))
    return {
        index: part.view(shapes[index])
        for indices, sizes, row in zip(owned, lengths, torch.split(gathered, longest), strict=True)
        for index, part in zip(indices, torch.split(row[: sum(sizes)], sizes), strict=True)
    }


def _equal_shapes(shapes: Sequence[torch.Size]) -> list[list[int]]:
    """Return lists of the indices at which shapes are equal."""
    by_shape: dict[torch.Size, list[int]] = {}
    for index, shape in enumerate(shapes):
        by_shape.setdefault(shape, []).append(index)
    return list(by_shape.values())


def without_batch(tensor: Tensor) -> Tensor:
    """Return the matrix of parameters that are alike for a batch, [1, length, width]."""
    return tensor[0] if tensor.dim() == 3 and len(tensor) == 1 else tensor


def _memory_order(param: Tensor) -> list[int]:
    """Return the first dimension, then the others as they lie in memory (channels_last)."""
    return [0, *sorted(range(1, param.dim()), key=param.stride, reverse=True)]


def _to_matrix(tensor: Tensor, param: Tensor) -> Tensor:
    """Return the matrix of a gradient or update; the order of its columns does not matter."""
    return without_batch(tensor).permute(_memory_order(without_batch(param))).flatten(1)


def _from_matrix(matrix: Tensor, param: Tensor) -> Tensor:
    like = without_batch(param)
    order = _memory_order(like)
    inverse = [order.index(d) for d in range(like.dim())]
    return matrix.reshape([like.shape[d] for d in order]).permute(inverse).view_as(param)


def iteration_dtype(param: Tensor) -> torch.dtype:
    """Return the type of (4): bfloat16 on a GPU; on a CPU, which is slow at it, float32."""
    on_cpu = param.device.type == "cpu"
    return torch.promote_types(param.dtype, torch.float32) if on_cpu else torch.bfloat16
