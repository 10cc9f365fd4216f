"""Whole runs with the sharded update: equal to the plain one, in every precision, through checkpoints and resume."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from toy import config, flat_weights

from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks


def train_rank(rank, values):
    size = dist.get_world_size()
    ranks = Ranks(rank=rank, world_size=size, local_rank=rank, local_size=size, launcher="test")
    return run(config(**values), ranks).to_dict()["result"]["steps"]


def train(out, *, world_size, **values):
    run_ranks(world_size, train_rank, {"out": str(out), "model": "toy:normed", **values}, timeout_s=120)
    return flat_weights(out)


@pytest.mark.parametrize(
    ("precision", "grid", "algorithm", "limit"),
    # fp64: rounding of eight steps. bf16: sums of gradients round in another order, and steps amplify it.
    [("fp64", "2x2", "torus", 1e-11), ("fp64", "3x1", "flat", 1e-11), ("bf16", "2x1", "flat", 0.02)],
)
def test_sharded_runs_equal_plain_ones(tmp_path, precision, grid, algorithm, limit):
    rows, columns = map(int, grid.split("x"))
    values = {
        "precision": precision,
        "grid": grid,
        "algorithm": algorithm,
        "max_steps": 8,
        "world_size": rows * columns,
    }
    plain = train(tmp_path / "plain", **values)
    sharded = train(tmp_path / "sharded", sharded_update=True, **values)
    assert plain.keys() == sharded.keys()
    for name, tensor in plain.items():
        assert tensor.dtype == sharded[name].dtype
        assert (tensor - sharded[name]).abs().max() <= limit * tensor.abs().max(), name


def test_a_sharded_run_resumes(tmp_path):
    values = {"world_size": 2, "precision": "bf16", "sharded_update": True}
    through = train(tmp_path / "a", max_steps=6, **values)
    train(tmp_path / "b", max_steps=3, **values)
    resumed = train(tmp_path / "b", max_steps=6, resume=True, **values)
    assert all(torch.equal(through[name], resumed[name]) for name in through)


def test_muon_shares_out_its_matrices_and_resumes(tmp_path):
    values = {"world_size": 2, "optimizer": "muon", "lr": 0.05}
    plain = train(tmp_path / "plain", max_steps=4, **values)
    train(tmp_path / "shared", max_steps=2, sharded_update=True, **values)
    shared = train(tmp_path / "shared", max_steps=4, sharded_update=True, resume=True, **values)
    assert all(torch.equal(plain[name], shared[name]) for name in plain)


@pytest.mark.parametrize("optimizer", ["lamb", "adamw"])
def test_sharded_lamb_and_adamw_equal_plain_ones_and_resume(tmp_path, optimizer):
    values = {"world_size": 2, "optimizer": optimizer, "lr": 0.01, "layer_decay": 0.5, "precision": "fp64"}
    plain = train(tmp_path / "plain", max_steps=6, **values)
    train(tmp_path / "sharded", max_steps=3, sharded_update=True, **values)
    sharded = train(tmp_path / "sharded", max_steps=6, sharded_update=True, resume=True, **values)
    assert plain.keys() == sharded.keys()
    for name, tensor in plain.items():
        assert (tensor - sharded[name]).abs().max() <= 1e-11 * tensor.abs().max(), name
