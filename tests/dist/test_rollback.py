"""Runs whose loss becomes nan or jumps: all ranks go back together, the samples are passed over, the record says so."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from harness import run_ranks
from test_step_runner import Played
from toy import config, flat_weights, same_bits

from hyperbatch import checkpoint
from hyperbatch.engine import loop
from hyperbatch.engine.guard import LEAST_STEPS, SpikeWatch
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.runner import StepRunner
from hyperbatch.errors import RunFailed
from hyperbatch.record import RunRecord, read_metrics
from hyperbatch.report import write_report

CONFIG = {"epochs": 4.0, "eval_every_epochs": 1.0}  # 10 steps an epoch of 240 samples, then 5: 30 steps


def nan(run):
    run.learner.model[0].weight.data.view(-1)[3] = torch.nan


def jump(run):
    """On every rank alike, so that they do not drift apart."""
    for param in run.learner.model.parameters():
        param.data.mul_(-30)


FAULTS = {"nan": ("last", nan), "jump": ("all", jump)}


def train_faulty(rank, world_size, folder, fault, at, values, captured):
    """Steps, or the message of the failure. at: (after which step, how often) the fault is made."""
    where, make = FAULTS[fault]
    step_of_fault, times = at
    plain, runner, made = loop.average_weights, loop.StepRunner, []

    def spoil(run, step):
        plain(run, step)
        if step.index + 1 == step_of_fault and len(made) < times and (where == "all" or rank == world_size - 1):
            made.append(step)
            make(run)

    loop.average_weights = spoil
    if captured:
        loop.StepRunner = functools.partial(StepRunner, backend=Played(), warm=True)
    ranks = Ranks(rank=rank, world_size=world_size, launcher="test")  # each as on a host of its own
    try:
        return loop.run(config(out=str(folder), **{**CONFIG, **values}), ranks).result.steps
    except RunFailed as error:
        return str(error)
    finally:
        loop.average_weights, loop.StepRunner = plain, runner


def train(folder, fault="nan", at=(15, 1), *, world_size=2, captured=False, **values):
    """The same on every rank."""
    args = (world_size, folder, fault, at, values, captured)
    found = run_ranks(world_size, train_faulty, *args, cuda=values.get("device") == "cuda", timeout_s=240)
    assert len(set(found)) == 1, found
    return found[0]


def continued_with_others(folder, after, passed_over, **values):
    """What a run ends with that stops after `after` steps, and goes on with other samples."""
    assert train(folder, at=(0, 0), max_steps=after, **values) == after
    saved = checkpoint.load(folder)
    ahead = replace(saved.progress, passed_over=passed_over)
    checkpoint.save(folder / "checkpoints", replace(saved, progress=ahead), keep=9)
    assert train(folder, at=(0, 0), resume="yes", **values) == 30
    return flat_weights(folder)


def check_nan(folder, **values):
    """A nan costs the steps since the checkpoint and their samples; the rest is, bit for bit, as if these had never
    been in the stream."""
    out = folder / "run"
    assert train(out, **values) == 30
    record = RunRecord.load(out)
    (rollback,) = record.rollbacks
    found_after = rollback["step"]  # one stride late
    assert rollback["to_step"] == 10
    assert rollback["passed_over"] == (found_after - 10) * 24
    assert 16 <= found_after <= 20
    assert rollback["reason"].startswith("the loss became nan at step 16 ")
    assert rollback["message"] in write_report([out]).read_text()
    assert [line["step"] for line in read_metrics(out) if line["event"] == "step"] == list(range(1, 31))
    wanted = continued_with_others(folder / "other", 10, rollback["passed_over"], **values)
    assert same_bits(flat_weights(out), wanted)


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"captured": True, "steps_per_launch": 5},
        {"precision": "bf16", "sharded_update": True},
        {"model": "toy:normed", "averaging": "ema", "averaging_every_steps": 1},
    ],
    ids=["plain", "captured strides", "sharded masters", "norms and average"],
)
def test_a_nan_costs_the_steps_since_the_checkpoint_and_their_samples(tmp_path, values):
    check_nan(tmp_path, **values)


def test_a_jump_of_the_loss_is_rolled_back(tmp_path):
    """Weights that were bad when the newest checkpoint was taken are left for those of the one before."""
    assert train(tmp_path / "between", "jump", (23, 1)) == 30
    (rollback,) = RunRecord.load(tmp_path / "between").rollbacks
    assert rollback["reason"].startswith("the loss jumped to ")
    assert rollback["to_step"] == 20
    assert train(tmp_path / "saved", "jump", (25, 1)) == 30
    assert [rollback["to_step"] for rollback in RunRecord.load(tmp_path / "saved").rollbacks] == [25, 20]


def test_a_resumed_run_knows_its_rollbacks(tmp_path):
    once, twice = tmp_path / "once", tmp_path / "twice"
    assert train(once) == 30
    assert train(twice, max_steps=22) == 22
    assert train(twice, at=(0, 0), resume="yes") == 30
    assert RunRecord.load(twice).rollbacks == RunRecord.load(once).rollbacks
    assert same_bits(flat_weights(once), flat_weights(twice))


def test_the_number_of_rollbacks_is_bounded(tmp_path):
    line = train(tmp_path, at=(15, 9), max_rollbacks=2)
    assert line.startswith("the loss became nan at step 16 ")
    assert line.endswith("; the run was rolled back 2 times before (--max-rollbacks)")
    record = RunRecord.load(tmp_path)
    assert record.error == line
    assert [rollback["to_step"] for rollback in record.rollbacks] == [10, 10], "there is none before"
    assert record.failure["rank"] == 1


def test_without_a_checkpoint_there_is_no_way_back(tmp_path):
    line = train(tmp_path / "first", at=(5, 1))
    assert line.startswith("the loss became nan at step 6 ")
    assert "rolled back" not in line
    assert "the loss became nan at step 16" in train(tmp_path / "none", keep_checkpoints=0)
    assert train(tmp_path / "jump", "jump", (18, 1), keep_checkpoints=0) == 30, "a jump alone does not end a run"


def test_what_counts_as_a_jump():
    watch = SpikeWatch(4.0, classes=10)
    for _ in range(LEAST_STEPS - 1):
        watch.add(0.5)
    assert watch.usual(100.0) is None, "too few to know what is usual"
    watch.add(0.5)
    assert watch.usual(2.2) is None, "better than a guess"
    assert watch.usual(2.4) == 0.5
    for _ in range(64):
        watch.add(2.0)
    assert watch.usual(7.9) is None
    assert watch.usual(8.1) == 2.0
    assert SpikeWatch(0.0, classes=10).usual(1e9) is None
