"""Rollback where steps are captured and ranks talk through NCCL: the graphs stay, and their tensors go back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "dist"))

from test_rollback import check_nan

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize(
    ("world_size", "values"),
    [
        (1, {"graph": "on", "steps_per_launch": 5}),
        (2, {"graph": "off"}),
        (2, {"graph": "on", "steps_per_launch": 1, "precision": "fp16"}),
        (2, {"graph": "on", "steps_per_launch": 5, "sharded_update": True, "precision": "bf16"}),
    ],
)
def test_a_nan_costs_the_steps_since_the_checkpoint_and_their_samples(tmp_path, world_size, values):
    check_nan(tmp_path, world_size=world_size, device="cuda", deterministic=True, **values)
