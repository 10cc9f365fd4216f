"""The comparison with published runs: within its limits, better than naive, and the page is up to date."""

from __future__ import annotations

from pathlib import Path
from statistics import median

from benchmarks.published import LATER, ROWS
from benchmarks.validate import absolute_errors, predict, report, time_to_target_s
from hyperbatch.sim.sweep import STEP_ERROR

PAGE = Path(__file__).parents[2] / "docs" / "simulator_validation.md"


def test_errors_stay_within_their_limits_and_below_the_naive_predictors() -> None:
    errors = absolute_errors([predict(row) for row in ROWS])
    ours = errors.pop("**simulator**")
    assert median(ours) <= 0.10
    assert max(ours) <= 0.25
    for naive in errors.values():
        assert median(ours) < 0.75 * median(naive)
        assert max(ours) < 0.5 * max(naive)


def test_nine_in_ten_are_within_the_error_that_intervals_allow_for() -> None:
    ours = absolute_errors([predict(row) for row in ROWS])["**simulator**"]
    assert sum(error <= STEP_ERROR for error in ours) >= 0.9 * len(ours)


def test_intervals_hold_the_runs_found_later() -> None:
    for run in LATER:
        time = time_to_target_s(run)
        assert time.low <= run.seconds <= time.high
        assert abs(time.mid / run.seconds - 1) <= 0.10


def test_the_page_is_what_the_command_writes() -> None:
    assert PAGE.read_text() == report(), "run python -m benchmarks.validate"
