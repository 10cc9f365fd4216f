"""Strides, several steps in one launch, give what the steps give one by one. Capture itself is played, as in
test_step_runner."""

from __future__ import annotations

import functools
import itertools
import json

import pytest
import torch
from harness import run_ranks
from test_step_runner import Played, runner_of
from test_training import ranks_here
from toy import config, flat_weights, same_bits

from hyperbatch.config import BatchPhase, SizePhase
from hyperbatch.data.batch import Batch
from hyperbatch.data.loader import TrainLoader
from hyperbatch.engine import learner as learner_module
from hyperbatch.engine import loop
from hyperbatch.engine.cuda_graphs import static_inputs
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.engine.runner import StepRunner, stride_length
from hyperbatch.engine.step import inputs_of, launches
from hyperbatch.engine.steptimer import Marks
from hyperbatch.errors import RunFailed
from hyperbatch.optim.rates import RateTable
from hyperbatch.plan.types import StepTiming

WAYS = ("plain", "played", "played, rates on the device")


def train(rank, folder, way, values):
    """What a run leaves, apart from times. On one of several ranks, or alone."""
    torch.set_num_threads(1)
    backend = None if way == "plain" else Played()
    loop.StepRunner = functools.partial(StepRunner, backend=backend, warm=backend is not None)
    learner_module.wants_graph = lambda *_: way == WAYS[2]  # what rates live on the device for
    record = loop.run(config(out=str(folder), **values), ranks_here())
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()] if rank == 0 else []
    lines = [tuple(row.get(key) for key in ("step", "epoch", "loss", "lr", "global_batch", "top1")) for row in rows]
    return record, lines, flat_weights(folder)


@pytest.fixture(autouse=True)
def restored(monkeypatch):
    """What `train` replaces."""
    monkeypatch.setattr(loop, "StepRunner", StepRunner)
    monkeypatch.setattr(learner_module, "wants_graph", learner_module.wants_graph)


def both(rank, folder, way, values, steps):
    _, lines, weights = train(rank, folder / "single", way, {**values, "steps_per_launch": 1})
    record, stride_lines, stride_weights = train(rank, folder / "strides", way, {**values, "steps_per_launch": steps})
    assert stride_lines == lines
    assert same_bits(weights, stride_weights)
    return record


CASES = {
    "lars": {},
    "sgd": {"optimizer": "sgd", "lr": 0.05},
    "lamb": {"optimizer": "lamb", "lr": 0.02},
    "rescaled momentum": {"momentum_rule": "rescaled"},
    "decoupled decay": {"decoupled_weight_decay": True, "weight_decay": 1e-2},
    "accumulation": {"accumulate": 3},
    "unequal micro-steps": {"accumulate": 5},
    "fp16": {"precision": "fp16"},
    "resizing": {"model": "toy:pooled", "size_phases": (SizePhase(0, 8), SizePhase(1, 6), SizePhase(3, 8))},
    "mixed images": {"mixup": 0.2, "cutmix": 1.0, "auto_augment": "trivial", "accumulate": 5},
    "few lines": {"log_every_steps": 3},
    "many checkpoints": {"checkpoint_every_epochs": 0.7, "max_steps": 27},
}


ALL_WAYS = ("lars", "accumulation", "few lines")


@pytest.mark.parametrize(
    ("name", "way"), [(name, way) for name in CASES for way in (WAYS if name in ALL_WAYS else WAYS[2:])]
)
def test_strides_give_the_bits_of_single_steps(tmp_path, name, way):
    """Four steps at a time, where so many follow each other: the batch doubles after 20 steps."""
    record = both(0, tmp_path, way, CASES[name], 4)
    assert record.environment["steps_per_launch"] == 4
    assert record.environment["cuda_graph"] == (way != "plain")
    assert record.timing["step_s"] > 0


RANKS_CASES = {
    "lars": {},
    "sgd": {"optimizer": "sgd", "lr": 0.05, "accumulate": 2},
    "sharded": {"sharded_update": True},
}


def train_together(rank, folder):
    for name, values in RANKS_CASES.items():
        for way in WAYS[:2] if name == "lars" else WAYS[1:2]:
            record = both(rank, folder / f"{name} {way}", way, {**values, "max_steps": 24}, 3)
            assert record.environment["steps_per_launch"] == 3


def test_strides_of_two_ranks_give_the_bits_of_single_steps(tmp_path):
    run_ranks(2, train_together, tmp_path, timeout_s=120)


