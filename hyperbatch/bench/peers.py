"""Peers of `bench data`: PyTorch's DataLoader, and DALI if it is installed."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from hyperbatch.bench.harness import Candidate
from hyperbatch.config import DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.folders import FolderSource
from hyperbatch.errors import InputError
from hyperbatch.vocabulary import IMAGENET_MEAN, IMAGENET_STD

NAMES = ("dataloader", "dali", "arrays")  # arrays: plain torch on small images in memory (data_arrays.py)


def check_names(names: Sequence[str] | None) -> tuple[str, ...]:
    """Returns the requested peers; None stands for all that are installed."""
    for name in names or ():
        if name not in NAMES:
            raise InputError(f"--peers: unknown peer {name!r} of `bench data`; use some of {', '.join(NAMES)}, or none")
    if names is not None and "dali" in names and not _has_dali():
        raise InputError("--peers dali: DALI is not installed; install it or leave it out")
    return tuple(NAMES if names is None else names)


def data_peers(
    names: Sequence[str], tree: FolderSource, *, image_size: int, batch: int, workers: int, device: torch.device
) -> list[Candidate]:
    """Returns the named peers that read files. Each makes one pass over the folder and returns its number of images."""
    candidates = []
    if "dataloader" in names:
        loader = DataLoader(
            _TorchStyle(tree, image_size),
            batch_size=batch,
            shuffle=True,
            num_workers=workers,
            persistent_workers=True,
            pin_memory=device.type == "cuda",
        )
        candidates.append(Candidate(name="DataLoader, folder, Pillow", run=lambda: _run(loader, device), peer=True))
    if "dali" in names and _has_dali():
        dali = _dali(tree, image_size, batch, workers, device)
        candidates.append(Candidate(name=f"DALI, folder, {device.type}", run=dali, peer=True))
    return candidates


def _has_dali() -> bool:
    try:
        importlib.import_module("nvidia.dali.fn")
    except ImportError:
        return False
    return True


def _run(loader: DataLoader, device: torch.device) -> int:
    return sum(len(images.to(device, non_blocking=True)) for images, _ in loader)


def _dali(tree: FolderSource, image_size: int, batch: int, threads: int, device: torch.device) -> Any:
    """The pipeline of DALI's own ResNet example. On a GPU it decodes and crops there."""
    fn = importlib.import_module("nvidia.dali.fn")
    types = importlib.import_module("nvidia.dali.types")
    pipeline_def = importlib.import_module("nvidia.dali").pipeline_def
    gpu = device.type == "cuda"

    @pipeline_def(batch_size=batch, num_threads=threads, device_id=0 if gpu else None, seed=0)
    def pipeline() -> Any:
        files, labels = fn.readers.file(file_root=str(tree.folder), random_shuffle=True, name="reader")
        images = fn.decoders.image_random_crop(
            files,
            device="mixed" if gpu else "cpu",
            output_type=types.RGB,
            random_area=(0.08, 1.0),
            random_aspect_ratio=(3 / 4, 4 / 3),
            num_attempts=10,
        )
        images = fn.resize(images, resize_x=image_size, resize_y=image_size, interp_type=types.INTERP_TRIANGULAR)
        images = fn.crop_mirror_normalize(
            images,
            dtype=types.FLOAT16 if gpu else types.FLOAT,
            output_layout="HWC" if gpu else "CHW",
            mean=[255 * value for value in IMAGENET_MEAN],
            std=[255 * value for value in IMAGENET_STD],
            mirror=fn.random.coin_flip(),
        )
        return images, labels

    made = pipeline()
    made.build()
    rounds = -(-len(tree) // batch)

    def run() -> int:
        for _ in range(rounds):
            made.run()
        return rounds * batch

    return run


class _TorchStyle(Dataset):
    """Does what torchvision's ImageFolder, RandomResizedCrop, flip, ToTensor and Normalize do, without torchvision."""

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
