"""Dropout and stochastic depth in CUDA graphs: captured, plain, stopped and resumed runs drop the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from test_graph_gpu import train

from hyperbatch import checkpoint
from hyperbatch.config import BatchPhase

VIT = {
    "model": "vit_cifar",
    "dropout": 0.1,
    "drop_path": 0.3,
    "precision": "bf16",
    "optimizer": "adamw",
    "lr": 1e-3,
    "weight_decay": 0.05,
    "layer_decay": 0.75,
    "image_size": 32,
    "eval_size": 32,
}
CASES = {
    "a step": {},
    "accumulation": {"accumulate": 4},
    "unequal micro-steps": {"accumulate": 5},
    "a batch change": {"batch_phases": (BatchPhase(0, 64), BatchPhase(0.5, 128))},
    "ema": {"averaging": "ema", "averaging_decay": 0.9},
}


def same_state(one, other):
    """Weights, their averages, statistics and optimizer state of the newest checkpoints."""
    a, b = checkpoint.load(one), checkpoint.load(other)
    for left, right in ((a.model, b.model), (a.optimizer, b.optimizer), (a.average, b.average), (a.norm, b.norm)):
        assert left.keys() == right.keys()
        for name in left:
            assert torch.equal(left[name], right[name]), name


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_captured_and_resumed_runs_drop_what_plain_ones_do(tmp_path, values):
    values = {**VIT, **values}
    _, plain = train(tmp_path / "plain", graph="off", **values)
    record, captured = train(tmp_path / "captured", graph="on", **values)
    assert record.environment["cuda_graph"]
    assert captured == plain
    same_state(tmp_path / "captured", tmp_path / "plain")
    train(tmp_path / "parts", graph="on", **{**values, "max_steps": 5})
    _, parts = train(tmp_path / "parts", graph="on", resume=True, **values)
    assert [line for line in parts if line[1] is not None] == [line for line in plain if line[1] is not None]
    same_state(tmp_path / "parts", tmp_path / "plain")


def test_what_is_dropped_counts(tmp_path):
    """Else the tests above would prove nothing."""
    _, dropped = train(tmp_path / "dropped", **VIT)
    _, kept = train(tmp_path / "kept", **{**VIT, "dropout": 0.0, "drop_path": 0.0})
    assert dropped != kept


class DrawsOnTheHost(nn.Module):
    """Skips a layer by a random number of the host's: a graph would always do what its capture did."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.first, self.second = nn.Conv2d(in_channels, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, classes)

    def forward(self, x):
        x = self.first(x)
        kept = not self.training or torch.rand(1).item() < 0.5
        return self.head((x + kept * self.second(x)).mean((2, 3)))


def test_a_model_that_draws_on_the_host_is_not_captured(tmp_path):
    values = {"model": "test_dropout_gpu:DrawsOnTheHost"}
    record, whole = train(tmp_path / "whole", **values)
    assert not record.environment["cuda_graph"]
    assert any("random numbers from the CPU generator" in line for line in record.warnings)
    train(tmp_path / "parts", **{**values, "max_steps": 5})
    _, parts = train(tmp_path / "parts", resume=True, **values)
    assert [line for line in parts if line[1] is not None] == [line for line in whole if line[1] is not None]
