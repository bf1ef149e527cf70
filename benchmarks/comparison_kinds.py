"""Tasks of the kinds that people bring, which the search was not built on, and their data.

Each has four lengths, `NAME@UPDATES`, short ones with larger batches. Data are made here, from
fixed seeds, but for the images:

    encoder_600, _4000      made-up texts in two classes, for an encoder as BERT is built
    characters              the next character of the standard library's source, a transformer
    table                   a made-up table of numbers and categories, an MLP
    gru                     the next character again, a GRU
    segmentation            the pixels of discs and boxes, a small U of convolutions; IoU
    vit, convnext           CIFAR-100's coarse labels at 16 x 16
    fine_tuning             a ResNet-8 trained on 50 classes of CIFAR-100, then on 50 others
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.comparison_tasks import OTHER_DATA, OTHER_NETWORKS, Pair, Task, read_cifar100

_HERE, _NETWORKS = f"{__name__}:", "benchmarks.comparison_networks:"
_KINDS = (
    Task("encoder_600", f"{_HERE}texts", 32, 540, 60, network=f"{_HERE}encoder", width=32),
    Task("encoder_4000", f"{_HERE}texts", 32, 3600, 400, network=f"{_HERE}encoder", width=32),
    replace(OTHER_DATA["text_transformer"], name="characters"),
    Task("table", f"{_HERE}table", 16, 3687, 409, network=f"{_NETWORKS}mlp", width=64),
    replace(OTHER_DATA["text_gru"], name="gru"),
    Task(
        "segmentation",
        f"{_HERE}shapes",
        16,
        922,
        102,
        network=f"{_HERE}segmentation_network",
        task=f"{_HERE}Segmentation",
    ),
    replace(OTHER_NETWORKS["vit_coarse"], name="vit"),
    replace(OTHER_NETWORKS["convnext_coarse"], name="convnext"),
    Task(
        "fine_tuning",
        f"{_HERE}last_classes",
        16,
        1800,
        200,
        crop=2,
        width=16,
        pretrained=f"{_HERE}pretrain",
    ),
)
# Batch of a training of this many updates; smaller where an epoch would have less than 30.
_BATCHES = {100: 256, 400: 64, 1500: 32, 6000: 16}


def _of_updates(task: Task, updates: int) -> Task:
    size = task.train + task.validation
    batch = min(_BATCHES[updates], size // 30)
    epochs = max(1, round(updates / (size // batch)))
    return replace(task, name=f"{task.name}@{updates}", batch=batch, epochs=epochs)


KINDS = {
    task.name: task
    for kind in _KINDS
    for task in (_of_updates(kind, updates) for updates in _BATCHES)
}


def texts(_root: Path, length: int) -> tuple[Any, Any]:
    """Return texts of 5 to 30 words, float32 [N, length] with 0 behind the end, and their class.

    Words are as frequent as in a language (Zipf). Each has a weight; the class is the sign of
    their sum, with noise, and depends on a word of denial that turns the next three around.
    """
    random = np.random.default_rng(0)
    count, words, denial = 6000, 300, 5
    frequency = 1 / np.arange(3, words + 3)
    weights = random.normal(size=words) * (random.random(words) < 0.5)
    x = np.zeros((count, length), np.float32)
    y = np.zeros(count, np.int64)
    for i, size in enumerate(random.integers(5, 31, count)):
        text = random.choice(words, size, p=frequency / frequency.sum())
        signs = np.ones(size)
        for position in np.flatnonzero(text == denial):
            signs[position + 1 : position + 4] *= -1
        score = (signs * weights[text]).sum() / math.sqrt(size)
        x[i, :size] = text + 1
        y[i] = score + 0.2 * random.normal() > 0
    return (x[2000:], y[2000:]), (x[:2000], y[:2000])


def table(_root: Path, columns: int) -> tuple[Any, Any]:
    """Return rows, float32 [N, columns], and their class of three, a tenth of them wrong.

    A quarter of the columns are categories, as numbers; two have heavy tails. Sums of products
    of pairs of columns decide.
    """
    random = np.random.default_rng(0)
    x = random.normal(size=(6096, columns))
    x[:, : columns // 4] = random.integers(0, 5, (6096, columns // 4))
    x[:, -2:] **= 3
    scaled = (x - x.mean(0)) / x.std(0)
    scores = np.tanh(scaled @ random.normal(size=(columns, 24)) / 2) @ random.normal(size=(24, 3))
    y = scores.argmax(1)
    wrong = random.random(len(y)) < 0.1
    wrong[:2000] = False
    y[wrong] = random.integers(0, 3, wrong.sum())
    x = scaled.astype(np.float32)
    return (x[2000:], y[2000:]), (x[:2000], y[:2000])


def shapes(_root: Path, side: int) -> tuple[Any, Any]:
    """Return images and masks, float32 [N, 2, side, side]; the labels are not used."""
    random = np.random.default_rng(0)
    rows, columns = np.mgrid[:side, :side]
    x = np.zeros((1524, 2, side, side), np.float32)
    for image, mask in x:
        cx, cy, radius, left, top, width = random.uniform(0, side, 6)
        mask[(columns - cx) ** 2 + (rows - cy) ** 2 < (2 + radius / 4) ** 2] = 1
        is_box = (columns >= left) & (columns < left + 2 + width / 4)
        mask[is_box & (rows >= top) & (rows < top + 2 + width / 4)] = 2
        image[:] = (mask > 0) * (0.6 + 0.2 * mask) + 0.6 * random.normal(size=(side, side))
    y = np.arange(len(x)) % 2
    return (x[500:], y[500:]), (x[:500], y[:500])


def last_classes(root: Path, side: int) -> tuple[Pair, Pair]:
    """Return the last 50 classes of CIFAR-100, 40 training images each, labels from 0."""
    train, test = read_cifar100(root, side, coarse=False)
    return _classes(train, 50, 40), _classes(test, 50, 100)


def _classes(pair: Pair, first: int, per_class: int) -> Pair:
    x, y = pair
    chosen = [np.flatnonzero(y == label)[:per_class] for label in range(first, first + 50)]
    indices = np.random.default_rng(0).permutation(np.concatenate(chosen))
    return x[indices], y[indices] - first


def pretrain(task: Task, root: Path, folder: Path) -> str:
    """Train the network on the first 50 classes; return the path of its weights."""
    import torch

    from benchmarks.in_process import observed_run
    from raytrain_opt.config.schema import Job
    from raytrain_opt.driver import train

    path = folder / f"pretrained-{task.side}-{task.width}.pt"
    if not path.is_file():
        pairs = read_cifar100(root, task.side, coarse=False)
        data: dict[str, list[str]] = {}
        for split, pair, count in zip(("train", "test"), pairs, (100, 20), strict=True):
            x, y = _classes(pair, 0, count)
            data[split] = [str(folder / f"first-{split}-{name}.npy") for name in "xy"]
            np.save(data[split][0], x)
            np.save(data[split][1], y)
        section = {"policy": "schedule", "shape": "cosine", "initial": 0.1}
        fresh = replace(task, pretrained=None)
        job = Job.model_validate(fresh.job({"name": "arrays", **data}, 12, 0, section))
        with observed_run(job) as run:
            train(run)
            torch.save(run.learner.model.state_dict(), path)
    return str(path)


def encoder(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return BERT's encoder: two post-norm layers, two heads, a pooled first token, dropout."""
    import torch
    from torch import nn

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(302, width, padding_idx=0)
            self.positions = nn.Embedding(sample_shape[0], width)
            self.norm = nn.LayerNorm(width)
            self.dropout = nn.Dropout(0.1)
            layer = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.1, "gelu", batch_first=True)
            self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
            self.pooler = nn.Linear(width, width)
            self.head = nn.Linear(width, num_classes)
            for name, parameter in self.named_parameters():
                if parameter.dim() > 1:
                    nn.init.normal_(parameter, std=0.02)
                elif "norm" not in name:
                    nn.init.zeros_(parameter)

        def forward(self, texts: torch.Tensor) -> torch.Tensor:
            words = texts.long()
            positions = self.positions.weight[: words.shape[1]]
            tokens = self.dropout(self.norm(self.words(words) + positions))
            tokens = self.layers(tokens, src_key_padding_mask=words == 0)
            pooled = torch.tanh(self.pooler(tokens[:, 0]))
            return self.head(self.dropout(pooled))  # type: ignore[no-any-return]

    return Encoder()


