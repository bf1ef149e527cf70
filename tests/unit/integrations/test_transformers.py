"""A model of transformers with collator and compute_metrics trains as it is."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForQuestionAnswering,
    BertForTokenClassification,
    EvalPrediction,
)

from raytrain_opt import Job, load_model, run
from raytrain_opt.errors import DataError, JobError
from raytrain_opt.integrations.transformers import from_model
from tests.support.documents import example
from tests.support.small_jobs import read_lines, without_times

STPT = {"policy": "stpt", "initial": 0.01, "candidates": [1.0, 0.3], "alpha": 4}


def small_job(folder: Path, *arguments: Any, **fields: Any) -> Job:
    defaults = {
        "epochs": 2,
        "global_batch_size": 50,
        "learning_rate": STPT,
        "optimizer": "AdamW",
        "storage_path": str(folder),
    }
    return from_model(*arguments, **{**defaults, **fields})


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return example("transformers.md", "Reviews", tmp_path, monkeypatch, "hf")


@pytest.mark.usefixtures("without_plots")
def test_the_documented_model_is_searched_trained_and_resumed(
    tmp_path: Path, reviews: ModuleType
) -> None:
    def job(name: str, epochs: int) -> Job:
        parts = (reviews.train, reviews.test, reviews.collator, reviews.compute_metrics)
        fields = {"epochs": epochs, "workers": {"count": 2}, "data": {"loader_workers": 0}}
        data = {"metric_for_best_model": "eval_f1", "evaluate": {"batch_size_per_worker": 32}}
        return small_job(tmp_path / name, reviews.model, *parts, **fields, **data)

    whole, first = run(job("a", 3), in_process=True), run(job("b", 2), in_process=True)
    resumed = run(job("b", 3), in_process=True, resume=first.run_dir)
    rounds = [without_times(read_lines(r.run_dir, "rounds")) for r in (whole, resumed)]
    assert rounds[0] == rounds[1]

    network: Any = load_model(resumed.run_dir, model=reviews.model).network
    samples = [reviews.test[i] for i in range(len(reviews.test))]
    texts = [{k: v for k, v in sample.items() if k != "text"} for sample in samples]
    batch = reviews.collator(texts)
    with torch.no_grad():
        logits = network(**batch).logits.numpy()

    whole_set = EvalPrediction(predictions=logits, label_ids=batch["labels"].numpy())
    assert resumed.test_metric == pytest.approx(reviews.compute_metrics(whole_set)["f1"])
    assert resumed.test_metric > 0  # type: ignore[operator]


class Tokens(torch.utils.data.Dataset[dict[str, Any]]):
    """Sentences of 2 to 6 tokens; the label of a token is whether it is odd."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> dict[str, Any]:
        ids = torch.arange(index, index + 2 + index % 5) % 10
        return {"input_ids": ids, "labels": ids % 2}


def pad(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    size = max(len(sample["labels"]) for sample in samples)
    padded = {"input_ids": torch.zeros(len(samples), size, dtype=torch.int64)}
    padded["labels"] = torch.full((len(samples), size), -100)
    for row, sample in enumerate(samples):
        for name, value in sample.items():
            padded[name][row, : len(value)] = value
    return padded


def count_tokens(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids
    assert prediction.predictions.shape == (*labels.shape, 2)
    assert len(labels) < 60 or labels.shape == (60, 6)
    counted = labels != -100
    hits = (prediction.predictions.argmax(-1) == labels) & counted
    return {"eval_tokens": float(counted.sum()), "accuracy": float(np.mean(hits[counted]))}


def token_model() -> BertForTokenClassification:
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    return BertForTokenClassification(BertConfig(vocab_size=10, intermediate_size=8, **sizes))


@pytest.mark.usefixtures("without_plots")
def test_predictions_of_unequal_length_are_padded_to_one_array(tmp_path: Path) -> None:
    data = {"evaluate": {"batch_size_per_worker": 2}, "epochs": 1, "global_batch_size": 10}
    job = small_job(tmp_path, token_model(), Tokens(), Tokens(), pad, count_tokens, **data)
    result = run(job, in_process=True)
    [epoch] = read_lines(result.run_dir, "epochs")
    assert epoch["test_metrics"]["tokens"] == 60 * 4
    assert {*epoch["test_metrics"]} == {"loss", "tokens", "accuracy"}
    assert epoch["metric"] == {"name": "loss", "higher_is_better": False}


def without_labels(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    return {"input_ids": pad(samples)["input_ids"]}


def test_targets_are_in_the_order_of_the_models_arguments(tmp_path: Path) -> None:
    model = BertForQuestionAnswering(BertConfig(hidden_size=4, num_attention_heads=1))
    labels = small_job(tmp_path, model, [{}], [{}]).task.name.value.labels  # type: ignore[union-attr]
    assert [name for name in labels if "_" in name][:2] == ["start_positions", "end_positions"]


def test_a_batch_without_labels_is_an_error(tmp_path: Path) -> None:
    job = small_job(tmp_path, token_model(), Tokens(), Tokens(), without_labels)
    with pytest.raises((DataError, JobError), match="returns no loss for batches with input_ids"):
        run(job, in_process=True)
