"""Whole runs with compiled regions against plain ones. Inductor's code is left out: see `blocky.without_inductor`."""

import json

import blocky
import pytest
import torch
import torch.distributed as dist
from blocky import Network
from harness import run_ranks
from toy import config, flat_weights, same_bits

from hyperbatch.comm.sync import GradSync
from hyperbatch.config import BatchPhase
from hyperbatch.engine import compiled
from hyperbatch.engine.journal import Journal
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.export import load_trained
from hyperbatch.report.summary import summary


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(compiled, "compile_function", compiled.compile_function)  # put back after the test
    blocky.without_inductor()
    torch.set_num_threads(1)
    yield
    torch.compiler.reset()


def train(out, **values):
    """Rank 0's record and what it saved."""
    defaults = {"model": "blocky:network", "out": str(out), "batch_phases": (BatchPhase(0, 24),), "max_steps": 12}
    record = run(config(**{**defaults, **values}), Ranks())
    return record, flat_weights(out)


def close(left, right, rtol=1e-4):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(
            left[name], right[name], rtol=rtol, atol=1e-5, msg=lambda text, n=name: f"{n}: {text}"
        )


def test_a_compiled_run_trains_as_a_plain_one(tmp_path, capsys):
    """Weights, statistics and momentum, under the same names; what was compiled is told."""
    _, plain = train(tmp_path / "plain", compile="off")
    record, weights = train(tmp_path / "compiled", compile="on")
    close(weights, plain)
    assert not record.warnings
    about = json.loads((tmp_path / "compiled" / "record.json").read_text())["compiled"]
    assert about["choice"] == "on"
    assert (about["regions"], about["kinds"], about["compilations"]) == (3, 1, 1)
    assert about["seconds"] > 0
    assert "compiled  3 blocks of 1 kind, " in summary(record)


def test_auto_leaves_a_cpu_alone(tmp_path):
    record, weights = train(tmp_path / "auto")
    assert record.compiled["regions"] == 0
    assert record.compiled["reason"] == "--compile auto compiles only on a GPU, not on the CPU"
    assert not record.warnings
    assert "compiled" not in summary(record)
    assert same_bits(weights, train(tmp_path / "off", compile="off")[1])


def test_every_shape_of_a_run_is_compiled_before_it_begins(tmp_path, monkeypatch):
    """Two batch phases, one in unequal micro-steps: three shapes, and no compilation in a step that counts."""
    before: list[int] = []
    start = Journal.start

    def started(self, run, *args):
        before.append(run.learner.compilation.compilations)
        return start(self, run, *args)

    monkeypatch.setattr(Journal, "start", started)
    values = {"batch_phases": (BatchPhase(0, 24), BatchPhase(0.5, 49)), "accumulate": 2, "max_steps": 8}
    record, weights = train(tmp_path / "compiled", compile="on", **values)
    assert record.compiled["compilations"] == 3
    assert before == [3]
    close(weights, train(tmp_path / "plain", compile="off", **values)[1])


def test_a_run_goes_on_with_the_same_bits_and_the_other_way(tmp_path):
    """Dropout inside of a region, too, is drawn by (seed, step, rank)."""
    values = {"model": "blocky:dropped", "compile": "on"}
    _, whole = train(tmp_path / "whole", **values)
    train(tmp_path / "parts", **values, max_steps=5)
    torch.compiler.reset()  # as in a process of its own
    _, parts = train(tmp_path / "parts", **values, resume=True)
    assert same_bits(whole, parts)
    train(tmp_path / "other", **values, max_steps=5)
    _, plain = train(tmp_path / "other", **(values | {"compile": "off"}), resume=True)
    close(plain, whole)


def test_rates_that_differ_from_block_to_block_are_compiled_once_if_they_are_tensors(tmp_path):
    numbers, by_numbers = train(tmp_path / "numbers", model="blocky:deep_by_numbers", compile="on")
    tensors, by_tensors = train(tmp_path / "tensors", model="blocky:deep_by_tensors", compile="on")
    assert (numbers.compiled["compilations"], tensors.compiled["compilations"]) == (3, 1)
    close({name: by_tensors[name] for name in by_numbers}, by_numbers)  # the others have the rates, too