def segmentation_network(*, num_classes: int, sample_shape: tuple[int, ...], width: int) -> Any:
    """Return convolutions with BatchNorm from images to the scores of three kinds of pixels."""
    from torch import nn

    layers: list[nn.Module] = []
    for inputs, outputs, stride in (
        (1, width, 1),
        (width, 2 * width, 2),
        (2 * width, 2 * width, 1),
    ):
        convolution = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outputs), nn.ReLU()]
    end = nn.Conv2d(2 * width, 3, 3, padding=1)
    return nn.Sequential(*layers, nn.Upsample(scale_factor=2), end)


class Segmentation:
    """Cross entropy of the pixels; the intersection over union of the shapes decides."""

    metric = "accuracy"

    def training_loss(self, model: Any, batch: Any) -> Any:
        """Return the mean loss of the batch, []."""
        return self.validation_metrics(model, batch)["loss"].mean()

    def validation_metrics(self, model: Any, batch: Any) -> Mapping[str, Any]:
        """Return the loss and, as accuracy, the IoU of each sample."""
        from torch.nn import functional

        image, mask = batch[0][:, :1], batch[0][:, 1].long()
        scores = model(image)
        predicted = scores.argmax(1)
        both = ((predicted == mask) & (mask > 0)).sum(dim=(1, 2))
        either = ((predicted > 0) | (mask > 0)).sum(dim=(1, 2))
        losses = functional.cross_entropy(scores, mask, reduction="none").mean(dim=(1, 2))
        return {"loss": losses, "accuracy": both / either.clamp(min=1)}
