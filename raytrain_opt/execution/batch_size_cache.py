"""Results of earlier batch-size searches, kept under the storage path."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, PositiveInt, ValidationError

from raytrain_opt import storage
from raytrain_opt.cluster.connection import alive_nodes
from raytrain_opt.config.load import plain_job
from raytrain_opt.config.schema import Job
from raytrain_opt.errors import JobError, Problem
from raytrain_opt.recording.reader import first_error
from raytrain_opt.recording.recorder import versions
from raytrain_opt.recording.records import BatchSizeProbeRecord
from raytrain_opt.search.batch_size.strategy import SizeBounds

_FOLDER = "batch_sizes"


class CachedSearch(BaseModel):
    """The chosen size per worker, its speed in the final check, the reason, and all probes."""

    batch_size: PositiveInt
    samples_per_s: float
    reason: str
    probes: list[BatchSizeProbeRecord]


@dataclass(frozen=True)
class Cache:
    """The place of one result: of the same search on the same kind of machine."""

    storage_path: str
    name: str

    @classmethod
    def for_job(cls, job: Job, bounds: SizeBounds, *, use_gpu: bool) -> Cache:
        """Return the place for what affects the speed in a job; functions count by name."""
        sections = ("model", "data", "task", "loss", "optimizer", "average", "batch_norm")
        others = ("precision", "channels_last", "compile", "evaluate", "workers")
        values = plain_job(job)
        key = {
            **{name: values[name] for name in (*sections, *others, "batch_size_search")},
            "largest": bounds.largest,
            "device": device_names(use_gpu),
            "versions": versions(),
        }
        text = json.dumps(key, sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()
        return cls(job.storage_path, f"{_FOLDER}/{digest[:20]}.json")

    @property
    def shown(self) -> str:
        """The path or URI as a user finds it."""
        return storage.join(self.storage_path, self.name)

    def read(self) -> CachedSearch | None:
        """Return the result, if any. Raises StorageError, and JobError when it is damaged."""
        content = storage.read(self.storage_path, self.name)
        if content is None:
            return None
        try:
            return CachedSearch.model_validate_json(content)
        except ValidationError as error:
            rule = f"the cached result {self.shown} is damaged: {first_error(error)}"
            hint = "remove the file, or search again with --fresh"
            raise JobError([Problem("batch_size_search", rule, None, hint)]) from error

    def write(self, answer: CachedSearch) -> None:
        """Keep the result for later searches. Raises StorageError."""
        content = answer.model_dump_json(indent=1).encode()
        storage.write(self.storage_path, self.name, content)


def device_names(use_gpu: bool) -> list[str]:
    """Return the kinds of GPU in the cluster as Ray names them, or this machine's kind of CPU."""
    if use_gpu:
        names = {name for node in alive_nodes() for name in node["Resources"]}
        return sorted(name for name in names if name.startswith("accelerator_type:"))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return sorted({line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name"})
