"""Whole runs over 2 and 4 NCCL ranks that share one GPU: captured against plain steps, and every way to exchange."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_graph_gpu import config as small_run
from test_graph_gpu import curve, losses_of

from hyperbatch import checkpoint
from hyperbatch.config import BatchPhase, SizePhase
from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
FUSED = {"model": "resnet50", "precision": "fp16", "fused": "on", "image_size": 64, "eval_size": 64, "max_steps": 6}


def config(**values):
    """Ten steps of a small residual network on random images."""
    return small_run(**{"max_steps": 10, "precision": "fp32", "timeout_s": 60.0, **values})


def run_cases(rank, folder, cases):
    """Each case trained in turn, in the process group that is already open."""
    ranks = Ranks(rank=rank, world_size=dist.get_world_size(), launcher="test")
    seen = {}
    for name, values in cases.items():
        record = loop.run(config(out=f"{folder}/{name.replace(' ', '_')}", **values), ranks)
        seen[name] = record.environment["cuda_graph"], record.environment["fused_kernels"]
    return seen


def train(folder, world_size, cases, **options):
    """Losses and accuracies of each case, as rank 0 wrote them, and whether steps were captured and fused."""
    seen = run_ranks(world_size, run_cases, str(folder), cases, cuda=True, timeout_s=300, **options)
    assert all(rank == seen[0] for rank in seen)
    return {name: curve(folder / name.replace(" ", "_")) for name in cases}, seen[0]


@pytest.mark.parametrize("world_size", [2, 4])
def test_captured_runs_give_the_bits_of_plain_ones(tmp_path, world_size):
    grid = f"2x{world_size // 2}"
    ways = {
        "flat": {},
        "torus": {"grid": grid, "algorithm": "torus", "wire_dtype": "bf16"},
        "hybrid": {"grid": grid, "algorithm": "hybrid", "hybrid_switch_bytes": 4096, "grouping": "per_layer"},
        "hierarchical": {"grid": grid, "algorithm": "hierarchical"},
        "optimal groups": {"grouping": "optimal"},
        "grouped norm": {"bn_group_ranks": 2},
        "sharded": {"sharded_update": True},
        "sharded torus": {"sharded_update": True, "grid": grid, "algorithm": "torus", "momentum_rule": "rescaled"},
        "sharded lamb": {"sharded_update": True, "optimizer": "lamb", "lr": 0.01, "layer_decay": 0.8},
        "sharded adamw": {"sharded_update": True, "optimizer": "adamw", "lr": 1e-3, "precision": "bf16"},
        "dropout": {"model": "vit_cifar", "dropout": 0.2, "drop_path": 0.2, "optimizer": "adamw", "lr": 1e-3},
        "accumulation": {"accumulate": 2},
        "a batch change": {"batch_phases": (BatchPhase(0, 64), BatchPhase(0.5, 128))},
        "resizing": {"size_phases": (SizePhase(0, 16), SizePhase(0.5, 24), SizePhase(1, 16))},
    }
    cases = {f"{name} {graph}": {**way, "graph": graph} for name, way in ways.items() for graph in ("off", "on")}
    curves, seen = train(tmp_path, world_size, cases)
    for name in ways:
        assert seen[f"{name} on"][0], name
        assert not seen[f"{name} off"][0], name
        if name == "optimal groups":  # each run measures its own, and sums of other groups round otherwise
            assert losses_of(curves[f"{name} on"]) == pytest.approx(losses_of(curves[f"{name} off"]), rel=1e-4)
        else:
            assert curves[f"{name} on"] == curves[f"{name} off"], name
    plain = losses_of(curves["flat off"])
    for name in ("hybrid", "hierarchical", "accumulation"):
        same = name != "accumulation"  # its batch-norm statistics are those of half the samples
        assert losses_of(curves[f"{name} off"]) == pytest.approx(plain, rel=1e-3 if same else 0.2), name


def test_strides_give_the_bits_of_single_steps(tmp_path):
    """Ten steps in threes, with their collectives in one graph."""
    ways = {
        "flat": {},
        "sgd": {"optimizer": "sgd", "lr": 0.05},
        "torus": {"grid": "2x1", "algorithm": "torus", "wire_dtype": "bf16"},
        "grouped norm": {"bn_group_ranks": 2},
        "sharded": {"sharded_update": True},
        "accumulation": {"accumulate": 2},
        "a batch change": {"batch_phases": (BatchPhase(0, 64), BatchPhase(0.5, 128))},
    }
    cases = {
        f"{name} {steps}": {**way, "graph": "on", "steps_per_launch": steps}
        for name, way in ways.items()
        for steps in (1, 3)
    }
    curves, seen = train(tmp_path, 2, cases)
    assert all(graph for graph, _ in seen.values())
    for name in ways:
        assert curves[f"{name} 3"] == curves[f"{name} 1"], name


@pytest.mark.parametrize("world_size", [2, 4])
def test_a_batch_shared_by_ranks_trains_as_one_rank_would(tmp_path, world_size):
    """With batch norm over all ranks there is no difference but rounding."""
    cases = {
        "plain": {"bn_group_ranks": world_size, "graph": "off"},
        "captured": {"bn_group_ranks": world_size, "graph": "on"},
        "sharded": {"bn_group_ranks": world_size, "sharded_update": True, "graph": "off"},
        "sharded, captured": {"bn_group_ranks": world_size, "sharded_update": True, "graph": "on"},
    }
    curves, seen = train(tmp_path, world_size, cases)
    alone = loop.run(config(out=str(tmp_path / "alone")), Ranks())
    expected = losses_of(curve(tmp_path / "alone"))
    assert len(expected) == alone.result.steps == 10
    for name, rows in curves.items():
        assert losses_of(rows) == pytest.approx(expected, rel=1e-3), name
    assert {name for name, (graph, _) in seen.items() if graph} == {"captured", "sharded, captured"}
    assert curves["sharded, captured"] == curves["sharded"]


@pytest.mark.parametrize("world_size", [2, 4])
def test_the_fused_step_is_exchanged_and_captured(tmp_path, world_size):
    grid = f"2x{world_size // 2}"
    ways = {
        "flat": {},
        "torus": {"grid": grid, "algorithm": "torus"},
        "sharded": {"sharded_update": True},
        "grouped norm": {"bn_group_ranks": 2},
    }
    cases = {f"{name} off": {**FUSED, **way, "graph": "off"} for name, way in ways.items()}
    cases |= {f"{name} on": {**FUSED, **way, "graph": "on"} for name, way in ways.items()}
    curves, seen = train(tmp_path, world_size, cases)
    assert all(fused for _, fused in seen.values()), seen
    assert {name for name, (graph, _) in seen.items() if graph} == {name for name in cases if name.endswith(" on")}
    plain = losses_of(curves["flat off"])
    for name, rows in curves.items():
        if not name.startswith("grouped"):
            assert losses_of(rows) == pytest.approx(plain, rel=0.02), name
    assert losses_of(curves["grouped norm on"]) == pytest.approx(losses_of(curves["grouped norm off"]), rel=0.02)


def test_ranks_train_inside_a_group_of_the_caller_that_knows_only_nccl(tmp_path):
    whole, _ = train(tmp_path, 2, {"whole": {"max_steps": 8}}, backend="nccl")
    train(tmp_path, 2, {"parts": {"max_steps": 4}}, backend="nccl")
    parts, seen = train(tmp_path, 2, {"parts": {"max_steps": 8, "resume": True}}, backend="nccl")
    assert seen["parts"][0]
    assert losses_of(parts["parts"]) == losses_of(whole["whole"])
    a, b = (checkpoint.load(tmp_path / name).model for name in ("whole", "parts"))
    assert all(torch.equal(a[name], b[name]) for name in a)
