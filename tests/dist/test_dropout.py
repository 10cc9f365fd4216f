"""Dropout and stochastic depth: what is dropped follows from seed, step and rank, however a run gets to a step."""

from __future__ import annotations

import functools

import pytest
import torch
from harness import run_ranks
from test_step_runner import Played
from test_training import ranks_here
from toy import config, flat_weights, same_bits

from hyperbatch.engine import loop
from hyperbatch.engine.runner import StepRunner

STEPS = 8
VALUES = {"model": "toy:Dropping", "epochs": 1.0, "max_steps": STEPS, "final_eval": False, "precision": "fp64"}


def train(out, *, captured=False, nan_after=None, **values):
    """(step, micro-step) -> what this rank dropped there, of each time that it was trained; and the saved weights."""
    torch.set_num_threads(1)
    micro_step, runner, average_weights = loop.micro_step, loop.StepRunner, loop.average_weights
    found, first_step, micro, spoiled = {}, None, 0, False

    class Watched(StepRunner):
        def run(self, stride, launch, batch, timer):
            nonlocal first_step
            first_step = stride[0].index
            super().run(stride, launch, batch, timer)
            first_step = None  # what runs outside is a warm-up

    def note(learner, part, *args):
        nonlocal micro
        micro_step(learner, part, *args)
        micro = 0 if part.first else micro + 1
        if first_step is not None:
            found.setdefault((first_step + part.step, micro), []).append(learner.model.dropped[-1])

    def spoil(run, step):
        nonlocal spoiled
        average_weights(run, step)
        if step.index + 1 == nan_after and not spoiled:
            spoiled = True
            run.learner.model.inputs.weight.data.view(-1)[3] = torch.nan

    loop.micro_step, loop.average_weights = note, spoil
    loop.StepRunner = functools.partial(Watched, **({"backend": Played(), "warm": True} if captured else {}))
    try:
        loop.run(config(out=str(out), **{**VALUES, **values}), ranks_here())
    finally:
        loop.micro_step, loop.StepRunner, loop.average_weights = micro_step, runner, average_weights
    return found, flat_weights(out)


def same(a, b):
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def stop_and_go_on(rank, folder, accumulate, stops):
    whole, weights = train(folder / "whole", accumulate=accumulate)
    assert whole.keys() == {(step, micro) for step in range(STEPS) for micro in range(accumulate)}
    for stop in stops:
        out = folder / f"stopped after {stop}"
        first, _ = train(out, accumulate=accumulate, max_steps=stop)
        rest, resumed = train(out, accumulate=accumulate, resume=True)
        assert {step for step, _ in first} == set(range(stop))
        assert {step for step, _ in rest} == set(range(stop, STEPS))
        assert all(same(masks, {**first, **rest}[place]) for place, masks in whole.items())
        assert same_bits(weights, resumed)
    return [masks[0] for masks in whole.values()]


@pytest.mark.parametrize(("world_size", "accumulate"), [(1, 1), (1, 3), (2, 2)])
def test_a_run_that_was_stopped_at_any_step_drops_the_same(tmp_path, world_size, accumulate):
    if world_size == 1:
        masks = stop_and_go_on(0, tmp_path, accumulate, range(1, STEPS))
    else:
        ranks = run_ranks(world_size, stop_and_go_on, tmp_path, accumulate, (3, 5), timeout_s=120)
        masks = [mask for rank in ranks for mask in rank]
    assert len(masks) == world_size * STEPS * accumulate
    assert all(0.4 < mask.double().mean() < 0.85 for mask in masks), "half by dropout, a quarter of the rest by branch"
    assert not any(same([a], [b]) for i, a in enumerate(masks) for b in masks[:i]), "no two are alike"


@pytest.mark.parametrize("accumulate", [1, 3])
def test_captured_steps_and_strides_drop_the_same(tmp_path, accumulate):
    plain, weights = train(tmp_path / "plain", accumulate=accumulate)
    for name, options in {
        "captured": {"captured": True},
        "strides": {"steps_per_launch": 4},
        "captured strides": {"captured": True, "steps_per_launch": 4},
    }.items():
        table, others = train(tmp_path / name, accumulate=accumulate, **options)
        assert table.keys() == plain.keys()
        assert all(same(masks, plain[place]) for place, masks in table.items()), name
        assert same_bits(weights, others)


def roll_back(rank, folder):
    values = {"checkpoint_every_epochs": 0.3, "max_rollbacks": 1}  # 10 steps an epoch
    whole, _ = train(folder / "whole", **values)
    again, _ = train(folder / "again", nan_after=5, **values)
    assert whole.keys() == again.keys()
    assert all(torch.equal(masks[-1], whole[place][0]) for place, masks in again.items())
    return sum(len(masks) == 2 for masks in again.values())


def test_steps_that_are_done_again_after_a_rollback_drop_the_same(tmp_path):
    """Their samples are others; what is dropped is not."""
    assert run_ranks(2, roll_back, tmp_path, timeout_s=120) == [3, 3]


def test_another_seed_drops_something_else(tmp_path):
    one, _ = train(tmp_path / "one", max_steps=1)
    other, _ = train(tmp_path / "other", max_steps=1, seed=1)
    assert not same(one[0, 0], other[0, 0])


def test_the_rates_are_those_of_the_config(tmp_path):
    table, _ = train(tmp_path, max_steps=2, dropout=0.0, drop_path=0.0)
    assert not any(mask.any() for masks in table.values() for mask in masks)
