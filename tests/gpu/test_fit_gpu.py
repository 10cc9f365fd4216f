"""The batch that fits, measured on a GPU: a run at that batch has room, one of 1.6 times as many samples has not."""

from __future__ import annotations

import gc

import pytest
import torch

from hyperbatch.config import BatchPhase, Config
from hyperbatch.engine import loop, measure
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import RunFailed

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
FREE_BYTES = 16 << 30


@pytest.fixture
def little_memory():
    """The rest of a large GPU is taken, so that the batch that fits is one of a few hundred samples."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(CUDA)
    if free < 0.95 * total:
        pytest.skip("another process uses this GPU, and memory that it takes or needs would decide the test")
    taken = torch.empty(max(0, free - FREE_BYTES), dtype=torch.uint8, device=CUDA)
    yield
    del taken
    gc.collect()
    torch.cuda.empty_cache()


def train(out, batch, **values):
    """Three steps of ResNet-50 on random images, with an evaluation behind them."""
    config = Config(recipe="fit").override(
        model="resnet50",
        dataset="synthetic",
        train_samples=3 * batch,
        eval_samples=64,
        classes=1000,
        precision="fp16",
        epochs=1.0,
        warmup_epochs=0.0,
        batch_phases=(BatchPhase(0, batch),),
        device="cuda",
        out=str(out),
        **values,
    )
    phase = loop.run(config, Ranks()).to_dict()["phases"][0]
    gc.collect()
    torch.cuda.empty_cache()
    return phase["accumulation"]


@pytest.mark.parametrize("fused", ["off", "auto"])
def test_the_measured_batch_fits_and_is_not_far_from_the_largest(tmp_path, monkeypatch, little_memory, fused):
    found, measured_batch = [], measure.measured_batch

    def noted(*args):
        found.append(measured_batch(*args))
        return found[-1]

    monkeypatch.setattr(measure, "measured_batch", noted)
    assert train(tmp_path / "small", 32, fused=fused) == 1
    (largest,) = found
    assert largest is not None
    assert largest > 32
    assert train(tmp_path / "largest", largest, fused=fused, accumulate=1) == 1
    # A fifth of the memory is kept free, so 1.6 times as much is 1.28 times what there is.
    too_large = int(1.6 * largest)
    assert train(tmp_path / "cut", too_large, fused=fused) == 2, "it is not claimed to fit"
    with pytest.raises((torch.OutOfMemoryError, RunFailed), match="memory"):
        train(tmp_path / "whole", too_large, fused=fused, accumulate=1)
