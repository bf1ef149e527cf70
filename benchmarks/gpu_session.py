"""What a session on a machine with one GPU measures first: parts in the order of their value.

    python -m benchmarks.gpu_session [--minutes 30] [--parts tests resnet50 ...] [--out FOLDER]
        [--data '{name: cifar100, root: FOLDER}']        make gpu-session takes MINUTES and DATA
    python -m benchmarks.gpu_session --small             a trial on the CPU

Prints the parts with an estimate of their minutes, then one JSON object when a part has ended, and
at the end a table. A part that does not fit into the rest of the time gets that rest; what has
ended stays printed, and written to FOLDER/parts.jsonl, whenever the session ends. The parts' whole
output is in FOLDER/NAME.log.

tests      tests/gpu
resnet50, resnet18, vit      `gpu_train`: steps beside plain PyTorch and timm, eager and compiled
lars, muon `optimizer_step`: one step beside SGD's (iterations are among those of resnet50)
ray, async the quickstart on Ray: one worker and a slot on the GPU; two asynchronous workers on it
batch      `batch_size_search`: utilization by NVML, the sweep and each strategy's choice
usage, time        CIFAR-100 with VGG16: the published searches by utilization and by epoch time
usage45, time45    the same with ResNet (45 convolutions)
default    CIFAR-100 with ResNet-18, 8 epochs: the default search
sgd0.03, sgd0.1, sgd0.3      a cosine schedule from this rate, to compare with
The last eight need --data: CIFAR-100 as `data` of a job names it.

`status`: ok, failed, timeout (its output so far is in the log), skipped (no --data), not started.
`result`: the JSON object that a benchmark prints; of a run, fields of its result.json; else the
last line. The estimates for tests, resnet50, resnet18, ray and async follow runs on an H100; the
others are guesses.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import JOBS, machine
from raytrain_opt.clock import monotonic_s

_FIELDS = ("final", "best", "search", "wall_s", "time_to_first_step_s")
_CIFAR = ("usage", "time", "usage45", "time45", "default", "sgd0.03", "sgd0.1", "sgd0.3")
_END_S = 5.0  # for a part to end after SIGTERM


@dataclass(frozen=True)
class Part:
    """A part of the session: a module of Python and its arguments. `small`: those of a trial."""

    minutes: float
    command: tuple[str, ...]
    small: tuple[str, ...] | None = None


def _train(case: str, minutes: float, *small: str) -> Part:
    command = ("benchmarks.gpu_train", "--rounds", "3", "--cases", case)
    return Part(minutes, command, (*command, "--device", "cpu", "--quick", *small))


def _step(optimizer: str) -> Part:
    command = ("benchmarks.optimizer_step", optimizer)
    return Part(0.8, (*command, "--device", "cuda"), (*command, "--rounds", "1", "--steps", "1"))


def _run(minutes: float, job: str, *settings: str, command: str = "run") -> Part:
    options = [option for setting in settings for option in ("--set", setting)]
    small: tuple[str, ...] | None = None
    if job == "quickstart":
        cheap = ("epochs=1", "workers.count=1", "workers.use_gpu=false")
        small = ("raytrain_opt", command, f"{JOBS}/quickstart.yaml", "--in-process")
        small += tuple(option for setting in cheap for option in ("--set", setting))
    return Part(minutes, ("raytrain_opt", command, f"{JOBS}/{job}.yaml", *options), small)


def _search(strategy: str, *settings: str) -> Part:
    section = f"batch_size_search={{strategy: {strategy}, initial: 32}}"
    return _run(2, "cifar100_vgg16_mbso", section, *settings, command="find-batch-size")


def _epochs(*settings: str) -> Part:
    return _run(2.5, "cifar10_resnet18_cosine", "epochs=8", *settings)


def _cosine(rate: str) -> Part:
    warmup = "warmup: {epochs: 1, lr: 0.005}"
    return _epochs(f"learning_rate={{policy: schedule, shape: cosine, initial: {rate}, {warmup}}}")


PARTS = {
    "tests": Part(
        2.5,
        ("pytest", "-m", "gpu", "tests/gpu", "-q", "-W", "default", "-p", "no:cacheprovider"),
        ("pytest", "-m", "gpu", "tests/gpu", "-q", "--collect-only", "-p", "no:cacheprovider"),
    ),
    "resnet50": _train("resnet50_224", 1.5, "--variants", "plain_tuned", "learner"),
    "resnet18": _train("resnet18_32", 1, "--variants", "plain_tuned", "learner"),
    "lars": _step("lars"),
    "muon": _step("muon"),
    "ray": _run(0.8, "quickstart", "workers.count=1"),
    "async": _run(
        0.8, "quickstart", "parallel.mode=async", "workers.resources={CPU: 1, GPU: 0.3}"
    ),
    "vit": _train("vit_s_224", 4, "--variants", "plain_tuned", "learner"),
    "batch": Part(
        3,
        ("benchmarks.batch_size_search", "--cases", "resnet50_32", "--passes", "1", "--pairs", "1")
        + ("--max-loops", "12", "--sizes", "32", "64", "128", "256", "512", "1024", "2048"),
        ("benchmarks.batch_size_search", "--passes", "1", "--pairs", "1", "--repeats", "1")
        + ("--max-loops", "1", "--sizes", "32", "64", "--width", "4", "--samples", "256")
        + ("--max-batch-size", "64", "--max-probe-s", "0.1", "--sweep-max-probe-s", "0.1"),
    ),
    "usage": _search("gpu_usage_maximize"),
    "time": _search("epoch_time_minimize"),
    "usage45": _search("gpu_usage_maximize", "model=cifar_resnet45"),
    "time45": _search("epoch_time_minimize", "model=cifar_resnet45"),
    "default": _epochs("learning_rate={policy: stpt_horizon}", "optimizer=auto"),
    **{f"sgd{rate}": _cosine(rate) for rate in ("0.03", "0.1", "0.3")},
}


class Stopped(Exception):  # noqa: N818 - not an error: the machine is taken away
    """SIGTERM or Ctrl-C arrived."""


class Session:
    """Runs parts until the time is over. `reports`: of the parts that have ended, by name."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self.reports = args, dict[str, dict[str, Any]]()
        self._end_s = monotonic_s() + 60 * args.minutes

    def run(self, parts: Mapping[str, Part]) -> None:
        """Run the parts; print and write what each has found."""
        for name, part in parts.items():
            started_s = monotonic_s()
            status, result = self._run_part(name, part)
            minutes = round((monotonic_s() - started_s) / 60, 2)
            report = {"part": name, "status": status, "minutes": minutes, "result": result}
            self.reports[name] = report
            print(json.dumps(report), flush=True)
            with open(self._args.out / "parts.jsonl", "a") as file:
                file.write(json.dumps(report) + "\n")

    def _run_part(self, name: str, part: Part) -> tuple[str, Any]:
        arguments = list(part.small or () if self._args.small else part.command)
        if arguments[:1] == ["raytrain_opt"]:
            storage = self._args.out / "runs" / name
            arguments += ["--set", f"storage_path={storage}"]
        if name in _CIFAR:
            arguments += ["--set", f"data={self._args.data}"]
        if not arguments or (name in _CIFAR and self._args.data is None):
            return "skipped", None
        if (rest_s := self._end_s - monotonic_s()) <= 0:
            return "not started", None
        log = self._args.out / f"{name}.log"
        with open(log, "wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                limit_s = math.inf if self._args.small else 120 * part.minutes  # of a GPU
                code = process.wait(min(rest_s, limit_s))
                status = "ok" if code == 0 else "failed"
            except subprocess.TimeoutExpired:
                status = "timeout"
            finally:
                _end(process)
        return status, _result(log, self._args.out / "runs" / name)

    def table(self, parts: Mapping[str, Part]) -> str:
        """Return a line for each part."""
        lines = []
        for name in parts:
            report = self.reports.get(name, {"status": "not started", "minutes": 0, "result": ""})
            text = json.dumps(report["result"])
            lines.append(f"{name:9} {report['status']:12} {report['minutes']:6.2f}  {text[:100]}")
        return "\n".join(lines)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part with all its processes."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)


def _result(log: Path, runs: Path) -> Any:
    """Return what a part has found, as far as it came."""
    for path in sorted(runs.glob("*/result.json")):
        record = json.loads(path.read_text())
        return {field: record[field] for field in _FIELDS if field in record}
    lines = log.read_text(errors="replace").splitlines() or [""]
    for line in reversed(lines):
        with suppress(ValueError):
            if isinstance(found := json.loads(line), dict):
                return found
    return lines[-1]


def main(argv: Sequence[str] | None = None) -> dict[str, dict[str, Any]]:
    """Run the session; return the reports."""
    parser = argparse.ArgumentParser(description="What a GPU machine measures first.")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--data", help="CIFAR-100, as the section `data` of a job")
    parser.add_argument("--out", type=Path, help="folder of logs, runs and parts.jsonl")
    parser.add_argument("--small", action="store_true", help="a trial on the CPU")
    args = parser.parse_args(argv)
    args.out = args.out or Path(tempfile.mkdtemp(prefix="gpu-session-"))
    args.out.mkdir(parents=True, exist_ok=True)
    parts = {name: PARTS[name] for name in args.parts}
    estimates = [f"{name:9} {part.minutes:4.1f} min" for name, part in parts.items()]
    total = sum(part.minutes for part in parts.values())
    print("\n".join([*estimates, f"together  {total:4.1f} of {args.minutes:g} min; {args.out}"]))
    print(json.dumps(machine()), flush=True)

    def stop(*_: object) -> None:
        raise Stopped

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    session = Session(args)
    try:
        session.run(parts)
    except Stopped:
        print("stopped")
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        print(session.table(parts), flush=True)
    return session.reports


if __name__ == "__main__":
    main()
