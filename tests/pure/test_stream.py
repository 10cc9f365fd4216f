"""The sample stream: nothing lost, nothing repeated, whatever the world size, the batch, or where a run was cut."""

import subprocess
import sys
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperbatch.config import BatchPhase
from hyperbatch.data import stream
from hyperbatch.schedule import resolve_phases, steps


def order(length, seed, epoch):
    return stream.permute(np.arange(length), length, seed, np.full(length, epoch))


def consumed(position, micro_batches, world_size, length, seed):
    """Every (stream position, id) that the ranks take in one step."""
    taken = []
    for rank in range(world_size):
        start = stream.rank_share(position, sum(micro_batches), world_size, rank)
        for count in micro_batches:
            _, ids = stream.stretch(start, count, length, seed)
            taken += zip(range(start, start + count), ids.tolist())
            start += count
    return taken


@settings(max_examples=60, deadline=None)
@given(length=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10_000))
def test_an_epoch_is_a_permutation(length, seed, epoch):
    assert sorted(order(length, seed, epoch).tolist()) == list(range(length))


@pytest.mark.parametrize("length", [65_536, 65_537, 1_281_167, 14_197_122, 2**40 + 3])
def test_a_stretch_of_a_large_epoch_is_distinct_and_in_range(length):
    _, ids = stream.stretch(length // 3, 5000, length, seed=1)
    assert len(set(ids.tolist())) == 5000
    assert ids.min() >= 0
    assert ids.max() < length


def test_epochs_and_seeds_give_other_orders():
    orders = {tuple(order(100, seed, epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_every_sample_is_equally_likely_at_every_position():
    counts = np.zeros((6, 6))
    for epoch in range(3000):
        counts[np.arange(6), order(6, 7, epoch)] += 1
    # Chi-squared with 25 degrees of freedom (row and column sums are fixed): 60 has a chance of 1 in 10,000.
    assert ((counts - 500) ** 2 / 500).sum() < 60


def test_neighbours_of_one_epoch_are_not_neighbours_in_the_next():
    first, second = order(10_000, 0, 0), order(10_000, 0, 1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
    assert abs(np.corrcoef(first[:-1], first[1:])[0, 1]) < 0.05


@pytest.mark.parametrize("length", [1, 7, 1433, 70_000])
def test_stretch_is_permute_read_in_order(length):
    start, count = 2 * length + length // 2, min(3 * length, 1000)
    epochs, ids = stream.stretch(start, count, length, seed=3)
    positions = np.arange(start, start + count)
    assert (epochs == positions // length).all()
    assert (ids == stream.permute(positions % length, length, 3, positions // length)).all()


def test_the_order_is_pinned():
    """Runs are resumed by position alone, so an order that changes with a version would repeat and lose samples."""
    assert stream.stretch(0, 12, 10, seed=0)[1].tolist() == [9, 2, 5, 6, 4, 1, 7, 3, 0, 8, 0, 3]
    assert stream.stretch(5 * 1_281_167 - 3, 6, 1_281_167, seed=42)[1].tolist() == [
        587740,
        410102,
        939354,
        773865,
        44941,
        715099,
    ]


@pytest.mark.parametrize("world_size", range(1, 8))
@pytest.mark.parametrize("micro_batches", [(1,), (3,), (5, 5, 5), (64, 64), (6, 5, 5)])
def test_epochs_hold_every_sample_exactly_once(world_size, micro_batches):
    length, epochs = 211, 4  # a prime, so that batches straddle epochs
    taken = {}
    for position in range(0, epochs * length, sum(micro_batches) * world_size):
        for where, sample in consumed(position, micro_batches, world_size, length, seed=9):
            assert where not in taken
            taken[where] = sample
    assert set(range(epochs * length)) <= set(taken)
    assert Counter(taken[where] for where in range(epochs * length)) == dict.fromkeys(range(length), epochs)


@pytest.mark.parametrize(("before", "after"), [(1, 7), (4, 3), (6, 2)])
def test_resume_on_another_world_size_continues_the_stream(before, after):
    length, stop = 150, 5
    phases = (BatchPhase(0, 168), BatchPhase(1.5, 336))

    def samples(world_size, index, position, count):
        walk = steps(
            resolve_phases(phases, length, world_size, accumulate=2), length, 20, index=index, position=position
        )
        for step, _ in zip(walk, range(count)):
            phase = step.phase
            taken = consumed(step.position, phase.micro_batches, world_size, length, seed=2)
            yield step.position + phase.global_batch, sorted(taken)

    whole = list(samples(1, 0, 0, 9))
    first = list(samples(before, 0, 0, stop))
    rest = list(samples(after, stop, first[-1][0], 9 - stop))
    assert first + rest == whole


def test_a_ranks_samples_do_not_depend_on_the_accumulation():
    whole, *others = (consumed(60, parts, 3, 97, 0) for parts in ((12,), (4, 4, 4), (3, 3, 2, 2, 2), (1,) * 12))
    assert all(taken == whole for taken in others)


def test_uniforms_depend_on_seed_epoch_and_sample_only():
    epochs, ids = np.array([0, 0, 1, 1]), np.array([5, 6, 5, 6])
    rows = stream.uniforms(3, epochs, ids, 8)
    assert rows.shape == (4, 8)
    assert len({tuple(row) for row in rows}) == 4
    assert (stream.uniforms(3, epochs[::-1], ids[::-1], 8)[::-1] == rows).all()
    assert (stream.uniforms(3, epochs[2:3], ids[2:3], 4) == rows[2, :4]).all()
    assert (stream.uniforms(4, epochs, ids, 8) != rows).all()


def test_uniforms_are_uniform_and_uncorrelated():
    u = stream.uniforms(0, np.zeros(20_000, dtype=np.int64), np.arange(20_000), 6)
    assert u.min() >= 0
    assert u.max() < 1
    # Four standard errors of 20,000 draws.
    assert abs(u.mean(axis=0) - 0.5).max() < 4 * 0.289 / 20_000**0.5
    assert abs(np.corrcoef(u.T) - np.eye(6)).max() < 4 / 20_000**0.5
    assert abs(np.corrcoef(u[:-1, 0], u[1:, 0])[0, 1]) < 4 / 20_000**0.5


def test_sources_and_stream_load_no_torch():
    code = (
        "import sys; from hyperbatch.config import DataConfig; from hyperbatch.data.source import check_data; "
        "import hyperbatch.data.stream, hyperbatch.data.pack; check_data(DataConfig(dataset='digits')); "
        "assert 'torch' not in sys.modules and 'sklearn' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
