"""The settings of an update by one micro-batch, from those of a step of P micro-batches.

    P        micro-batches of one step          lr, d    rate and decoupled weight decay of a step
    m        momentum of the optimizer          t        mean staleness, in updates
    w, D     weights, and their change by the last update

P updates must move and decay the weights as far as one step did.

rate      lr / P. Where the size of an update does not depend on that of the gradient (Adam and its
          kin, RMSprop, Adagrad, Adadelta, Adafactor, Muon, LARS), updates by small batches are
          less alike, and P of them move the weights sqrt(P) times as far: lr / sqrt(P) and
          d / sqrt(P), the square-root rule of Krizhevsky and of Malladi et al. 2022 (arXiv
          2205.10287). With t > P, which a slow network causes, also times sqrt(P / t). Zhang et
          al. 2016 (arXiv 1511.05950) divide by t, which cost more where staleness did no harm
          than it gained where it did.
momentum  stays, per update, so that its mean covers a P-th of the samples: staleness acts as more
          momentum (Mitliagkas et al., Asynchrony Begets Momentum, 2016).
weights   Momentum moves the weights on while a gradient is computed. In a direction of curvature
          h, momentum with a delay of one step diverges from h lr = 1 - m on, synchronous training
          from h lr = 2 (1 + m). So workers get the weights that momentum alone will have reached
          when the gradient arrives, w + (m + m^2 + ... + m^t) D (as DANA: Hakimi et al. 2019,
          arXiv 1907.11612, with D in place of the optimizer's buffer).
"""

from __future__ import annotations

import math
from typing import Any

Group = dict[str, Any]
CONVERTED = ("lr_multiplier", "weight_decay")
# Settings that only Adam and its kin, RMSprop, Adagrad, Adadelta and Adafactor have.
_NORMALIZED = {"betas", "centered", "initial_accumulator_value", "rho", "beta2_decay"}


def convert(group: Group, micro_batches: int) -> Group:
    """Return the settings that change, for a parameter group of any optimizer."""
    if not _is_normalized(group):
        return {"lr_multiplier": group.get("lr_multiplier", 1.0) / micro_batches}
    factor = micro_batches**-0.5
    changes = {"lr_multiplier": group.get("lr_multiplier", 1.0) * factor}
    if group.get("decoupled_weight_decay") or {"use_muon", "beta2_decay"} & group.keys():
        changes["weight_decay"] = group["weight_decay"] * factor
    return changes


def stale_lr_factor(micro_batches: int, staleness: float) -> float:
    """Return the factor of the rate while gradients are on average this stale."""
    return 1.0 if staleness <= micro_batches else math.sqrt(micro_batches / staleness)


def look_ahead(group: Group, staleness: float) -> float:
    """Return m + m^2 + ... + m^t for the group's momentum; 0 without momentum."""
    if "weight_lr_power" in group:  # schedule-free: its beta is a place between two averages
        return 0.0
    momentum: float = group.get("momentum") or group.get("betas", (0.0,))[0]
    if group.get("aux") == "adamw" and not group["use_muon"]:
        momentum = group["betas"][0]
    return float(momentum * (1 - momentum**staleness) / (1 - momentum))


def _is_normalized(group: Group) -> bool:
    """Return whether the size of an update does not depend on that of the gradient."""
    if "use_muon" in group:
        return bool(group["use_muon"] or group["aux"] == "adamw")
    return bool(_NORMALIZED & group.keys() or group.get("adapt"))
