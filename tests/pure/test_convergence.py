"""Epochs against batch, evaluations, failures."""

from __future__ import annotations

import pytest

from hyperbatch.config import BatchPhase, Config, RunConfig, ScheduleConfig
from hyperbatch.errors import InputError
from hyperbatch.recipes.mlperf import EPOCHS_TO_TARGET
from hyperbatch.sim.convergence import (
    LARGEST_BATCH,
    epochs_to_target,
    evaluations,
    failure_overhead,
    mlperf_epochs,
    spread,
)


def config(epochs: float = 90, every: float = 4, offset: float = 0) -> Config:
    return Config(
        schedule=ScheduleConfig(epochs=epochs, batch_phases=(BatchPhase(0, 8192),)),
        run=RunConfig(eval_every_epochs=every, eval_offset_epochs=offset),
    )


def test_the_curve_passes_its_points_and_rises() -> None:
    for batch, epochs in EPOCHS_TO_TARGET:
        assert mlperf_epochs(batch) == pytest.approx(epochs)
    sampled = [mlperf_epochs(256 * 1.3**i) for i in range(30)]
    assert sampled == sorted(sampled)
    assert mlperf_epochs(256) == pytest.approx(35)
    assert mlperf_epochs(131_072) > 100


def test_the_spread_is_small_but_real() -> None:
    assert 0.01 < spread() < 0.10


def test_a_recipe_takes_its_own_epochs_at_its_own_batch() -> None:
    own = epochs_to_target(config(90), 8192, 8192)
    assert own.mid == pytest.approx(90)
    assert own.low < own.mid < own.high
    larger = epochs_to_target(config(90), 8192, 65_536)
    assert larger.mid == pytest.approx(90 * 84.5 / 42)
    far = epochs_to_target(config(90), 8192, 1 << 20)
    assert far.high / far.low > larger.high / larger.low, "beyond the points nobody knows"


def test_batches_beyond_all_knowledge_are_refused() -> None:
    assert epochs_to_target(config(90), 8192, LARGEST_BATCH).high < float("inf")
    with pytest.raises(InputError, match="a global batch of 999,999,999 is too large to predict"):
        epochs_to_target(config(90), 8192, 999_999_999)


def test_the_target_shows_at_an_evaluation() -> None:
    assert evaluations(config(every=4), 41.0) == (11, 44.0)
    assert evaluations(config(every=4, offset=1), 41.0) == (10, 41.0)
    assert evaluations(config(epochs=90, every=4), 90.0) == (23, 90)
    assert evaluations(config(epochs=90, every=1), 0.5)[0] == 1


def test_failures_cost_a_restart_and_half_an_interval() -> None:
    assert failure_overhead(3600, 1000, None, 600, 60) == 0
    assert failure_overhead(3600, 1000, 3.6e6, 600, 60) == pytest.approx(1 * (60 + 300))
