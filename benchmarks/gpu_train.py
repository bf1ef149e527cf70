"""A training step on one GPU: the product's learner against plain PyTorch and timm's step.

    python -m benchmarks.gpu_train                           all cases and variants
    python -m benchmarks.gpu_train --quick                   shorter blocks, fewer rounds
    python -m benchmarks.gpu_train --cases vit_s_224 --variants plain_tuned learner
    python -m benchmarks.gpu_train --device cpu --quick      a trial with small images

Needs no Ray, no network and no data set. Use a GPU that nobody else uses.

Cases (batch): resnet18_32 (1024), this package's cifar_resnet18 with 10 classes; resnet50_224
(256), torchvision's; vit_s_224 (256), torchvision's VisionTransformer of the size S/16; the last
two with 1,000 classes. A trial on a CPU has images of 32 x 32, 10 classes and batches of 4.

Variants. Loss: cross entropy with label smoothing 0.1. SGD with momentum, but for the
last two variants.
  plain             a script as torchvision's references write it: float32 (TF32 where torch does
                    so by default), NCHW, torch's default SGD, the loss read after each step
  plain_tuned       what one adds by hand: cudnn.benchmark, TF32, bf16 autocast, channels_last,
                    fused SGD, the loss stays on the device
  plain_compiled    the same, and torch.compile
  timm              the step of timm's train.py with --amp --amp-dtype bfloat16 --channels-last,
                    its optimizer factory and loss; `skipped` where timm is not installed
  learner           `raytrain_opt.train.learner.Learner` with precision: auto, compile: none
  learner_compiled  the same with compile: default
  learner_autotune_compiled    with compile: max-autotune
  learner_lars      learner with optimizer: LARS
  learner_muon      learner with optimizer: Muon; SGD's iteration is that of learner
On a CPU nothing is compiled.

The images are synthetic, uint8, and lie on the GPU; every variant crops, mirrors and normalizes
its batches there by the package's own `InMemoryData`, so that steps differ in nothing else.

What the timers cover. A block is a number of consecutive steps that take about --block-s, from
synchronization to synchronization; for the learner it is made of calls of `Learner.train`. Events
end each part within it: `data` (until the batch is ready), `forward` with the loss, `backward`,
`update`; what lies between an update and the next batch counts as data. Blocks of all variants
alternate, each round in the opposite order; figures are medians over the rounds.

The last line is one JSON object: `machine`, `settings`, `versions`, and `cases`:
  case -> batch_size, pixels, variants: name -> status (ok, skipped, out_of_memory,
  failed), why, if ok
    images_per_s, images_per_s_all (one for each round)
    ratio       to the fastest of plain, plain_tuned, plain_compiled and timm; above 1: faster
    ms          step, data, forward, backward, update
    peak_mib    most memory that PyTorch used for this variant's first steps; null on a CPU
    setup_s     first steps: cuDNN's trials, compiling
Exit code 2 without a GPU.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count, product
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.common import finite, machine, synthetic_images
from raytrain_opt.clock import monotonic_s
from raytrain_opt.config.schema import Job
from raytrain_opt.data import open_data
from raytrain_opt.data.base import Batch
from raytrain_opt.data.in_memory_sets import DatasetArrays
from raytrain_opt.data.transforms import IMAGENET_MEAN_STD
from raytrain_opt.models import build_model
from raytrain_opt.results import Steps
from raytrain_opt.train.kernels import choose_kernels
from raytrain_opt.train.learner import Learner
from raytrain_opt.train.learner_config import LearnerConfig
from raytrain_opt.train.micro_batches import MicroBatches

# Small enough that the networks' values stay in range, which timings depend on.
LR, MOMENTUM, WEIGHT_DECAY, SMOOTHING = 1e-3, 0.9, 1e-4, 0.1
PARTS = ("data", "forward", "backward", "update")
RIVALS = ("plain", "plain_tuned", "plain_compiled", "timm")
_STEPS_PER_EPOCH = 48  # their images fit on the GPU, and a phase takes seconds, as in a training
_WARM_UP_STEPS = 5


def vit_s(num_classes: int, sample_shape: tuple[int, ...]) -> nn.Module:
    """Return the vision transformer S/16."""
    from torchvision.models import VisionTransformer

    size = {"num_layers": 12, "num_heads": 6, "hidden_dim": 384, "mlp_dim": 1536}
    model: nn.Module = VisionTransformer(sample_shape[1], 16, num_classes=num_classes, **size)
    return model


@dataclass(frozen=True)
class Case:
    """A network and its batches."""

    model: Any
    pixels: int
    classes: int
    batch_size: int


CASES = {
    "resnet18_32": Case("cifar_resnet18", 32, 10, 1024),
    "resnet50_224": Case("resnet50", 224, 1000, 256),
    "vit_s_224": Case(vit_s, 224, 1000, 256),
}


class Clock:
    """Adds up the parts of steps: by events on a GPU's stream, by the clock on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._ends: list[tuple[str, Any]] = [("", self._now())]

    def mark(self, part: str) -> None:
        """End a part."""
        self._ends.append((part, self._now()))

    def sums_ms(self) -> dict[str, float]:
        """Return the sum of each part; the device must be synchronized."""
        sums = dict.fromkeys(PARTS, 0.0)
        for (_, start), (part, end) in zip(self._ends, self._ends[1:], strict=False):
            sums[part] += start.elapsed_time(end) if self._on_gpu else 1000 * (end - start)
        return sums

    def _now(self) -> Any:
        if not self._on_gpu:
            return monotonic_s()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


