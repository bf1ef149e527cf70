"""Tasks other than classification: segmentation, text, regression and several labels per sample.

Each has a function for the data, one for the network, and a class with the two methods of a task;
jobs/task_*.yaml name them. The last two need scikit-learn. docs/tasks.md explains the parts.
"""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

# Segmentation: a disc and a box on a noisy background; the network finds their pixels.


class Shapes(Dataset[dict[str, Tensor]]):
    """Sample i: image [1, size, size] and mask [size, size]: 0 background, 1 disc, 2 box."""

    def __init__(self, first: int, samples: int, size: int = 32) -> None:
        self.first, self.samples, self.size = first, samples, size

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        random = torch.Generator().manual_seed(self.first + index)
        x, y, radius, left, top, width = torch.rand(6, generator=random).mul(self.size).tolist()
        rows, columns = torch.meshgrid(*2 * [torch.arange(self.size)], indexing="ij")
        mask = torch.zeros(self.size, self.size, dtype=torch.int64)
        mask[(columns - x) ** 2 + (rows - y) ** 2 < (3 + radius / 4) ** 2] = 1
        side = 4 + width / 4
        is_box = (columns >= left) & (columns < left + side) & (rows >= top) & (rows < top + side)
        mask[is_box] = 2
        noise = torch.randn(mask.shape, generator=random)
        image = (mask > 0).float() * (1 + 0.3 * mask) + 0.3 * noise
        return {"image": image[None], "mask": mask}


def shapes(train: int = 1000, test: int = 200) -> tuple[Shapes, Shapes]:
    """Return both data sets."""
    return Shapes(0, train), Shapes(train, test)


def segmentation_network(width: int = 16) -> nn.Module:
    """Return a network from images [N, 1, H, W] to class scores [N, 3, H, W]."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Conv2d(2 * width, 2 * width, 5, padding=2), nn.BatchNorm2d(2 * width), nn.ReLU(),
        nn.Upsample(scale_factor=2), nn.Conv2d(2 * width, 3, 3, padding=1),
    )  # fmt: skip


class Segmentation:
    """Cross entropy of the pixels; the intersection over union of the shapes decides."""

    metric = "iou"

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of the batch, []."""
        return functional.cross_entropy(model(batch["image"]), batch["mask"])

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return loss and metrics of each sample, [samples] each."""
        scores, mask = model(batch["image"]), batch["mask"]
        losses = functional.cross_entropy(scores, mask, reduction="none").mean(dim=(1, 2))
        predicted = scores.argmax(1)
        both = ((predicted == mask) & (mask > 0)).sum(dim=(1, 2))
        either = ((predicted > 0) | (mask > 0)).sum(dim=(1, 2))
        return {"loss": losses, "iou": both / either.clamp(min=1)}


# Text: the next character of the documentation that Python ships.


class Text(Dataset[Tensor]):
    """Sample i: the codes [length + 1] of a piece of the text."""

    def __init__(self, text: str, length: int) -> None:
        self.codes = torch.tensor([min(ord(character), 127) for character in text])
        self.length = length

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.codes[start : start + self.length + 1]


def python_documentation(
    train: int = 1000, test: int = 100, length: int = 64
) -> tuple[Text, Text]:
    """Return both data sets, of `train` and `test` pieces of text."""
    text = "\n".join(topics[name] for name in sorted(topics))
    middle, end = train * length + 1, (train + test) * length + 1
    return Text(text[:middle], length), Text(text[middle - 1 : end], length)


class CharacterTransformer(nn.Module):
    """From codes [N, length] to the scores of each next character, [N, length, 128]."""

    def __init__(self, width: int = 64, layers: int = 2, length: int = 64) -> None:
        super().__init__()
        self.characters = nn.Embedding(128, width)
        self.positions = nn.Parameter(torch.zeros(length, width))
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 128)

    def forward(self, codes: Tensor) -> Tensor:
        """Return the scores."""
        mask = nn.Transformer.generate_square_subsequent_mask(codes.shape[1], codes.device)
        embedded = self.characters(codes) + self.positions
        scores: Tensor = self.head(self.layers(embedded, mask=mask, is_causal=True))
        return scores


class NextCharacter:
    """Cross entropy of the next characters; without a metric, the loss decides."""

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of the batch, []."""
        return self._losses(model, batch).mean()

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return the loss of each piece of text, in nats per character, [samples]."""
        return {"loss": self._losses(model, batch)}

    def _losses(self, model: nn.Module, codes: Tensor) -> Tensor:
        scores = model(codes[:, :-1]).transpose(1, 2)
        return functional.cross_entropy(scores, codes[:, 1:], reduction="none").mean(dim=1)


# Regression: the progression of diabetes after a year, from ten measurements.


def diabetes() -> tuple[TensorDataset, TensorDataset]:
    """Return 342 samples for training and 100 for the test: measurements [10] and target []."""
    from sklearn.datasets import load_diabetes

    x, y = (torch.tensor(array, dtype=torch.float32) for array in load_diabetes(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = 20 * x[order], (y[order] - 152) / 77  # mean and standard deviation
    return TensorDataset(x[100:], y[100:]), TensorDataset(x[:100], y[:100])


class Regression:
    """Squared error; the absolute error decides, and less is better."""

    metric, higher_is_better = "absolute_error", False

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of the batch, []."""
        x, y = batch
        return functional.mse_loss(model(x)[:, 0], y)

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return loss and metrics of each sample, [samples] each."""
        x, y = batch
        error = (model(x)[:, 0] - y).abs()
        return {"loss": error**2, "absolute_error": error}


# Several labels per sample.


def multi_label(train: int = 2000, test: int = 500) -> tuple[TensorDataset, TensorDataset]:
    """Return both data sets: 20 features, and 5 labels of 0 or 1."""
    from sklearn.datasets import make_multilabel_classification

    x, y = make_multilabel_classification(train + test, n_features=20, n_classes=5, random_state=0)
    x, y = torch.tensor(x, dtype=torch.float32) / 10, torch.tensor(y, dtype=torch.float32)
    return TensorDataset(x[:train], y[:train]), TensorDataset(x[train:], y[train:])


class MultiLabel:
    """Binary cross entropy of every label; the fraction of correct labels decides."""

    metric = "correct_labels"

    def training_loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean loss of the batch, []."""
        x, y = batch
        return functional.binary_cross_entropy_with_logits(model(x), y)

    def validation_metrics(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        """Return loss and metrics of each sample, [samples] each."""
        x, y = batch
        scores = model(x)
        losses = functional.binary_cross_entropy_with_logits(scores, y, reduction="none")
        correct = (scores > 0) == (y > 0.5)
        return {"loss": losses.mean(1), "correct_labels": correct.float().mean(1)}


def mlp(sample_shape: tuple[int, ...], outputs: int, width: int = 64) -> nn.Module:
    """Return a network with two hidden layers."""
    return nn.Sequential(
        nn.Linear(sample_shape[0], width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(),
        nn.Linear(width, outputs),
    )  # fmt: skip
