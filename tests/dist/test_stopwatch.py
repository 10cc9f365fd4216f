"""The stopwatch: what it counts; every rank gets the slowest rank's time. How long a call took decides nothing."""

import time

import pytest
import torch
from harness import run_ranks
from torch import nn

from hyperbatch import stopwatch

CPU = torch.device("cpu")


@pytest.mark.parametrize("measure", [stopwatch.wall_s, stopwatch.device_s])
def test_a_time_is_that_of_one_call(monkeypatch, measure):
    """The clock advances by one second with each call."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def run():
        now[0] += 1.0

    assert measure(run, device=CPU, calls=5) == 1.0
    assert now == [5.0]


def slowest(rank):
    return stopwatch.slowest_s(lambda: time.sleep(0.2 * rank), device=CPU), stopwatch.slowest_s(
        lambda: time.sleep(0.05), device=CPU, calls=2
    )


def test_every_rank_gets_the_time_of_the_slowest():
    answers = run_ranks(3, slowest)
    assert len(set(answers)) == 1
    first, second = answers[0]
    assert first >= 0.4
    assert second >= 0.05


def test_a_copy_is_counted_both_ways(monkeypatch):
    monkeypatch.setitem(stopwatch.COPY_BYTES, "cpu", 1000)
    seconds = iter([4.0, 2.0, 8.0, 5.0])
    monkeypatch.setattr(stopwatch, "device_s", lambda run, **_: next(seconds))
    assert stopwatch.copy_bytes_per_s(CPU) == 2 * 1000 / 2.0


def test_marks_of_gradients_follow_backward():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    params = dict(model.named_parameters())
    start = stopwatch.mark(CPU)
    with stopwatch.gradient_marks(params, CPU) as marks:
        model(torch.ones(1, 3)).sum().backward()
        ready_s = {name: stopwatch.seconds_between(start, moment) for name, moment in marks.items()}
        model(torch.ones(1, 3)).sum().backward()
        assert all(stopwatch.seconds_between(start, marks[name]) > ready_s[name] for name in params)
        marks.clear()
    assert set(ready_s) == set(params)
    assert 0 < ready_s["1.weight"] <= ready_s["0.weight"]
    model(torch.ones(1, 3)).sum().backward()
    assert marks == {}, "no hook is left behind"
