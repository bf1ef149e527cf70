"""The benchmark of ensembles."""

from __future__ import annotations

import torch

from benchmarks.ensemble import compare
from raytrain_opt.commands.evaluate import Predictions


def test_an_ensemble_of_members_that_err_on_different_samples_errs_less() -> None:
    labels = torch.arange(8)
    right = torch.eye(8)
    members = []
    for start in (0, 4):  # wrong on four samples each, where the other one is sure
        probabilities = right.clone()
        probabilities[start : start + 4] = (1 - right[start : start + 4]) / 7
        members.append(Predictions(probabilities, labels))
    rates = compare(members)
    assert rates["top1_error"] == {"members": [50.0, 50.0], "mean": 50.0, "ensemble": 0.0}
    assert rates["top5_error"]["ensemble"] == 0.0
