"""FSDP2 over 2 and 4 NCCL ranks that share one GPU: LARS, LAMB and AdamW leave the weights of one rank."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks

sys.path.append(str(Path(__file__).parents[1] / "dist"))
from test_dtensor import fsdp

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("world_size", [2, 4])
def test_fully_sharded_equals_one_rank(world_size):
    run_ranks(world_size, fsdp, world_size, "cuda", cuda=True, timeout_s=240)