# Trains a number of steps and marks the end of each part.
# Begins with the kernels' settings, which belong to the process: variants take turns.
Train = Callable[[int, Clock], None]


class Bench:
    """A case on a device: its data and job, from which every variant is made."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        distinct, shape = max(case.batch_size, case.classes), (case.pixels, case.pixels, 3)
        x, y = synthetic_images(distinct, shape, case.classes)
        y[: case.classes] = range(case.classes)  # no class may be without samples
        rows = np.arange(_STEPS_PER_EPOCH * case.batch_size) % distinct
        self.arrays = DatasetArrays(x[rows], y[rows], x[:1], y[:1], case.classes)

    def config(self, **changes: Any) -> LearnerConfig:
        """Return the settings of a learner of one worker."""
        args = {"momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        data = {
            "name": "arrays",
            "train": ["x", "y"],  # given as arrays instead
            "test": ["x", "y"],
            "normalize": IMAGENET_MEAN_STD,
            "augment": {"crop_padding": self.case.pixels // 8, "flip": True},
        }
        job = {
            "model": self.case.model,
            "data": data,
            "loss": {"name": "cross_entropy", "label_smoothing": SMOOTHING},
            "epochs": 1,
            "global_batch_size": self.case.batch_size,
            "learning_rate": {"policy": "schedule", "shape": "constant", "initial": LR},
            "optimizer": {"name": "SGD", "args": args},
            "precision": "auto",
            "compile": "none",
            "workers": {"count": 1},
        }
        return LearnerConfig.from_job(Job.model_validate(job | changes))

    def learner(self, **changes: Any) -> Train:
        """Return the product's step."""
        learner = Learner(self.config(**changes), self.arrays, self.device)
        task, micro_batches, epochs = TimedTask(learner.task), MicroBatches(range(1), 1), count(1)
        learner.task = task
        learner.optimizer.register_step_pre_hook(lambda *_: task.clock.mark("backward"))
        learner.optimizer.register_step_post_hook(lambda *_: task.clock.mark("update"))

        def train(steps: int, clock: Clock) -> None:
            task.clock = clock
            choose_kernels("auto", self.device)
            for start in range(0, steps, _STEPS_PER_EPOCH):
                lrs = (LR,) * min(_STEPS_PER_EPOCH, steps - start)
                learner.train(next(epochs), Steps(0, lrs), micro_batches)

        return train

    def plain(self, *, tuned: bool = True, compiled: bool = False) -> Train:
        """Return the step of a script."""
        model = self._model(channels_last=tuned)
        if compiled:
            model.compile()
        settings: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        fused = True if tuned else None
        optimizer = torch.optim.SGD(model.parameters(), fused=fused, **settings)
        loss_sum = torch.zeros((), device=self.device)

        def loss_of(output: Tensor, y: Tensor) -> Tensor:
            return cross_entropy(output, y, label_smoothing=SMOOTHING)

        def meter(loss: Tensor) -> None:
            if tuned:
                loss_sum.add_(loss)
            else:
                loss.item()

        return self._loop(model, optimizer, loss_of, meter, tuned=tuned)

    def timm(self) -> Train:
        """Return the step of timm's train.py, which reads the loss when it logs only."""
        optim, losses = map(importlib.import_module, ("timm.optim", "timm.loss"))
        model = self._model(channels_last=True)
        settings: dict[str, Any] = {"lr": LR, "momentum": MOMENTUM, "weight_decay": WEIGHT_DECAY}
        optimizer = optim.create_optimizer_v2(model, opt="sgd", **settings)
        loss_of = losses.LabelSmoothingCrossEntropy(smoothing=SMOOTHING)
        return self._loop(model, optimizer, loss_of, lambda _: None, tuned=True)

    def _loop(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_of: Callable[[Tensor, Tensor], Tensor],
        meter: Callable[[Tensor], None],
        *,
        tuned: bool,
    ) -> Train:
        batches, device = self._batches(channels_last=tuned), self.device.type

        def train(steps: int, clock: Clock) -> None:
            choose_kernels("fp32", self.device) if tuned else default_kernels()
            for _ in range(steps):
                batch = next(batches)
                clock.mark("data")
                enabled = tuned and device == "cuda"  # as `precision: auto`
                with torch.autocast(device, dtype=torch.bfloat16, enabled=enabled):
                    loss = loss_of(model(batch.x), batch.y)
                clock.mark("forward")
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                clock.mark("backward")
                optimizer.step()
                meter(loss.detach())
                clock.mark("update")

        return train

    def _model(self, *, channels_last: bool) -> nn.Module:
        section, shape = self.config().model, (3, self.case.pixels, self.case.pixels)
        model = build_model(section, num_classes=self.case.classes, sample_shape=shape, seed=0)
        layout = torch.channels_last if channels_last else torch.contiguous_format
        return model.to(self.device, memory_format=layout)  # type: ignore[call-overload, no-any-return]

    def _batches(self, *, channels_last: bool) -> Iterator[Batch]:
        config = self.config()
        data = open_data(
            config.data,
            self.arrays,
            hold_out=config.hold_out,
            seed=0,
            device=self.device,
            channels_last=channels_last,
        )
        places, size = list(product(range(_STEPS_PER_EPOCH), range(1))), self.case.batch_size
        return chain.from_iterable(data.train_batches(e, places, 1, size) for e in count(1))


