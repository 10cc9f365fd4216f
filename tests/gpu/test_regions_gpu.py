"""Compiled blocks on a GPU: captured steps against plain ones, accuracy, what auto chooses, caches, and a bench row."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from blocky import Network
from harness import run_ranks
from test_graph_gpu import config as small_run
from test_graph_gpu import curve, losses_of

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.bench.step import bench_step, format_result
from hyperbatch.config import BatchPhase
from hyperbatch.engine import loop
from hyperbatch.engine.compiled import CompiledRegions
from hyperbatch.engine.ranks import Ranks
from hyperbatch.models.layers import adopt
from hyperbatch.models.regions import find_regions
from hyperbatch.params import backward_order

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Inductor's, empty at the start."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.mktemp("inductor")))
        yield
    torch.compiler.reset()


def config(**values):
    """Twelve steps of three blocks on random images."""
    return small_run(**{"model": "blocky:network", "fused": "auto", "compile": "on", **values})


def train(out, **values):
    return loop.run(config(out=str(out), **values), Ranks()), curve(out)


def same_bits(left, right):
    a, b = checkpoint.load(left), checkpoint.load(right)
    for one, other in ((a.model, b.model), (a.norm, b.norm), (a.optimizer, b.optimizer)):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"precision": "bf16"},
        {"model": "blocky:dropped"},
        {"batch_phases": (BatchPhase(0, 64), BatchPhase(0.75, 96))},
        {"accumulate": 3},
    ],
    ids=["fp16", "bf16", "dropout", "two batches", "unequal micro-steps"],
)
def test_captured_compiled_steps_give_the_bits_of_uncaptured_ones(tmp_path, values):
    plain, losses = train(tmp_path / "plain", graph="off", **values)
    record, captured = train(tmp_path / "captured", graph="on", **values)
    for each in (plain, record):
        assert each.compiled["regions"] == 3
        assert not each.warnings
    assert record.environment["cuda_graph"]
    assert not plain.environment["cuda_graph"]
    assert captured == losses
    same_bits(tmp_path / "plain", tmp_path / "captured")


def test_strides_of_compiled_steps_give_the_bits_of_single_ones(tmp_path):
    _, single = train(tmp_path / "single", graph="on", steps_per_launch=1)
    record, strides = train(tmp_path / "strides", graph="on", steps_per_launch=4)
    assert record.environment["steps_per_launch"] == 4
    assert strides == single
    same_bits(tmp_path / "single", tmp_path / "strides")


def test_a_compiled_run_stops_and_goes_on_with_the_same_bits(tmp_path):
    """In another process it would load what this one has compiled: torch forgets what is in memory."""
    values = {"model": "blocky:dropped"}
    _, whole = train(tmp_path / "whole", **values)
    train(tmp_path / "parts", max_steps=5, **values)
    torch.compiler.reset()
    record, parts = train(tmp_path / "parts", resume=True, **values)
    assert record.compiled["cache_misses"] == 0
    assert record.compiled["cache_hits"] > 0
    assert [line for line in parts if line[1] is not None] == [line for line in whole if line[1] is not None]
    same_bits(tmp_path / "whole", tmp_path / "parts")


def test_auto_compiles_a_model_without_fused_kernels(tmp_path):
    values = {"compile": "auto", "deterministic": False}
    record, losses = train(tmp_path / "auto", **values)
    assert (record.compiled["regions"], record.compiled["kinds"]) == (3, 1)
    assert record.environment["cuda_graph"]
    assert not record.warnings
    plain, expected = train(tmp_path / "off", **(values | {"compile": "off"}))
    assert plain.compiled["regions"] == 0
    assert losses_of(losses) == pytest.approx(losses_of(expected), rel=0.02)
    fused, _ = train(tmp_path / "resnet", **values, model="resnet50", image_size=64, eval_size=64, max_steps=2)
    assert fused.compiled["regions"] == 0
    assert fused.environment["fused_kernels"]


def test_a_model_that_breaks_the_graph_trains_as_it_is(tmp_path):
    record, losses = train(tmp_path / "on", model="blocky:breaking", graph="off")
    assert [line.partition(":")[0] for line in record.warnings] == ["the model is not compiled"]
    _, plain = train(tmp_path / "off", model="blocky:breaking", graph="off", compile="off")
    assert losses == plain


def step(model, arena, seed):
    """Logits, gradients as they lie in the arena, and statistics, in float64."""
    images = torch.randn(32, 3, 16, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    arena.zero_grad()
    logits = model(images.to(CUDA, arena.dtype).contiguous(memory_format=torch.channels_last))
    logits.double().square().mean().backward()
    values = {"logits": logits.detach(), **arena.views(arena.grads), **dict(model.named_buffers())}
    return {name: value.double() for name, value in values.items() if value.numel() > 1}


def network(dtype):
    model = adopt(Network(4, 3)).to(CUDA).to(memory_format=torch.channels_last)
    if dtype == torch.float64:
        model.double()
    images = torch.zeros(2, 3, 16, 16, device=CUDA, dtype=model.stem.weight.dtype)
    return model, Arena(model, backward_order(model, lambda: model(images).sum().backward()), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_compiled_step_is_as_exact_as_the_models_own(dtype):
    """Against float64, over a dozen draws: single values may come out nearer or further by chance, all together not."""
    exact_model, exact_arena = network(torch.float64)
    model, arena = network(dtype)
    regions = CompiledRegions(find_regions(model), "on", {})
    squares = {"plain": Counter(), "compiled": Counter()}
    for seed in range(12):
        torch.manual_seed(seed)
        fresh = Network(4, 3).state_dict()
        model.load_state_dict(fresh)
        exact_model.load_state_dict(model.state_dict())  # the rounded weights
        exact = step(exact_model, exact_arena, seed)
        for way, square in squares.items():
            model.load_state_dict(fresh)
            if way == "compiled":
                with regions.compiling():
                    values = step(model, arena, seed)
            else:
                regions.give_up("for comparison")
                values = step(model, arena, seed)
            square.update({n: float((values[n] - v).norm() / v.norm()) ** 2 for n, v in exact.items()})
    ratios = {name: (squares["compiled"][name] / square) ** 0.5 for name, square in squares["plain"].items() if square}
    print({name: round(ratio, 3) for name, ratio in ratios.items()})
    assert statistics.geometric_mean(ratios.values()) <= 1.0
    assert max(ratios.values()) <= 1.5


def train_rank(rank, folder, values):
    ranks = Ranks(rank=rank, world_size=dist.get_world_size(), launcher="test")
    record = loop.run(config(out=folder, timeout_s=60.0, **values), ranks)
    return record.environment["cuda_graph"], record.compiled["regions"]


def test_two_ranks_capture_compiled_blocks_with_their_exchange(tmp_path):
    curves = {}
    for graph in ("off", "on"):
        values = {"graph": graph, "grouping": "threshold", "group_threshold_bytes": 512}
        seen = run_ranks(2, train_rank, str(tmp_path / graph), values, cuda=True, timeout_s=300)
        assert seen == [(graph == "on", 3)] * 2
        curves[graph] = curve(tmp_path / graph)
    assert curves["on"] == curves["off"]


# torch.compile's own graphs begin with an empty one.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty")
def test_bench_step_holds_compiled_blocks_against_the_same_model():
    """Speeds decide nothing here; they are printed for whoever runs it."""
    report = bench_step("blocky:network", batch=(64,), peers=["eager", "compile"], rounds=3, image_size=32)
    ours, plain, eager, compiled = report["rows"]
    assert ours["name"].endswith("hyperbatch compiled, graph")
    assert (ours["compiled"]["regions"], ours["compiled"]["kinds"]) == (3, 1)
    assert plain["compiled"] is None
    assert [eager["peer"], compiled["peer"]] == [True, True]
    assert all(row["finite"] and not row["skipped_updates"] for row in report["rows"])
    print(format_result(report))


@pytest.mark.parametrize(
    ("name", "regions", "kinds"),
    [("vit_small_patch16_224", 12, 1), ("convnext_tiny", 18, 4), ("resnet50d", 16, 8)],
)
def test_timms_models_are_compiled_by_block(tmp_path, name, regions, kinds):
    pytest.importorskip("timm")
    values = {"model": f"timm/{name}", "image_size": 224, "eval_size": 224, "eval_resize": 224, "compile": "auto"}
    values["fused"] = "off"  # as timm's ResNets are, else
    values |= {"deterministic": False, "max_steps": 3, "batch_phases": (BatchPhase(0, 32),), "lr": 0.01}
    record, losses = train(tmp_path, **values)
    print(record.compiled, losses)
    assert not record.warnings
    assert (record.compiled["regions"], record.compiled["kinds"]) == (regions, kinds)
    assert record.compiled["compilations"] == kinds
    assert record.environment["cuda_graph"]
