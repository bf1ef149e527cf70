"""Random damage to everything that is read: an error of ours, or a valid value, and no traceback.

The same inputs in every run; RAYTRAIN_OPT_FUZZ=4 reads 16,000, and so on.
"""

from __future__ import annotations

import copy
import io
import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import nn

from raytrain_opt.config.load import dump_job, load_job, parse_job
from raytrain_opt.errors import RaytrainOptError
from raytrain_opt.execution.progress import RunProgress
from raytrain_opt.recording.reader import read_lines, read_record
from raytrain_opt.recording.records import (
    BatchSizeProbeRecord,
    BatchSizeRecord,
    EpochRecord,
    Event,
    ResultRecord,
    RoundRecord,
    ScheduleRecord,
)
from raytrain_opt.train.checkpoint import Checkpoints, Point, read_checkpoint, read_index
from raytrain_opt.train.state import capture
from tests.support.small_jobs import QUICKSTART, small_job
from tests.support.synthetic_runs import event_line, with_batch_size_search, write_lines, write_run

SCALE = int(os.environ.get("RAYTRAIN_OPT_FUZZ", "1"))
VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e-320, 1e308,
    float("nan"), float("inf"), float("-inf"), "", " ", "x" * 10_000, "\0", "\x1b[2J", "\u2028",
    "\ud800", "é", "../../etc/passwd", "a:b", "os:system", ":", "{}", "1e5", "auto", "2026-11-22",
    [], [[]], [None] * 3, {}, {"": None}, {"name": "auto"}, {"name": ["SGD"]}, {1: 2},
]  # fmt: skip
BYTES = [
    b"\0", b"\xff", b"\n", b'"', b"{", b"}", b"[" * 2000, b":", b"-", b"e", b"9" * 400, b"\xed",
]  # fmt: skip

# Reads one damaged input; returns or raises an error of ours.
Reader = Callable[[bytes], object]


def damaged_values(chance: random.Random, value: Any) -> Any:
    """Return the value with one to three of its parts replaced, removed, renamed or repeated."""
    root = [copy.deepcopy(value)]
    for _ in range(chance.randint(1, 3)):
        container, key = chance.choice(list(_places(root)))
        action = chance.randrange(4)
        if action == 0 and container is not root:
            del container[key]
        elif action == 1 and isinstance(container, dict):
            container[chance.choice(["", "name", "lr", f"{key}s", "é"])] = container.pop(key)
        elif action == 2 and isinstance(container, list) and container is not root:
            container.extend([container[key]] * chance.randint(1, 30))
        else:
            container[key] = copy.deepcopy(chance.choice(VALUES))
    return root[0]


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


def damaged_bytes(chance: random.Random, content: bytes) -> bytes:
    """Return the bytes with up to four places overwritten, inserted, cut out or repeated."""
    data = bytearray(content)
    for _ in range(chance.randint(1, 4)):
        start = chance.randrange(len(data) + 1)
        end = min(len(data), start + chance.choice([0, 1, 1, 8, 100]))
        piece = chance.choice([*BYTES, bytes(data[start:end]) * 2, chance.randbytes(4), b""])
        data[start:end] = piece
    return bytes(data[: chance.randrange(len(data) + 1)]) if chance.random() < 0.2 else bytes(data)


def inputs(name: str, content: bytes, count: int, load: Any = None, dump: Any = None) -> Any:
    """Yield `count` inputs: half with damaged values, where the format is known, and bytes."""
    chance = random.Random(name)
    for number in range(count * SCALE):
        if load is not None and number % 2:
            try:
                yield dump(damaged_values(chance, load(content))).encode(errors="surrogatepass")
            except (UnicodeEncodeError, yaml.YAMLError):
                continue  # a value that the format itself does not know
        else:
            yield damaged_bytes(chance, content)


def check(read: Reader, damaged: Iterator[bytes]) -> None:
    """Read all inputs. Fails with the input that ends in an error of Python's."""
    refused = []
    for content in damaged:
        try:
            with redirect_stdout(io.StringIO()):
                read(content)
        except RaytrainOptError as error:
            refused.append(error)
        except Exception as error:
            raise AssertionError(f"{type(error).__name__}: {error}; input: {content!r}") from error
    assert {error.exit_code for error in refused} <= {1, 2}
    assert refused
    assert all(map(str, refused))


@pytest.mark.parametrize("name", ["quickstart", "imagenet_resnet50_81920", "digits_batch_size"])
def test_job_files(name: str) -> None:
    content = dump_job(load_job(QUICKSTART.with_stem(name))).encode()

    def read(damaged: bytes) -> None:
        text = damaged.decode(errors="replace")
        parse_job(text, "job.yaml")

    check(read, inputs(name, content, 60, yaml.safe_load, yaml.safe_dump))


def test_overrides() -> None:
    job = dump_job(load_job(QUICKSTART))
    content = b"learning_rate={policy: stpt_horizon, max_search_cost: 0.2}"

    def read(damaged: bytes) -> None:
        parse_job(job, "job.yaml", [damaged.decode(errors="replace")])

    check(read, inputs("overrides", content, 100))


def run_dir(folder: Path) -> Path:
    run = with_batch_size_search(write_run(folder / "run", epochs=1))
    write_lines(run / "events.jsonl", [event_line("lost", "slot 1")])
    return run


@pytest.mark.parametrize(
    "kind",
    [
        EpochRecord,
        RoundRecord,
        Event,
        ScheduleRecord,
        BatchSizeProbeRecord,
        BatchSizeRecord,
        ResultRecord,
    ],
)
def test_records(tmp_path: Path, kind: Any) -> None:
    run, name = run_dir(tmp_path), kind.file
    content = (run / name).read_bytes().split(b"\n")[0] + b"\n"

    def read(damaged: bytes) -> None:
        (run / name).write_bytes(damaged)
        (read_lines if name.endswith("l") else read_record)(str(run), kind)

    def dump(value: Any) -> str:
        return json.dumps(value) + "\n"

    check(read, inputs(name, content, 200, json.loads, dump))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    state = capture(model, optimizer, torch.amp.GradScaler("cpu"), copy=True)
    section = small_job(tmp_path).checkpoint
    Checkpoints(tmp_path, section).save(Point(1), state, RunProgress().to_json(), 0.5)
    return tmp_path


def test_the_index_of_checkpoints(checkpoints: Path) -> None:
    content = (checkpoints / "index.json").read_bytes()
    section = small_job(checkpoints).checkpoint

    def read(damaged: bytes) -> None:
        (checkpoints / "index.json").write_bytes(damaged)
        if read_index(checkpoints):
            Checkpoints(checkpoints, section).drop_damaged()

    check(read, inputs("index", content, 300, json.loads, json.dumps))


@pytest.mark.parametrize("name", ["rest.pt", "weights.safetensors"])
def test_the_files_of_a_checkpoint(checkpoints: Path, name: str) -> None:
    file = checkpoints / "epoch-0001" / name
    content = file.read_bytes()

    def read(damaged: bytes) -> None:
        file.write_bytes(damaged)
        read_checkpoint(file.parent)

    check(read, inputs(name, content, 150))


def test_the_progress_in_a_checkpoint() -> None:
    content = json.dumps(RunProgress().to_json()).encode()
    chance = random.Random("progress")

    def read(damaged: bytes) -> None:
        RunProgress.from_json(json.loads(damaged))

    values = (damaged_values(chance, json.loads(content)) for _ in range(500 * SCALE))
    check(read, (json.dumps(value).encode() for value in values))