@pytest.mark.parametrize("way", WAYS[:2])
def test_steps_that_draw_random_numbers_are_captured_one_by_one(tmp_path, way):
    """A graph cannot be seeded in the middle; as plain code each step can."""
    record = both(0, tmp_path, way, {"model": "toy:normed"}, 4)
    assert record.environment["steps_per_launch"] == (4 if way == "plain" else 1)


def test_a_run_stops_and_goes_on_with_other_strides(tmp_path):
    _, whole, weights = train(0, tmp_path / "whole", "played", {})
    stops = {"max_steps": 7, "steps_per_launch": 4, "final_eval": False}
    train(0, tmp_path / "parts", "played", stops)
    train(0, tmp_path / "parts", "plain", {**stops, "max_steps": 18, "steps_per_launch": 3, "resume": True})
    _, parts, others = train(0, tmp_path / "parts", "played", {"steps_per_launch": 5, "resume": True})
    assert parts == whole
    assert same_bits(weights, others)


def test_rates_are_sent_once_a_stride_when_its_batch_is_there(tmp_path, monkeypatch):
    """A copy that waits behind the step before must not be queued while the loader still copies."""
    events = []

    def noted(kind, name):
        original = getattr(kind, name)

        def call(*values, **options):
            events.append(name)
            return original(*values, **options)

        monkeypatch.setattr(kind, name, call)

    noted(StepRunner, "run")
    noted(RateTable, "write")
    batches = TrainLoader.batches

    def given(*values, **options):
        for batch in batches(*values, **options):
            events.append("batch")
            yield batch

    monkeypatch.setattr(TrainLoader, "batches", given)
    loop.run(config(out=str(tmp_path), accumulate=2, max_steps=2), Ranks())
    assert events == ["batch", "write", "run", "batch", "run"] * 2


def test_a_stride_is_one_launch(tmp_path, monkeypatch):
    """Ten steps an epoch are two strides of four and two steps; then five are one stride and one step."""
    backend = Played()
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, backend=backend, warm=True))
    record = loop.run(config(out=str(tmp_path), steps_per_launch=4, accumulate=2), Ranks())
    assert record.result.steps == 30
    # A first and a last micro-step in two turns and a stride, of two shapes.
    assert backend.captured == 2 * (2 * 2 + 1)
    # Before the run a step is measured three times, and each stride is launched once.
    before = 3 * 2 + 2
    assert backend.replayed == before + 2 * (2 + 2 * 2) + 2 * (1 + 2)


@pytest.mark.parametrize(("micro_batches", "image_size", "aligned"), [((24,), 8, True), ((8, 7), 5, False)])
def test_one_copy_fills_the_inputs_of_a_stride_where_they_stay_aligned(micro_batches, image_size, aligned):
    """Each micro-step reads its own samples, with a channel of zeros beside them, as fused kernels want it."""
    run = build_run(config(), Ranks(), torch.device("cpu"))
    run.learner.fused, run.learner.in_channels = True, 3
    (launch,) = launches(micro_batches, 2)
    inputs, samples = static_inputs(run.learner, launch, image_size), 2 * sum(micro_batches)
    assert len(inputs.written) == (1 if aligned else len(launch))
    batch = Batch(torch.randn(samples, 3, image_size, image_size), torch.arange(samples))
    parts = [(batch.images, batch.labels)] if aligned else inputs_of(batch, launch)
    for (images, labels), part in zip(inputs.written, parts, strict=True):
        images.copy_(part[0])
        labels.copy_(part[1])
    for (images, labels), part in zip(inputs.read, inputs_of(batch, launch), strict=True):
        assert torch.equal(images, part[0])
        assert torch.equal(labels, part[1])
        assert images.is_set_to(images.padded[:, :3])
        assert not images.padded[:, 3].any()
        assert images.data_ptr() % 64 == 0
    run.close()


def test_a_loss_that_is_lost_within_a_stride_is_named_and_not_saved(tmp_path, monkeypatch):
    train_stride = loop.train_stride

    def lost(runner, stride, *rest):
        losses = train_stride(runner, stride, *rest)
        losses[[step.index == 5 for step in stride]] = torch.nan
        return losses

    monkeypatch.setattr(loop, "train_stride", lost)
    with pytest.raises(RunFailed, match="the loss became nan at step 6 "):
        loop.run(config(out=str(tmp_path), steps_per_launch=4, checkpoint_every_epochs=0.4), Ranks())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000004.pt"]


def test_times_within_a_stride_are_even(tmp_path):
    loop.run(config(out=str(tmp_path), steps_per_launch=5, max_steps=10), Ranks())
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    times = [row["time_s"] for row in rows if row["event"] == "step"]
    assert times == sorted(times)
    for stride in (times[:5], times[5:]):
        gaps = [b - a for a, b in itertools.pairwise(stride)]
        assert gaps == pytest.approx([gaps[0]] * 4)


