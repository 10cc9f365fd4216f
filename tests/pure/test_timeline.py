"""The event-driven step: hand-made steps whose answer can be written down, and identities."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fifo_reference import serial_finish
from hypothesis import given
from hypothesis import strategies as st

from hyperbatch.plan.compute import LayerTime, layer_times, seconds_at, slowest_of, slowest_quantile
from hyperbatch.plan.cost import Cost
from hyperbatch.plan.inventory import layers, tensors
from hyperbatch.plan.machine import Profile
from hyperbatch.plan.timeline import Transfer, parameter_ready_s, run_network, step_timing
from hyperbatch.plan.types import GradGroup, GroupPlan
from hyperbatch.sim.clusters import load_cluster

# Three layers; backward takes 4 s each, in the order c, b, a, after 3 s of forward.
TIMES = [LayerTime(name, 1.0, 4.0, (f"{name}.weight",)) for name in "abc"]


def plan_of(*groups: str, nbytes: int = 10) -> GroupPlan:
    return GroupPlan(
        strategy="test",
        groups=tuple(
            GradGroup(
                index=i, parameters=tuple(f"{n}.weight" for n in names), bytes=nbytes * len(names), dtype="float32"
            )
            for i, names in enumerate(groups)
        ),
    )


def test_a_step_written_down() -> None:
    timing = step_timing(TIMES, plan_of("c", "ba"), lambda group: Cost(1.0, 0.1), update_s=0.5)
    assert [(g.ready_s, g.start_s, g.end_s) for g in timing.groups] == [(7.0, 7.0, 9.0), (15.0, 15.0, 18.0)]
    assert timing.exposed_comm_s == 3.0
    assert timing.step_s == 15.0 + 3.0 + 0.5
    assert (timing.forward_s, timing.backward_s) == (3.0, 12.0)


def test_a_busy_network_delays_the_next_group() -> None:
    timing = step_timing(TIMES, plan_of("c", "b", "a"), lambda group: Cost(5.0, 0.0), update_s=0.0)
    assert [(g.start_s, g.end_s) for g in timing.groups] == [(7.0, 12.0), (12.0, 17.0), (17.0, 22.0)]
    assert timing.exposed_comm_s == 7.0


def test_without_overlap_everything_is_exposed() -> None:
    timing = step_timing(TIMES, plan_of("c", "ba"), lambda group: Cost(1.0, 0.1), update_s=0.0, overlap=False)
    assert timing.exposed_comm_s == 2.0 + 3.0


def test_a_free_network_exposes_nothing() -> None:
    timing = step_timing(TIMES, plan_of("cba"), lambda group: Cost(0.0, 0.0), update_s=0.0)
    assert timing.exposed_comm_s == 0
    assert timing.step_s == 15.0


def test_accumulation_sends_in_the_last_micro_step_only() -> None:
    one = step_timing(TIMES, plan_of("c", "ba"), lambda group: Cost(1.0, 0.1), update_s=0.5)
    three = step_timing(TIMES, plan_of("c", "ba"), lambda group: Cost(1.0, 0.1), update_s=0.5, accumulation=3)
    assert three.exposed_comm_s == one.exposed_comm_s
    assert three.step_s == pytest.approx(one.step_s + 2 * 15.0)


def test_the_slowest_rank_sets_the_pace() -> None:
    slow = step_timing(TIMES, plan_of("cba"), lambda group: Cost(1.0, 0.0), update_s=0.0, slowdown=1.1)
    assert slow.step_s == pytest.approx(1.1 * 15.0 + 1.0)
    assert slowest_of(1, 0.02) == 1.0
    assert 1 < slowest_of(8, 0.02) < slowest_of(4096, 0.02) < 1.1
    assert slowest_quantile(64, 0.02, 0.5) == pytest.approx(slowest_of(64, 0.02), rel=0.01)
    assert slowest_quantile(64, 0.02, 0.9) > slowest_of(64, 0.02)


def test_data_that_comes_too_slowly_is_waited_for() -> None:
    timing = step_timing(TIMES, plan_of("cba"), lambda group: Cost(0.0, 0.0), update_s=0.0, data_s=20.0)
    assert (timing.step_s, timing.data_wait_s) == (20.0, 5.0)


def test_ready_times_follow_backward() -> None:
    assert parameter_ready_s(TIMES) == {"c.weight": 7.0, "b.weight": 11.0, "a.weight": 15.0}


def test_two_streams_share_the_bandwidth_but_not_the_latency() -> None:
    both = [Transfer(ready_s=0.0, fixed_s=1.0, bytes_s=2.0)] * 2
    assert run_network(both, streams=1) == [(0.0, 3.0), (3.0, 6.0)]
    assert run_network(both, streams=2) == [(0.0, 5.0), (0.0, 5.0)]
    late = [Transfer(ready_s=0.0, fixed_s=0.0, bytes_s=4.0), Transfer(ready_s=2.0, fixed_s=0.0, bytes_s=1.0)]
    # 2 s alone, then both at half speed: the second needs 2 s, the first has 1 s of its own left after that
    assert run_network(late, streams=2) == [(0.0, 5.0), (2.0, 4.0)]


transfers = st.lists(
    st.builds(
        Transfer,
        ready_s=st.floats(0, 100),
        fixed_s=st.one_of(st.just(0.0), st.floats(1e-3, 10)),
        bytes_s=st.one_of(st.just(0.0), st.floats(1e-3, 10)),
    ),
    max_size=8,
)


@given(transfers)
def test_one_stream_is_first_in_first_out(items: list[Transfer]) -> None:
    spans = run_network(items)
    expected = serial_finish([t.ready_s for t in items], [t.fixed_s + t.bytes_s for t in items])
    assert max((end for _, end in spans), default=0.0) == pytest.approx(expected, abs=1e-9)


@given(transfers, st.integers(1, 4))
def test_streams_conserve_work(items: list[Transfer], streams: int) -> None:
    spans = run_network(items, streams)
    for transfer, (start, end) in zip(items, spans, strict=True):
        assert start >= transfer.ready_s - 1e-9
        assert end - start >= transfer.fixed_s + transfer.bytes_s - 1e-6
    first = min((t.ready_s for t in items), default=0.0)
    last = max((end for _, end in spans), default=0.0)
    assert last - first >= sum(t.bytes_s for t in items) - 1e-6, "the wire carries one byte at a time"


def test_times_at_other_batches_than_those_profiled() -> None:
    points = [(4, 2.0), (8, 3.0), (16, 6.0)]
    assert [seconds_at(points, batch) for batch in (4, 6, 8, 12, 16, 32)] == [2.0, 2.5, 3.0, 4.5, 6.0, 12.0]
    assert seconds_at(points, 2) == 1.5, "the first line goes on"
    assert seconds_at([(4, 1.0), (8, 4.0)], 2) == 0.5, "but no image is faster than at the smallest batch"
    assert seconds_at([(4, 2.0)], 2) == 1.0


def test_a_profiled_model_is_ready_when_it_was_measured_to_be() -> None:
    cluster = load_cluster("local")
    names = tuple(layer.name for layer in layers("resnet8", classes=10, image_size=32) if layer.tensors)
    count = len(names)
    profile = Profile(
        model="resnet8",
        precision="fp32",
        batch_per_device=4,
        image_size=32,
        classes=10,
        layers=names,
        forward_s=(1.0,) * count,
        backward_s=tuple(float(i) for i in range(count)),
    )
    cluster = replace(cluster, device=replace(cluster.device, profiles=(profile,)))
    times = layer_times(cluster, "resnet8", 4, "fp32", classes=10, image_size=32)
    ready = parameter_ready_s(times)
    assert ready["fc.weight"] == count + (count - 1)
    assert ready["conv1.weight"] == count + sum(range(count))
    assert set(ready) == {spec.name for spec in tensors("resnet8", classes=10, image_size=32)}
    other = layer_times(cluster, "resnet8", 4, "fp16", classes=10, image_size=32)
    assert other != times, "another precision was not profiled"
