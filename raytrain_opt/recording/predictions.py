"""The record of what the weights predict on the test split; of classification only."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from typing import Annotated

from pydantic import Field

from raytrain_opt.recording.records import Record, RecordPart
from raytrain_opt.results import MAX_MISTAKES, Predictions

Triple = Annotated[tuple[int, ...], Field(min_length=3, max_length=3)]


class Mistake(RecordPart):
    """A wrong prediction."""

    file: str | None = Field(None, description="Image file, below data.root; null if it has none.")
    sample: int = Field(
        description="Position among the samples of the test split that could be read, from 0."
    )
    label: int = Field(description="Class of the sample.")
    predicted: int = Field(description="Most probable class.")
    confidence: float = Field(description="Probability of that class.")
    jpeg: str | None = Field(
        description="Image of at most 64 x 64, in base64; null if it is none."
    )


class PredictionsRecord(Record):
    """predictions.json: predictions on the test split after the last evaluated epoch.

    Of classification only. A prediction is the most probable class, and its confidence the
    probability of that class.
    """

    epoch: int = Field(description="Epoch, from 1.")
    class_names: tuple[str, ...] = Field(description="Names of the classes, or their numbers.")
    confusion: tuple[Triple, ...] = Field(
        description="Label, predicted class, and number of samples, where there are any."
    )
    mistakes: tuple[Mistake, ...] = Field(
        description=f"The {MAX_MISTAKES} mistakes with the highest confidence, highest first."
    )

    @classmethod
    def of(
        cls, epoch: int, class_names: Sequence[str], predictions: Predictions
    ) -> PredictionsRecord:
        """Return the record of the predictions of all test samples."""
        import numpy as np

        labels, classes = predictions.labels, predictions.classes
        # A loss of the user's own may be finite where an output is not.
        confidences = np.nan_to_num(predictions.confidences.astype(np.float64))
        pairs, counts = np.unique(np.stack([labels, classes], 1), axis=0, return_counts=True)
        mistakes = [
            Mistake(
                file=file,
                sample=position,
                label=int(labels[position]),
                predicted=int(classes[position]),
                confidence=float(confidences[position]),
                jpeg=None if image is None else b64encode(image).decode(),
            )
            for position, (image, file) in predictions.mistakes.items()
        ]
        mistakes.sort(key=lambda mistake: (-mistake.confidence, mistake.sample))
        return cls(
            epoch=epoch,
            class_names=tuple(class_names),
            confusion=tuple(
                (int(label), int(predicted), int(count))
                for (label, predicted), count in zip(pairs, counts, strict=True)
            ),
            mistakes=tuple(mistakes[:MAX_MISTAKES]),
        )