def test_a_replayed_stride_divides_as_a_step_alone_does():
    alone = StepTiming(step_s=9.0, forward_s=1.0, backward_s=2.0, exposed_comm_s=0.5, update_s=0.5, data_wait_s=5.0)
    timing = Marks(1.0, (("data_wait", 2.0), ("stride", 18.0)), 4, alone).timing(())
    assert timing == StepTiming(
        step_s=4.25, data_wait_s=0.25, forward_s=1.0, backward_s=2.0, exposed_comm_s=0.5, update_s=0.5
    )


def test_plain_steps_of_a_stride_are_averaged():
    names = (
        "data_wait",
        "forward",
        "backward",
        "exposed_comm",
        "update",
        "forward",
        "backward",
        "exposed_comm",
        "update",
    )
    marks = Marks(0.0, tuple(zip(names, (1.0, 2.0, 4.0, 4.5, 5.0, 8.0, 12.0, 12.5, 14.0))), 2)
    assert marks.timing(()) == StepTiming(
        step_s=7.0, data_wait_s=0.5, forward_s=2.0, backward_s=3.0, exposed_comm_s=0.5, update_s=1.0
    )
    assert marks.last_step_s() == 5.0
    assert Marks(0.0, marks.ends[:5]).last_step_s() == 0.0


@pytest.mark.parametrize(
    ("step_s", "block_steps", "length"),
    [
        (0.0025, 248, 9),
        (0.0025, 33, 8),
        (0.0025, 10, 10),
        (0.012, 1000, 2),
        (0.013, 1000, 1),
        (1e-5, 4096, 16),
        (1e-5, 7, 7),
        (0.09, 1, 1),
    ],
)
def test_short_steps_fill_a_launch(step_s, block_steps, length):
    assert stride_length(step_s, block_steps) == length


def test_the_length_of_strides_follows_from_a_measured_step(monkeypatch):
    """A batch twice as large takes twice as long, an image of twice the side four times."""
    sizes = (SizePhase(0, 4), SizePhase(1, 8))
    phases = (BatchPhase(0, 24), BatchPhase(2, 48))
    run = build_run(config(model="toy:pooled", size_phases=sizes, batch_phases=phases), Ranks(), torch.device("cpu"))
    timing = StepTiming(step_s=0.0021, forward_s=0.001, backward_s=0.001, exposed_comm_s=0.0, update_s=0.0001)
    runner = runner_of(run, backend=Played(), warm=True)
    monkeypatch.setattr(StepRunner, "_measure", lambda *_: timing)
    steps = {(step.phase.global_batch, runner.shape(step)[1]): step for step in loop.steps_left(run)}
    left = list(loop.steps_left(run))
    assert {runner.length(step) for step in left} == {1}, "before it is chosen"
    runner.choose_length(left)
    assert {runner.length(step) for step in left} == {1}, "not on a CPU"
    runner.choose_length(left * 11, measure=True)
    assert {shape: runner.length(step) for shape, step in steps.items()} == {(24, 4): 11, (24, 8): 2, (48, 8): 1}
    assert runner.alone == timing
    run.close()


def measures_apart(rank):
    """The time of rank 0 counts. Where only rank 1 draws random numbers, nobody has strides."""
    run = build_run(config(), ranks_here(), torch.device("cpu"))
    left, lengths = list(loop.steps_left(run)) * 10, []
    timing = StepTiming(step_s=0.004 * (1 + rank), forward_s=0.0, backward_s=0.004, exposed_comm_s=0.0, update_s=0.0)
    Marks.timing = lambda *_: timing
    for draws in (False, rank == 1):
        runner = runner_of(run, backend=Played(), warm=True)
        runner._draws = draws
        runner.choose_length(left, measure=True)
        lengths.append(runner.length(left[0]))
    run.close()
    return lengths


def test_all_ranks_take_the_same_strides():
    assert run_ranks(2, measures_apart) == [[6, 1]] * 2


def test_a_measured_step_leaves_no_trace():
    run = build_run(config(), Ranks(), torch.device("cpu"))
    runner = runner_of(run, backend=Played(), warm=True)
    before = [tensor.clone() for tensor in run.learner.arena.flat_weights()]
    left = list(loop.steps_left(run))
    runner.choose_length(left, measure=True)
    assert runner.alone.step_s > 0
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.arena.flat_weights(), strict=True))
    run.close()
