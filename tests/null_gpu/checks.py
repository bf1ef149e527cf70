"""What the tests ask of a process on the null CUDA device; each function prints its answer."""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# In the order of `Count` in special.cpp.
_COUNTS = ("launches", "pageable", "pinned", "to_host", "waits", "allocations", "replays")


def _answer(value: object) -> None:
    """Print the answer and end. Not by sys.exit: torch 2.15 may abort in its own clean-up here."""
    print(json.dumps(value), flush=True)
    os._exit(0)


def _device_counts() -> Counter[str]:
    library = ctypes.CDLL(os.path.join(os.environ["NULL_CUDA"], "libcuda.so.1"))
    values = (ctypes.c_long * len(_COUNTS)).in_dll(library, "null_gpu_counts")
    return Counter(dict(zip(_COUNTS, values, strict=True)))


def _counted(work: Callable[[], object]) -> dict[str, int]:
    """Return how often the work waits for the device, and copies from pageable memory."""
    before = _device_counts()
    work()
    after = _device_counts()
    return {name: after[name] - before[name] for name in ("waits", "pageable")}


def _learner(optimizer: str, precision: str) -> Any:
    from raytrain_opt.config.schema import Job
    from raytrain_opt.data import load_shared_data
    from raytrain_opt.train.learner import Learner
    from raytrain_opt.train.learner_config import LearnerConfig

    job = Job.model_validate(
        {
            "model": "small_cnn",
            "data": {"name": "digits", "augment": {"crop_padding": 1, "flip": True}},
            "epochs": 4,
            "global_batch_size": 64,
            "optimizer": optimizer,
            "precision": precision,
            "average": None if optimizer.startswith("ScheduleFree") else 0.9,
        }
    )
    return Learner(LearnerConfig.from_job(job), load_shared_data(job.data), torch.device("cuda"))


def steps(precision: str, *optimizers: str) -> None:
    """Print, for each optimizer, the waits and the pageable copies of each of the later steps."""
    from raytrain_opt.results import Steps
    from raytrain_opt.train.micro_batches import MicroBatches

    found: dict[str, dict[str, float] | str] = {}
    for optimizer in optimizers:
        learner = _learner(optimizer, precision)

        def train(first: int, count: int, learner: Any = learner) -> None:
            learner.train(1, Steps(first, (0.1,) * count), MicroBatches(range(1), 1))

        train(0, 3)
        few, many = (_counted(lambda f=f, n=n: train(f, n)) for f, n in ((3, 4), (7, 8)))  # type: ignore[misc]
        found[optimizer] = {name: (many[name] - few[name]) / 4 for name in few}
    _answer(found)


def memory() -> None:
    """Print status and allocated MiB after probes that fit, and do not, on a GPU of 256 MiB."""
    from torch.utils.data import TensorDataset

    from raytrain_opt.config.batch_size import ThroughputKneeSearch
    from raytrain_opt.train.batch_size_finder import endless_batches
    from raytrain_opt.train.batch_size_probe import ProbedTraining, measure, open_probe_sampler

    device, features = torch.device("cuda"), 1024
    layers = [nn.Sequential(nn.Linear(features, features), nn.ReLU()) for _ in range(6)]
    model = nn.Sequential(*layers).to(device)
    rows = torch.zeros(1, features).expand(200_000, -1)
    samples = TensorDataset(rows, torch.zeros(200_000, dtype=torch.long))

    def collate(batch: list[object]) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros(len(batch), features), torch.zeros(len(batch), dtype=torch.long)

    training = ProbedTraining(
        model,
        torch.optim.AdamW(model.parameters(), fused=True),
        lambda batch: nn.functional.cross_entropy(model(batch.x), batch.y),
        endless_batches(samples, device, {"collate_fn": collate}),
        device,
        lambda: torch.autocast("cuda", torch.bfloat16),
        torch.amp.GradScaler("cuda", enabled=False),
    )
    section = ThroughputKneeSearch(strategy="throughput_knee", max_probe_s=0.3)
    sampler = open_probe_sampler(section, device, 1)
    gc.disable()  # what a probe leaves in a cycle of references would stay
    found = []
    for size in (64, 20_000, 64, 20_000, 64):
        probe = measure(training, size, section, sampler)
        found.append((probe.status, torch.cuda.memory_allocated() >> 20))
    _answer(found)


def fork_server() -> None:
    """Print who calls CUDA while the fork server's modules are imported."""
    calls: list[str] = []

    def watch(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def watched(*args: Any, **options: Any) -> Any:
            calls.extend([name, *traceback.format_stack()[-4:]])
            return original(*args, **options)

        setattr(owner, name, watched)

    for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getCurrentRawStream"):
        watch(torch._C, name)
    for name in ("is_available", "device_count", "_lazy_init"):
        watch(torch.cuda, name)
    from raytrain_opt.cluster.fork_server import PRELOADED

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in PRELOADED:
            importlib.import_module(module)
    _answer([*calls, *["CUDA is initialized"] * torch.cuda.is_initialized()])
