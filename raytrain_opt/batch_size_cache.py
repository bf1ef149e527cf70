"""Answers of earlier batch-size searches, kept under the storage path."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from raytrain_opt.config.load import plain_job
from raytrain_opt.config.schema import Job
from raytrain_opt.paths import read_stored, write_stored
from raytrain_opt.pools.session import alive_nodes
from raytrain_opt.search.batch_size import Limits
from raytrain_opt.telemetry.records import versions

_FOLDER = "batch_sizes"


@dataclass(frozen=True)
class Answer:
    """The chosen size per worker, its speed as checked, why, and the lines of all probes."""

    batch_size: int
    samples_per_s: float
    reason: str
    probes: list[dict[str, Any]]


@dataclass(frozen=True)
class Cache:
    """One answer: that to a search of the same kind on the same kind of machine."""

    storage_path: str
    key: str

    @classmethod
    def of(cls, job: Job, limits: Limits, *, use_gpu: bool) -> Cache:
        """For everything in the job that decides the speed at a batch size. Functions of one's
        own count by name: a change of their code is not seen.
        """
        parts = ("model", "data", "optimizer", "loss", "precision", "channels_last", "compile")
        plain = plain_job(job)
        decides = {
            **{name: plain[name] for name in (*parts, "workers", "batch_size_search")},
            "largest": limits.largest,
            "device": devices(use_gpu),
            "versions": versions(),
        }
        text = json.dumps(decides, sort_keys=True)
        return cls(job.storage_path, hashlib.sha256(text.encode()).hexdigest()[:20])

    @property
    def shown(self) -> str:
        """Where the user finds the answer."""
        return f"{self.storage_path.rstrip('/')}/{self._name}"

    @property
    def _name(self) -> str:
        return f"{_FOLDER}/{self.key}.json"

    def read(self) -> Answer | None:
        """The answer, when there is one. Raises CommitError when it cannot be read."""
        content = read_stored(self.storage_path, self._name)
        return None if content is None else Answer(**json.loads(content))

    def write(self, answer: Answer) -> None:
        """Keep it. Raises CommitError."""
        text = json.dumps(asdict(answer), indent=1, allow_nan=False)
        write_stored(self.storage_path, self._name, text.encode())


def devices(use_gpu: bool) -> list[str]:
    """Kinds of GPU in the cluster as Ray names them, or this machine's kind of CPU."""
    if use_gpu:
        names = {name for node in alive_nodes() for name in node["Resources"]}
        return sorted(name for name in names if name.startswith("accelerator_type:"))
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return sorted({line.split(":", 1)[1].strip() for line in lines if line[:10] == "model name"})