VARIANTS: dict[str, Callable[[Bench], Train]] = {
    "plain": lambda bench: bench.plain(tuned=False),
    "plain_tuned": Bench.plain,
    "plain_compiled": lambda bench: bench.plain(compiled=True),
    "timm": Bench.timm,
    "learner": Bench.learner,
    "learner_compiled": lambda bench: bench.learner(compile="default"),
    "learner_autotune_compiled": lambda bench: bench.learner(compile="max-autotune"),
    "learner_lars": lambda bench: bench.learner(optimizer="LARS"),
    "learner_muon": lambda bench: bench.learner(optimizer="Muon"),
}


class TimedTask:
    """A learner's task that marks when a batch arrives and when its loss is there."""

    def __init__(self, task: Any) -> None:
        self._task = task
        self.clock: Clock

    def __getattr__(self, name: str) -> Any:
        """Return what the task itself has."""
        return getattr(self._task, name)

    def training_loss(self, model: Any, batch: Any) -> Tensor:
        """Compute the task's loss."""
        self.clock.mark("data")
        loss: Tensor = self._task.training_loss(model, batch)
        self.clock.mark("forward")
        return loss


class Runner:
    """A variant of a case: set up, measured block by block, reported."""

    def __init__(self, bench: Bench, name: str) -> None:
        self._bench, self._name = bench, name
        self.status, self._why = "ok", ""
        self.blocks: list[dict[str, float]] = []
        self._setup_s, self._peak, self._steps = 0.0, 0, _WARM_UP_STEPS
        self._train: Train | None = None
        on_cpu = bench.device.type == "cpu"
        if name.endswith("_compiled") and on_cpu:
            self.status, self._why = "skipped", "needs a GPU"
        elif name == "timm" and importlib.util.find_spec("timm") is None:
            self.status, self._why = "skipped", "timm is not installed"

    def prepare(self, block_s: float) -> None:
        """Train the first steps, and choose the number of steps in a block."""
        started_s = monotonic_s()
        self.measure()
        self._setup_s = monotonic_s() - started_s
        self.measure()
        if self.status == "ok":
            self._steps = max(2, round(1000 * block_s / self.blocks[-1]["step"]))
        self.blocks.clear()

    def measure(self) -> None:
        """Measure a block; a variant that fails must not cost the others' figures."""
        if self.status != "ok":
            return
        try:
            self.blocks.append(self._block())
        except torch.OutOfMemoryError as error:
            self.status, self._why = "out_of_memory", str(error).splitlines()[0]
        except Exception as error:  # noqa: BLE001 - such as one of the compiler
            self.status, self._why = "failed", f"{type(error).__name__}: {error}"
        if self.status != "ok":
            self._train = None  # not in the handler: the exception's frames hold the tensors
            free_memory()

    def _block(self) -> dict[str, float]:
        device, on_gpu = self._bench.device, self._bench.device.type == "cuda"
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() if on_gpu else 0
        if self._train is None:
            self._train = VARIANTS[self._name](self._bench)
        own = torch.cuda.memory_allocated() - before if on_gpu else 0
        synchronize(device)
        clock, started_s = Clock(device), monotonic_s()
        self._train(self._steps, clock)
        synchronize(device)
        step_ms = 1000 * (monotonic_s() - started_s) / self._steps
        if on_gpu and own:  # later blocks begin with the variant in memory
            self._peak = torch.cuda.max_memory_allocated() - before
        return {"step": step_ms} | {k: v / self._steps for k, v in clock.sums_ms().items()}

    def report(self, best_ms: Sequence[float]) -> dict[str, Any]:
        """Return the variant's entry of `variants`; `best_ms`: the fastest rival's rounds."""
        if self.status != "ok":
            return {"status": self.status, "why": self._why}
        size, all_ms = self._bench.case.batch_size, [block["step"] for block in self.blocks]
        ratios = [best / own for best, own in zip(best_ms, all_ms, strict=False)]
        return {
            "status": "ok",
            "images_per_s": round(1000 * size / median(all_ms), 1),
            "images_per_s_all": [round(1000 * size / ms, 1) for ms in all_ms],
            "ratio": round(median(ratios), 4) if ratios else None,
            "ms": {key: round(median(b[key] for b in self.blocks), 3) for key in self.blocks[0]},
            "peak_mib": round(self._peak / 2**20) if self._peak else None,
            "setup_s": round(self._setup_s, 1),
        }


