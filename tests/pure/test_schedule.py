"""Learning rate and batch size against formulas and loops written out by hand."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hyperbatch.config import BatchPhase, ScheduleConfig
from hyperbatch.errors import InputError
from hyperbatch.schedule import learning_rate, resolve_phases, steps, strides, total_steps, weight_decay_scale


def rate(epoch, **values):
    return learning_rate(ScheduleConfig(**values), epoch)


def test_goyal_starts_at_the_small_batch_rate_and_reaches_the_scaled_one():
    goyal = {
        "batch_phases": (BatchPhase(0, 8192),),
        "lr": 0.1,
        "lr_batch": 256,
        "warmup": "goyal",
        "warmup_epochs": 5,
        "decay": "step",
    }
    assert rate(0, **goyal) == pytest.approx(0.1)
    assert rate(2.5, **goyal) == pytest.approx((0.1 + 3.2) / 2)
    assert rate(5, **goyal) == pytest.approx(3.2)
    assert [round(rate(e, **goyal), 8) for e in (29.99, 30, 60, 80, 89)] == [3.2, 0.32, 0.032, 0.0032, 0.0032]


def test_slow_start_has_half_the_slope_at_first_and_arrives_in_time():
    pfn = {"lr": 1.0, "warmup": "slow_start", "warmup_epochs": 10, "decay": "constant"}
    assert rate(2, **pfn) - rate(0, **pfn) == pytest.approx(0.5 * 0.2)
    assert rate(5 - 1e-9, **pfn) == pytest.approx(rate(5, **pfn))  # no jump
    assert rate(10 - 1e-9, **pfn) == pytest.approx(1.0)


def test_a_warm_up_starts_at_the_rate_it_is_given():
    started = {"lr": 2.0, "warmup_lr": 0.5, "warmup_epochs": 4, "decay": "constant"}
    assert [rate(epoch, **started) for epoch in (0, 2, 4)] == [0.5, 1.25, 2.0]


def test_mlperf_polynomial():
    """lr = end + (base - end) (1 - t / decay)^2 after a linear warm-up from 0, as in the MLPerf reference."""
    mlperf = {"lr": 17.0, "warmup_epochs": 5.0, "decay": "polynomial", "decay_epochs": 37.0, "epochs": 45.0}
    assert rate(0, **mlperf) == 0
    assert rate(1, **mlperf) == pytest.approx(17.0 / 5)
    for epoch in (5, 10, 30, 42):
        left = 1 - (epoch - 5) / 37
        assert rate(epoch, **mlperf) == pytest.approx(1e-4 + (17 - 1e-4) * left**2)
    assert rate(44, **mlperf) == pytest.approx(1e-4)


def test_cosine_ends_and_middle():
    cosine = {"lr": 2.0, "warmup_epochs": 10, "epochs": 90, "decay": "cosine", "end_lr": 0.0}
    assert rate(10, **cosine) == pytest.approx(2.0)
    assert rate(50, **cosine) == pytest.approx(1.0)
    assert rate(90, **cosine) == pytest.approx(0.0)


def test_an_early_end_runs_through_the_same_shape_in_less_time():
    schedule = ScheduleConfig(lr=2.0, warmup_epochs=2, epochs=8, decay_power=1.0, end_lr=0.5)
    early = [learning_rate(schedule, epoch, ends_epoch=4.0) for epoch in (0, 0.5, 1, 2.5, 3.5)]
    assert early == [learning_rate(schedule, 2 * epoch) for epoch in (0, 0.5, 1, 2.5, 3.5)]
    assert early[1] == 1.0
    assert max(early) == early[2] == 2.0
    assert [learning_rate(schedule, epoch, ends_epoch=4.0) for epoch in (4, 7.9)] == [0.0, 0.0]  # not end_lr


def test_a_decay_never_climbs_above_a_small_peak():
    assert rate(80, lr=1e-6, end_lr=1e-4) == pytest.approx(1e-6)


def test_linear_and_square_root_scaling():
    large = {
        "batch_phases": (BatchPhase(0, 1024),),
        "lr_batch": 256,
        "lr": 0.1,
        "warmup_epochs": 0,
        "decay": "constant",
    }
    assert rate(1, **large) == pytest.approx(0.4)
    assert rate(1, **large, lr_scaling="sqrt") == pytest.approx(0.2)
    assert rate(1, **large, lr_scaling="none") == pytest.approx(0.1)


def test_the_rate_stays_when_the_batch_changes_between_phases():
    phases = (BatchPhase(0, 34_000), BatchPhase(30, 68_000))
    config = ScheduleConfig(batch_phases=phases, lr=34.0, warmup_epochs=0, decay="constant", epochs=90)
    assert [learning_rate(config, epoch) for epoch in (10, 40)] == [34.0, 34.0]


def test_decoupled_decay_moves_with_the_rate_but_not_with_its_height():
    low, high = (ScheduleConfig(lr=lr, warmup_epochs=36, epochs=90, decay_power=2.2, end_lr=0.0) for lr in (1.0, 13.0))
    for epoch in (0, 12, 36, 60, 89):
        assert weight_decay_scale(low, epoch) == pytest.approx(weight_decay_scale(high, epoch))
    assert weight_decay_scale(high, 36) == pytest.approx(1.0)
    assert weight_decay_scale(high, 18) == pytest.approx(0.5)


def test_batch_control_reproduces_a_loop_written_by_hand():
    samples, epochs, world = 1000, 6, 4
    config = ScheduleConfig(
        batch_phases=(BatchPhase(0, 96), BatchPhase(2, 192), BatchPhase(4.5, 384)),
        lr=0.5,
        lr_batch=96,
        warmup_epochs=1,
        epochs=epochs,
        decay="polynomial",
    )
    phases = resolve_phases(config.batch_phases, samples, world, max_batch_per_rank=48)

    by_hand, seen = [], 0
    while seen < epochs * samples:
        epoch = seen / samples
        batch, micro_steps = (96, 1) if epoch < 2 else (192, 1) if epoch < 4.5 else (384, 2)
        peak = 0.5
        if epoch < 1:
            lr = peak * epoch
        else:
            lr = 1e-4 + (peak - 1e-4) * (1 - (epoch - 1) / 5) ** 2
        by_hand.append((seen, batch, (batch // world // micro_steps,) * micro_steps, lr))
        seen += batch

    ours = [
        (
            step.position,
            step.phase.global_batch,
            step.phase.micro_batches,
            learning_rate(config, step.epoch),
        )
        for step in steps(phases, samples, epochs)
    ]
    assert [row[:3] for row in ours] == [row[:3] for row in by_hand]
    assert [row[3] for row in ours] == pytest.approx([row[3] for row in by_hand])


@given(
    batches=st.lists(st.integers(1, 500), min_size=1, max_size=4),
    gaps=st.lists(st.floats(0.01, 3.0), min_size=3, max_size=3),
    samples=st.integers(1, 2000),
    epochs=st.floats(0.1, 5.0),
)
def test_steps_are_gapless_and_counted_right(batches, gaps, samples, epochs):
    starts = [0.0, *itertools.accumulate(gaps)]
    given_phases = tuple(BatchPhase(start, batch) for start, batch in zip(starts, batches, strict=False))
    phases = resolve_phases(given_phases, samples, 1)
    walked = list(steps(phases, samples, epochs))
    assert len(walked) == total_steps(phases, samples, epochs)
    assert walked[0].position == 0
    for left, right in itertools.pairwise(walked):
        assert right.position == left.position + left.phase.global_batch
        assert right.index == left.index + 1
        assert right.phase.from_position >= left.phase.from_position
    end = walked[-1].position + walked[-1].phase.global_batch
    assert walked[-1].position < epochs * samples <= end + 1e-6  # 1.1 x 1530 is a little more than 1683


@given(length=st.integers(1, 7), breaks=st.sets(st.integers(0, 40)), second=st.floats(0.1, 5.0))
def test_strides_hold_every_step_once_and_cross_nothing(length, breaks, second):
    phases = resolve_phases((BatchPhase(0, 30), BatchPhase(second, 70)), 400, 1)
    walked = list(steps(phases, 400, 3))
    longest = {30: length, 70: max(1, length - 2)}
    cut = list(
        strides(
            walked,
            length=lambda step: longest[step.phase.global_batch],
            shape=lambda step: step.phase,
            ends=lambda step: step.index in breaks,
        )
    )
    assert [step for stride in cut for step in stride] == walked
    for stride in cut:
        assert len(stride) in (1, longest[stride[0].phase.global_batch])
        assert len({step.phase for step in stride}) == 1
        assert not breaks & {step.index for step in stride[:-1]}
    # As few as these rules allow: steps that are left over are fewer than a stride.
    blocks = itertools.groupby(walked, lambda step: (step.phase, sum(index < step.index for index in breaks)))
    sizes = [(longest[phase.global_batch], len(list(block))) for (phase, _), block in blocks]
    assert len(cut) == sum(sum(divmod(steps_in, stride)) for stride, steps_in in sizes)


def test_a_run_continued_on_another_world_size_takes_the_same_steps():
    phases = (BatchPhase(0, 64), BatchPhase(1, 128))
    one, four = (resolve_phases(phases, 1000, world) for world in (1, 4))
    first = list(itertools.islice(steps(one, 1000, 3), 10))
    rest = list(steps(four, 1000, 3, index=10, position=first[-1].position + first[-1].phase.global_batch))
    whole = list(steps(one, 1000, 3))
    assert [(s.index, s.position, s.phase.global_batch) for s in first + rest] == [
        (s.index, s.position, s.phase.global_batch) for s in whole
    ]


def test_a_batch_that_does_not_divide_says_what_would():
    with pytest.raises(InputError, match=r"global batch 100 cannot be divided by 8 ranks; .* 96 or 104"):
        resolve_phases((BatchPhase(0, 100),), 1000, 8)
    with pytest.raises(InputError, match=r"--accumulate 5 is more than the 4 samples of a rank .* --accumulate 4"):
        resolve_phases((BatchPhase(0, 32),), 1000, 8, accumulate=5)


@pytest.mark.parametrize(
    ("share", "room", "micro_batches"),
    [(512, 256, (256, 256)), (514, 256, (172, 171, 171)), (509, 256, (255, 254)), (7, 1, (1,) * 7), (3, None, (3,))],
)
def test_a_share_is_split_into_the_fewest_nearly_equal_micro_steps(share, room, micro_batches):
    (phase,) = resolve_phases((BatchPhase(0, 2 * share),), 1000, 2, max_batch_per_rank=room)
    assert phase.micro_batches == micro_batches
    assert (phase.batch_per_rank, phase.accumulation) == (micro_batches[0], len(micro_batches))


@given(share=st.integers(1, 2000), room=st.integers(1, 300), accumulate=st.integers(0, 50))
def test_micro_steps_hold_the_share_and_fit(share, room, accumulate):
    accumulate = min(accumulate, share)
    (phase,) = resolve_phases((BatchPhase(0, share),), 1000, 1, accumulate=accumulate, max_batch_per_rank=room)
    parts = phase.micro_batches
    assert sum(parts) == share
    assert max(parts) - min(parts) <= 1
    assert len(parts) == accumulate if accumulate else max(parts) <= room
