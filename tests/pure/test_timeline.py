"""One step: hand-made steps whose answer can be written down, and identities."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fifo_reference import serial_finish
from hypothesis import given
from hypothesis import strategies as st

from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.compute import LayerTime, layer_times, seconds_at, slowest_of, slowest_quantile
from hyperbatch.plan.cost import Cost
from hyperbatch.plan.inventory import layers, tensors
from hyperbatch.plan.machine import Profile
from hyperbatch.plan.timeline import parameter_ready_s, step_timing
from hyperbatch.plan.types import GradGroup, GroupPlan

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


def test_ready_times_follow_backward() -> None:
    assert parameter_ready_s(TIMES) == {"c.weight": 7.0, "b.weight": 11.0, "a.weight": 15.0}


@given(
    st.lists(
        st.tuples(st.floats(0, 100), st.one_of(st.just(0.0), st.floats(1e-3, 10)), st.floats(0, 1)),
        min_size=1,
        max_size=8,
    )
)
def test_the_network_is_first_in_first_out(layers: list[tuple[float, float, float]]) -> None:
    times = [LayerTime(str(i), 0.0, backward, (f"{i}.weight",)) for i, (backward, _, _) in enumerate(layers)]
    plan = plan_of(*(str(i) for i in reversed(range(len(layers)))))
    costs = [Cost(fixed, per_byte) for _, fixed, per_byte in reversed(layers)]
    timing = step_timing(times, plan, lambda group: costs[group.index], update_s=0.0)
    expected = serial_finish([g.ready_s for g in timing.groups], [cost.seconds(10) for cost in costs])
    assert timing.groups[-1].end_s == pytest.approx(expected)
    assert timing.step_s == pytest.approx(max(expected, timing.backward_s))


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
