"""The trainings that the comparison is made of, each computed once and kept.

A `Unit` says all that its outcome depends on, so that a kept outcome is never taken for
another one: the task, the seed, the job file, and for what the product decides also its code.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from comparison_tasks import OPTIMIZERS, Task

Result = dict[str, Any]
TUNE = ("asha", "pbt")


@dataclass(frozen=True)
class Setting:
    """Equal for all contenders of one task and seed. `data`: the job's data section."""

    task: Task
    seed: int
    epochs: int
    data: Mapping[str, Any]
    optimizer: str = "SGD"

    def job(self, learning_rate: Mapping[str, Any]) -> dict[str, Any]:
        """The job file's contents."""
        return self.task.job(
            dict(self.data), self.epochs, self.seed, dict(learning_rate), self.optimizer
        )

    @property
    def usual_lr(self) -> float:
        """What people begin with, of this optimiser."""
        return OPTIMIZERS[self.optimizer][1]

    @property
    def training_samples(self) -> int:
        """Of one training: the unit in which compute is told."""
        return self.epochs * (self.task.train // self.task.batch) * self.task.batch


@dataclass(frozen=True)
class Unit:
    """One training, or one search of Ray Tune. `kind`: how it is computed; `options`: its own."""

    name: str
    kind: str
    setting: Setting
    learning_rate: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def job(self) -> dict[str, Any]:
        """The job file's contents."""
        return self.setting.job(self.learning_rate)

    @property
    def key(self) -> str:
        """Of all that the outcome depends on, but for versions and machine."""
        depends = {
            "kind": self.kind,
            "task": asdict(self.setting.task),
            "job": {key: value for key, value in self.job.items() if key != "data"},
            "options": dict(self.options),
            "code": _digest_of(self.learning_rate["policy"]),
        }
        return hashlib.sha256(json.dumps(depends, sort_keys=True).encode()).hexdigest()[:16]


@cache
def _digest_of(policy: str) -> str:
    """Of the product's code that decides about learning rates, and what it decides by default.

    A written-down schedule decides nothing.
    """
    import raytrain_opt
    from raytrain_opt.config.learning_rate import HorizonPolicy

    if policy == "schedule":
        return ""
    search = Path(raytrain_opt.__file__).parent / "search"
    names = (
        ["stpt.py", "policy.py"]
        if policy == "stpt"
        else sorted(p.name for p in search.glob("*.py"))
    )
    parts = [(search / name).read_bytes() for name in names]
    if policy != "stpt":
        parts.append(HorizonPolicy(policy="stpt_horizon").model_dump_json().encode())
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


class Cache:
    """Outcomes by key; each is appended to the file when it is there."""

    def __init__(self, files: Sequence[Path], append: Path | None) -> None:
        self._append = append
        self._known: dict[str, Result] = {}
        for file in (*files, *([append] if append and append.exists() else [])):
            for line in file.read_text().splitlines():
                self._read(line)

    def _read(self, line: str) -> None:
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            return  # empty, or half a line of a run that was killed while it wrote
        self._known[record["key"]] = record["result"]

    def __contains__(self, unit: Unit) -> bool:
        return unit.key in self._known

    def __getitem__(self, unit: Unit) -> Result:
        return self._known[unit.key]

    def add(self, unit: Unit, result: Result) -> None:
        self._known[unit.key] = result
        if self._append is None:
            return
        told = {"task": unit.setting.task.name, "seed": unit.setting.seed, "name": unit.name}
        with self._append.open("a") as file:
            # In front: half a line of a run that was killed must not spoil this one.
            file.write("\n" + json.dumps({"key": unit.key, **told, "result": result}))


def missing(units: Sequence[Unit], kept: Cache) -> list[Unit]:
    """Those to compute, each once."""
    return list({unit.key: unit for unit in units if unit not in kept}.values())


def computed(units: Sequence[Unit], processes: int) -> Iterator[tuple[Unit, Result]]:
    """Each unit with its outcome, as they come; side by side in processes of one thread. Those
    of Ray Tune are last, so that no Ray runs beside the others.
    """
    os.environ["OMP_NUM_THREADS"] = "1"
    yield from _side_by_side([unit for unit in units if unit.kind not in TUNE], processes)
    searches = [unit for unit in units if unit.kind in TUNE]
    if searches:
        from comparison_tune import join, local_ray

        numbers = get_context("spawn").Queue()
        for number in range(processes):
            numbers.put(number)
        with local_ray(processes) as address:
            yield from _side_by_side(searches, processes, join, (address, numbers))


def _side_by_side(
    units: Sequence[Unit],
    processes: int,
    initializer: Callable[..., None] | None = None,
    arguments: tuple[Any, ...] = (),
) -> Iterator[tuple[Unit, Result]]:
    with ProcessPoolExecutor(processes, get_context("spawn"), initializer, arguments) as pool:
        futures = {pool.submit(compute, unit): unit for unit in units}
        try:
            for future in as_completed(futures):
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def compute(unit: Unit) -> Result:
    """In this process, on one thread."""
    import torch

    from raytrain_opt.config.schema import Job

    torch.set_num_threads(1)
    job = Job.model_validate(unit.job)
    match unit.kind:
        case "train":
            from in_process import train_in_process

            return train_in_process(job).to_json()
        case "plateau":
            from plateau_decay import train_with_plateau_decay

            return train_with_plateau_decay(job, unit.options["patience"]).to_json()
        case "schedulefree":
            from comparison_others import train_schedulefree

            return train_schedulefree(job).to_json()
        case "lr_find":
            from comparison_others import train_after_lr_find

            return train_after_lr_find(job, unit.options["by"]).to_json()
        case "asha" | "pbt":
            from comparison_tune import search

            return search(unit).to_json()
    raise ValueError(f"no such kind of training: {unit.kind}")
