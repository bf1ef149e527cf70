"""The trainings of a comparison, each computed once and kept in a cache.

The key of a `Unit` covers everything its result depends on: task, seed, job file, and for
searches the code of the product's policies. Versions and machine are not part of it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Protocol

from benchmarks.comparison_tasks import Task

Result = dict[str, Any]


@dataclass(frozen=True)
class Setting:
    """What all contenders of one task and seed have in common; `data` is the job's section.

    `optimizer`: that of all rows but those named after another; auto: ours chooses it, and the
    others train with SGD.
    """

    task: Task
    seed: int
    epochs: int
    data: Mapping[str, Any]
    optimizer: str = "SGD"

    @property
    def training_samples(self) -> int:
        """Samples of one training: the unit in which compute is reported."""
        size = self.task.train + self.task.validation
        return self.epochs * (size // self.task.batch) * self.task.batch


@dataclass(frozen=True)
class Unit:
    """One training, by `train_in_process`.

    With `holds_out` there is a validation split, which a fixed schedule does not train on.
    """

    name: str
    setting: Setting
    learning_rate: Mapping[str, Any]
    optimizer: str = "SGD"
    holds_out: bool = True

    @property
    def job(self) -> dict[str, Any]:
        """The job file's contents."""
        setting = self.setting
        return setting.task.job(
            dict(setting.data),
            setting.epochs,
            setting.seed,
            dict(self.learning_rate),
            self.optimizer,
            holds_out=self.holds_out,
        )

    @property
    def about(self) -> dict[str, Any]:
        """What a line of the cache says for people."""
        return {"task": self.setting.task.name, "seed": self.setting.seed, "name": self.name}

    @property
    def key(self) -> str:
        """A digest of everything the result depends on, except versions and machine."""
        job, task = self.job, asdict(self.setting.task)
        job["model"].pop("weights", None)  # a path
        inputs = {
            "kind": "train",  # as in caches of earlier versions
            # Without the network, which the job names.
            "task": {k: v for k, v in task.items() if k != "network" and v is not None},
            "job": {key: value for key, value in job.items() if key != "data"},
            "options": {},
            "holds_out": self.holds_out,
            "code": _policy_digest(self.learning_rate["policy"]),
        }
        return hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _policy_digest(policy: str) -> str:
    """Return a digest of the product's code and defaults behind this policy's decisions.

    A fixed schedule decides nothing, so its digest is empty.
    """
    import raytrain_opt
    from raytrain_opt.config.learning_rate import HorizonPolicy

    if policy == "schedule":
        return ""
    search = Path(raytrain_opt.__file__).parent / "search"
    names = ["stpt.py", "policy.py"]
    if policy != "stpt":
        names = [*sorted(p.name for p in search.glob("*.py")), "../config/updates.py"]
    parts = [(search / name).read_bytes() for name in names]
    if policy != "stpt":
        parts.append(HorizonPolicy(policy="stpt_horizon").model_dump_json().encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


class Cached(Protocol):
    """A training whose result is kept: `key` identifies it, `about` says for people what it is."""

    @property
    def key(self) -> str: ...

    @property
    def about(self) -> dict[str, Any]: ...


class Cache:
    """Results by key; a new one is appended to the file `append` if there is one."""

    def __init__(self, files: Sequence[Path], append: Path | None) -> None:
        self._append = append
        self._results: dict[str, Result] = {}
        for file in (*files, *([append] if append and append.exists() else [])):
            for line in file.read_text().splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return  # an empty line, or half a line of a run that was killed while writing
        self._results[record["key"]] = record["result"]

    def __contains__(self, unit: Cached) -> bool:
        return unit.key in self._results

    def __getitem__(self, unit: Cached) -> Result:
        return self._results[unit.key]

    def add(self, unit: Cached, result: Result) -> None:
        self._results[unit.key] = result
        if self._append is None:
            return
        with self._append.open("a") as file:
            # The line break comes first, so half a line of a killed run does not spoil this one.
            file.write("\n" + json.dumps({"key": unit.key, **unit.about, "result": result}))


def missing(units: Sequence[Unit], cache: Cache) -> list[Unit]:
    """Return the units that are not in the cache, each once."""
    return list({unit.key: unit for unit in units if unit not in cache}.values())


def compute_all(units: Sequence[Unit], processes: int) -> Iterator[tuple[Unit, Result]]:
    """Compute the units in parallel processes of one thread, yielding results as they come."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        futures = {pool.submit(compute, unit): unit for unit in units}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def compute(unit: Unit) -> Result:
    """Compute one unit in this process on one thread."""
    import torch

    from benchmarks.in_process import train_in_process
    from raytrain_opt.config.schema import Job

    torch.set_num_threads(1)
    return train_in_process(Job.model_validate(unit.job)).to_json()
