"""Which rank is slow, and in which phase."""

from __future__ import annotations

import pytest

from hyperbatch.engine.stragglers import slow_ranks

USUAL = [0.001, 0.030, 0.060, 0.005, 0.110]  # data wait, forward, backward, update, step
HOSTS = ["a", "a", "b", "b"]


def others(odd, rank=2):
    rows = [list(USUAL) for _ in range(4)]
    rows[rank] = odd
    return rows


@pytest.mark.parametrize(("place", "phase"), list(enumerate(["data_wait", "forward", "backward", "update"])))
def test_the_slow_rank_is_named_with_its_phase(place, phase):
    odd = list(USUAL)
    odd[place] += 0.033
    (slow,) = slow_ranks(others(odd), HOSTS)
    assert (slow.rank, slow.host, slow.phase) == (2, "b", phase)
    assert slow.lost_s == pytest.approx(0.033)
    assert slow.share == pytest.approx(0.3)
    assert "rank 2 (host b) is slow" in slow.message
    assert "takes 33.0 ms longer than the median rank's, 30% of a step" in slow.message


def test_a_rank_that_is_hardly_slower_is_not():
    assert slow_ranks(others([0.001, 0.040, 0.060, 0.005, 0.110]), HOSTS) == []
    assert slow_ranks([[0.0, 0.0005, 0.0005, 0.0, 0.002], [0.0, 0.0015, 0.0005, 0.0, 0.002]], HOSTS) == []


def test_ranks_that_wait_are_not_slow():
    """The step is as long on all of them, and the time of those that wait is exposed communication."""
    rows = [[0.001, 0.030, 0.060, 0.005, 0.300]] * 3 + [[0.001, 0.230, 0.060, 0.005, 0.300]]
    assert [slow.rank for slow in slow_ranks(rows, HOSTS)] == [3]


def test_of_two_ranks_the_slower_one_is_named():
    assert [slow.rank for slow in slow_ranks([[0.001, 0.130, 0.060, 0.005, 0.220], USUAL], HOSTS)] == [0]
