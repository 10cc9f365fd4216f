"""Filters from the data on a CUDA device: the CPU's, from the same images, where captured steps read them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

from hyperbatch import checkpoint
from hyperbatch.config import BatchPhase, Config
from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.models.initial import whitening_filters

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
SAMPLES = 700


def config(**values) -> Config:
    defaults = {
        "dataset": "synthetic",
        "model": "whitenet",
        "init": "dirac",
        "whiten_samples": SAMPLES,
        "train_samples": 1024,
        "eval_samples": 64,
        "classes": 10,
        "image_size": 32,
        "eval_size": 32,
        "eval_resize": 32,
        "augment": "shift",
        "shift_pixels": 2,
        "optimizer": "sgd",
        "lr": 0.05,
        "warmup_epochs": 0.0,
        "epochs": 2.0,
        "max_steps": 3,
        "batch_phases": (BatchPhase(0, 128),),
        "precision": "fp16",
        "device": "cuda",
    }
    return Config(recipe="toy").override(**{**defaults, **values})


def covariance(images: torch.Tensor, filters: torch.Tensor) -> torch.Tensor:
    whitened = F.conv2d(images.double().cpu(), filters.double().cpu()).permute(1, 0, 2, 3).flatten(1)
    return whitened @ whitened.T / whitened.shape[1]


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_filters_whiten_as_the_cpus_do_and_are_the_same_each_time(dtype):
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(SAMPLES, 3, 36, 36, generator=generator)
    images = (F.avg_pool2d(noise, 3, stride=1)[:, :, 1:33, 1:33] * 3).to(CUDA, dtype)
    images = images.contiguous(memory_format=torch.channels_last)
    filters = whitening_filters([images], (2, 2))
    assert filters.device == CUDA
    assert filters.dtype == torch.float32
    assert torch.equal(filters, whitening_filters([images], (2, 2)))
    expected = covariance(images, whitening_filters([images.cpu()], (2, 2))[:12])
    torch.testing.assert_close(covariance(images, filters[:12]), expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("graph", ["on", "off"])
def test_a_run_sets_its_filters_before_the_first_step(tmp_path: Path, graph):
    """From the images as the loader shows them without augmentation; captured steps train on the new filters."""
    run = build_run(config(), Ranks(), CUDA)
    images = torch.cat([batch.images for batch in run.loader.plain(SAMPLES)])
    pixels = torch.from_numpy(run.train_set.images[:SAMPLES]).permute(0, 3, 1, 2) / 255  # type: ignore[attr-defined]
    run.close()
    torch.testing.assert_close(images.float().cpu(), (pixels - 0.5) / 0.289, rtol=1e-3, atol=1e-3)  # fp16
    loop.run(config(out=str(tmp_path), graph=graph), Ranks())
    saved = checkpoint.load(tmp_path)
    expected = whitening_filters([images], (2, 2)).half().cpu()
    assert torch.equal(saved.model["whiten.weight"], expected)
    assert saved.optimizer["momentum_buffer/whiten.bias"].any()
