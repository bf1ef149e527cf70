"""Images per second and core from JPEG files to batches, against PIL.

    python -m benchmarks.decode [--images FOLDER] [--sizes 224 64] [--repetitions 7]

Both sides read the same files, decode them, take a random resized crop, mirror it with probability
0.5, and stack 64 uint8 images. Ours is what a loader process of `image_folder` does, with a seed
for each sample; the other side is torchvision's usual pipeline on PIL images, without seeds. One
thread; seconds are those of the processor; the sides alternate. Without --images, images with
the spectrum of photographs are generated, 224 x 224 and 500 x 375 pixels.

The last line printed is one JSON object: `ratio_to_pil` is the smallest of the medians of ours /
PIL over all files and sizes.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import torch
from PIL import Image
from torchvision.transforms import v2

from benchmarks.common import machine
from raytrain_opt.config.data import ImageFolderData
from raytrain_opt.data.batch_reader import BatchReader, BatchRequest
from raytrain_opt.data.image_folder import ImageFolderSource
from raytrain_opt.data.sampling import Purpose
from raytrain_opt.recording.recorder import versions

BATCH_SIZE = 64


def main() -> None:
    args = _arguments()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as temporary:
        folders = [args.images] if args.images else write_images(Path(temporary))
        results = {
            f"{folder.name} to {size}": compare(folder, size, args.repetitions, Path(temporary))
            for folder in folders
            for size in args.sizes
        }
    ratio = min(median(pair[0] / pair[1] for pair in pairs) for pairs in results.values())
    report = {
        "ratio_to_pil": round(ratio, 3),
        "results": {name: summary(pairs) for name, pairs in results.items()},
        "repetitions": args.repetitions,
        "machine": machine(),
        "versions": versions(),
    }
    print(json.dumps(report))


def compare(
    folder: Path, size: int, repetitions: int, temporary: Path
) -> list[tuple[float, float]]:
    """Return pairs of images per second: ours, PIL."""
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in (".jpg", ".jpeg"))
    root = Path(tempfile.mkdtemp(dir=temporary))
    for split in ("train", "val"):
        (root / split / "images").mkdir(parents=True)
    for number, file in enumerate(files):
        (root / "train" / "images" / f"{number:06}.jpg").symlink_to(file.absolute())
    (root / "val" / "images" / "0.jpg").symlink_to(files[0].absolute())
    section = ImageFolderData(name="image_folder", root=str(root), image_size=size)
    reader = BatchReader(ImageFolderSource(section), seed=0, skip=False)
    indices = range(len(files))
    batches = [tuple(indices[i : i + BATCH_SIZE]) for i in indices[::BATCH_SIZE]]
    augment = v2.Compose(
        [v2.RandomResizedCrop(size, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    )

    def ours() -> None:
        for batch in batches:
            request = BatchRequest("a batch", "train", Purpose.TRAIN_SAMPLE, 1, batch)
            loaded = reader.__getitems__([request])
            assert loaded.error is None

    def pil() -> None:
        for batch in batches:
            torch.stack([augment(read_with_pil(files[index])) for index in batch])

    pairs = [(seconds(ours), seconds(pil)) for _ in range(repetitions + 1)]
    return [(len(files) / ours_s, len(files) / pil_s) for ours_s, pil_s in pairs[1:]]


def read_with_pil(file: Path) -> Image.Image:
    with Image.open(file) as image:
        return image.convert("RGB")


def seconds(work: Callable[[], None]) -> float:
    started_s = time.process_time()
    work()
    return time.process_time() - started_s


def summary(pairs: Sequence[tuple[float, float]]) -> dict[str, object]:
    ratios = [ours / pil for ours, pil in pairs]
    return {
        "images_per_s_ours": round(median(ours for ours, _ in pairs), 1),
        "images_per_s_pil": round(median(pil for _, pil in pairs), 1),
        "ratio": [round(value, 3) for value in (min(ratios), median(ratios), max(ratios))],
    }


def write_images(folder: Path) -> list[Path]:
    """Write 64 JPEG files of each size; amplitudes fall with frequency, as in photographs."""
    random, folders = np.random.default_rng(0), []
    for height, width in ((224, 224), (375, 500)):
        folders.append(folder / f"{width}x{height}")
        folders[-1].mkdir()
        rows, columns = np.fft.fftfreq(height)[:, None], np.fft.fftfreq(width)
        amplitude = 1 / np.maximum(np.hypot(rows, columns), 1 / width)
        for number in range(64):
            noise = np.fft.fft2(random.normal(size=(3, height, width)))
            values = np.fft.ifft2(noise * amplitude).real
            pixels = np.clip(128 + 48 * values / values.std(), 0, 255).astype(np.uint8)
            Image.fromarray(pixels.transpose(1, 2, 0)).save(folders[-1] / f"{number}.jpg")
    return folders


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="JPEG files to batches, against PIL.")
    parser.add_argument("--images", type=Path, help="folder of JPEG files")
    parser.add_argument("--sizes", type=int, nargs="+", default=[224, 64])
    parser.add_argument("--repetitions", type=int, default=7)
    return parser.parse_args()


if __name__ == "__main__":
    main()