def run_case(name: str, args: argparse.Namespace) -> dict[str, Any]:
    """Measure the variants of one case."""
    device, case = torch.device(args.device), CASES[name]
    if device.type == "cpu":
        case = replace(case, pixels=32, classes=10, batch_size=4)
    bench = Bench(case, device)
    runners = {variant: Runner(bench, variant) for variant in args.variants}
    for variant, runner in runners.items():
        runner.prepare(args.block_s)
        print(f"{name}: {variant} {runner.status}", flush=True)
    for done in range(args.rounds):
        for variant in list(runners)[:: -1 if done % 2 else 1]:
            runners[variant].measure()
    rivals = [[b["step"] for b in runners[r].blocks] for r in RIVALS if r in runners]
    best_ms = min(filter(None, rivals), key=median, default=[])
    reports = {variant: runner.report(best_ms) for variant, runner in runners.items()}
    return {"batch_size": case.batch_size, "pixels": case.pixels, "variants": reports}


def default_kernels() -> None:
    """Undo `choose_kernels`: torch's defaults are TF32 for convolutions alone."""
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True
    torch.backends.cudnn.benchmark = False


def free_memory() -> None:
    """Free unreferenced memory."""
    gc.collect()
    torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    cases = {}
    for name in args.cases:
        cases[name] = run_case(name, args)
        print(json.dumps(finite({name: cases[name]})), flush=True)  # should a later one not end
        torch.compiler.reset()
        free_memory()
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    setting = {"machine": machine(), "settings": vars(args), "versions": versions}
    print(json.dumps(finite({"cases": cases, **setting})))


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A training step on one GPU, part by part.")
    parser.add_argument("--cases", nargs="+", choices=list(CASES), default=list(CASES))
    parser.add_argument("--variants", nargs="+", choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument("--quick", action="store_true", help="2 rounds of 0.2 s")
    parser.add_argument("--rounds", type=int, help="blocks of each variant (5)")
    parser.add_argument("--block-s", type=float, help="seconds of a block (3)")
    parser.add_argument("--device", default="cuda", help="cpu: a trial with small images")
    args = parser.parse_args(argv)
    rounds, block_s = (2, 0.2) if args.quick else (5, 3.0)
    args.rounds, args.block_s = args.rounds or rounds, args.block_s or block_s
    if args.device != "cpu" and not torch.cuda.is_available():
        parser.exit(2, "gpu_train needs an NVIDIA GPU, torch sees none (--device cpu: trial)\n")
    return args


if __name__ == "__main__":
    main()
