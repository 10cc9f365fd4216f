"""`hyperbatch bench data`: images a second from JPEG files to normalised batches on the device, ours against PyTorch's.

Every candidate reads the same distinct generated JPEGs, makes a random-resized crop, mirrors, normalises and batches
them in float32. Files are read once before timing, so they come from the page cache: this measures decoding.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hyperbatch.bench import harness
from hyperbatch.bench.harness import Candidate
from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.decode import choose_decoder
from hyperbatch.data.folders import FolderSource
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.pack import pack
from hyperbatch.data.source import IMAGENET_MEAN, IMAGENET_STD, EncodedSource, open_data
from hyperbatch.schedule import resolve_phases, steps


def bench_data(
    *,
    images: int = 256,
    width: int = 500,
    height: int = 375,
    image_size: int = 224,
    batch: int = 64,
    threads: int = 0,
    rounds: int = 5,
    device: str = "auto",
) -> dict[str, Any]:
    """Rows of images a second. threads: of ours, and worker processes of the DataLoader; 0: one per core."""
    target = torch.device("cuda" if device == "auto" and torch.cuda.is_available() else device.replace("auto", "cpu"))
    threads = threads or len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory(prefix="hyperbatch-bench-") as folder:
        mean_bytes = write_jpegs(Path(folder, "tree"), images, width, height)
        pack(Path(folder, "tree"), Path(folder, "shards"))
        tree, _ = open_data(DataConfig(data=str(Path(folder, "tree"))))
        shards, _ = open_data(DataConfig(data=str(Path(folder, "shards"))))
        assert isinstance(tree, FolderSource)
        assert isinstance(shards, EncodedSource)

        def ours(source: EncodedSource, decoder: str) -> Callable[[], int]:
            config = DataConfig(image_size=image_size, decoder=decoder, data_threads=threads)
            return lambda: _run_ours(source, config, batch, target)

        candidates = [
            Candidate(name=f"hyperbatch, {kind}, {decoder}", run=ours(source, decoder))
            for decoder in dict.fromkeys((choose_decoder("auto"), "pillow"))
            for kind, source in (("folder", tree), ("shards", shards))
        ]
        peer = DataLoader(
            _TorchStyle(tree, image_size),
            batch_size=batch,
            shuffle=True,
            num_workers=threads,
            persistent_workers=True,
            pin_memory=target.type == "cuda",
        )
        candidates.append(Candidate(name="DataLoader, folder, Pillow", run=lambda: _run_peer(peer, target), peer=True))
        samples = harness.interleave(candidates, _images_per_s, rounds=rounds, warmup=1)
    table = harness.rows(
        candidates,
        samples,
        unit="img/s",
        higher_is_better=True,
        threads=threads,
        image=f"{width}x{height} JPEG, {mean_bytes / 1e3:.0f} kB",
        cache="page cache",
    )
    return harness.result("data", table)


def write_jpegs(folder: Path, count: int, width: int, height: int) -> float:
    """A folder tree of distinct JPEGs with the detail of photographs (about 70 kB at 500x375); their mean size."""
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("a", "b"):
            (folder / split / name).mkdir(parents=True)
    sizes = []
    for i in range(count + 2):  # the last two are the validation split that a set must have
        coarse = Image.fromarray(rng.integers(0, 256, (height // 6, width // 6, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) + rng.normal(
            0, 6, (height, width, 3)
        )
        path = folder / ("train" if i < count else "val") / "ab"[i % 2] / f"{i}.jpg"
        Image.fromarray(np.clip(pixels, 0, 255).astype(np.uint8)).save(path, quality=87)
        sizes.append(path.stat().st_size)
    return float(np.mean(sizes))


def _images_per_s(run: Callable[[], int]) -> float:
    start = time.perf_counter()
    images = run()
    if torch.cuda.is_available():
        torch.cuda.synchronize()  # the last batch counts when it has arrived
    return images / (time.perf_counter() - start)


def _run_ours(source: EncodedSource, config: DataConfig, batch: int, device: torch.device) -> int:
    plan = steps(resolve_phases((BatchPhase(0, batch),), len(source), 1), len(source), 1.0)
    with TrainLoader(source, config, seed=0, rank=0, world_size=1, device=device, dtype=torch.float32) as loader:
        return sum(len(made.labels) for made in loader.batches(plan))


def _run_peer(loader: DataLoader, device: torch.device) -> int:
    return sum(len(images.to(device, non_blocking=True)) for images, _ in loader)


class _TorchStyle(Dataset):
    """What torchvision's ImageFolder, RandomResizedCrop, flip, ToTensor and Normalize do, without needing it."""

    def __init__(self, source: FolderSource, image_size: int) -> None:
        self.source = source
        self.config = DataConfig(image_size=image_size)

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        uniforms = stream.uniforms(0, np.zeros(1), np.array([index]), augment.uniforms_needed(self.config))[0].tolist()
        with Image.open(self.source.path(index)) as file:
            image = file.convert("RGB")
        view = augment.train_view(self.config, image.width, image.height, 0, uniforms, whole=False)
        left, top, right, bottom = (int(side) for side in view.box)
        size = (self.config.image_size, self.config.image_size)
        image = image.crop((left, top, right, bottom)).resize(size, Image.Resampling.BILINEAR)
        if view.flip:
            image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
        pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous().float().div_(255)
        mean, std = torch.tensor(IMAGENET_MEAN).view(3, 1, 1), torch.tensor(IMAGENET_STD).view(3, 1, 1)
        return pixels.sub_(mean).div_(std), int(self.source.labels[index])