def test_an_average_of_the_weights_and_an_export_are_those_of_a_plain_run(tmp_path):
    values = {"averaging": "ema", "averaging_decay": 0.5}
    plain, _ = train(tmp_path / "plain", compile="off", **values)
    record, _ = train(tmp_path / "compiled", compile="on", **values)
    assert record.result.top1 == plain.result.top1
    trained, expected = (load_trained(tmp_path / name) for name in ("compiled", "plain"))
    assert trained.which == "averaged"
    close(trained.weights, expected.weights)
    assert set(trained.weights) == set(Network(4, 1).state_dict())
    assert trained.build(trust_code=True)(torch.zeros(2, 1, 8, 8)).shape == (2, 4)


def test_a_model_that_breaks_the_graph_trains_as_it_is(tmp_path, capsys):
    record, weights = train(tmp_path / "on", model="blocky:breaking", compile="on")
    (warning,) = record.warnings
    assert warning.startswith("the model is not compiled: ")
    assert "\n" not in warning
    assert record.compiled["regions"] == 0
    assert record.compiled["reason"] in warning
    assert f"note: {warning}" in capsys.readouterr().err
    assert same_bits(weights, train(tmp_path / "off", model="blocky:breaking", compile="off")[1])


def test_a_compiler_that_fails_is_named(tmp_path, monkeypatch):
    def broken(graph, inputs):
        raise ValueError("no code for this machine\nand more")

    def compile_function(function, options):
        return torch.compile(function, fullgraph=True, backend=broken)

    monkeypatch.setattr(compiled, "compile_function", compile_function)
    record, weights = train(tmp_path / "on", compile="on")
    assert record.warnings == ["the model is not compiled: ValueError: no code for this machine"]
    assert same_bits(weights, train(tmp_path / "off", compile="off")[1])


def test_a_model_of_which_nothing_repeats_is_compiled_whole(tmp_path):
    record, _ = train(tmp_path, compile="on", model="toy:plain", max_steps=2)
    assert record.compiled["regions"] == 1
    assert "compiled  the whole model, " in summary(record)


# --- two ranks ----------------------------------------------------------------------------------------------------


def ranks_here():
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank=rank, world_size=size, local_rank=rank, local_size=size, launcher="test")


def train_rank(rank, values, broken_rank):
    blocky.without_inductor()
    if rank == broken_rank:
        compiled.compile_function = lambda function, options: _raise
    arrived: list[int] = []
    launch = GradSync._launch

    def noted(self, step):
        if step.launched == 0:
            arrived.clear()
        arrived.append(sum(step.arrived))
        launch(self, step)

    GradSync._launch = noted
    return run(config(**values), ranks_here()).to_dict() | {"arrived": arrived}


def _raise(*args):
    raise RuntimeError("no compiler here")


def train_ranks(out, broken_rank=None, **values):
    values = {"out": str(out), "model": "blocky:network", "batch_phases": (BatchPhase(0, 24),), "max_steps": 8} | values
    records = run_ranks(2, train_rank, values, broken_rank, timeout_s=240)
    return records, flat_weights(out)


def test_two_ranks_exchange_planned_groups_of_compiled_regions(tmp_path):
    """A group for each few layers: they leave block by block as gradients arrive, and weights agree with plain runs."""
    values = {"grouping": "threshold", "group_threshold_bytes": 512}
    _, plain = train_ranks(tmp_path / "plain", compile="off", **values)
    records, weights = train_ranks(tmp_path / "compiled", compile="on", **values)
    close(weights, plain)
    assert [record["compiled"]["regions"] for record in records] == [3, 3]
    arrived = records[0]["arrived"]  # gradients, when each group of the last step left
    assert arrived == sorted(arrived)
    assert len(set(arrived)) >= 4  # the head and three blocks, one after the other
    assert arrived[-1] == sum(param.requires_grad for param in Network(4, 1).parameters())


def test_ranks_are_compiled_together_or_not_at_all(tmp_path):
    _, plain = train_ranks(tmp_path / "plain", compile="off")
    records, weights = train_ranks(tmp_path / "on", broken_rank=1, compile="on")
    assert [record["compiled"]["regions"] for record in records] == [0, 0]
    assert records[0]["warnings"] == ["the model is not compiled: RuntimeError: no compiler here"]
    assert same_bits(weights, plain)
