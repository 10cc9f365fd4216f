"""`optimal` against brute force over every contiguous grouping, and against the other strategies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import combinations, pairwise

import pytest
from fifo_reference import serial_finish
from hypothesis import given, settings
from hypothesis import strategies as st

from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.optimal import optimal_groups
from hyperbatch.plan.strategies import STRATEGIES, plan_groups
from hyperbatch.plan.types import GroupPlan, TensorSpec

Cost = Callable[[int], float]


def specs_of(sizes: Sequence[int], dtype: str = "float32") -> list[TensorSpec]:
    return [TensorSpec(name=f"p{i}", shape=(size,), dtype=dtype) for i, size in enumerate(sizes)]


def finish_of(plan: GroupPlan, params: Sequence[TensorSpec], ready: Sequence[float], cost: Callable) -> float:
    moments = dict(zip((spec.name for spec in params), ready, strict=True))
    leaves = [max(moments[name] for name in group.parameters) for group in plan.groups]
    seconds = [cost(group.bytes) for group in plan.groups]
    return serial_finish(leaves, seconds)


def brute_force(params: Sequence[TensorSpec], ready: Sequence[float], cost: Cost) -> tuple[float, int]:
    """(least finish, fewest groups that reach it) over all 2^(n-1) groupings."""
    n, found = len(params), []
    for count in range(n):
        for cuts in combinations(range(1, n), count):
            bounds = [0, *cuts, n]
            leaves = [max(ready[a:b]) for a, b in pairwise(bounds)]
            seconds = [cost(sum(spec.nbytes for spec in params[a:b])) for a, b in pairwise(bounds)]
            found.append((serial_finish(leaves, seconds), count + 1))
    least = min(finish for finish, _ in found)
    return least, min(count for finish, count in found if finish <= least * (1 + 1e-12))


instances = st.integers(1, 10).flatmap(
    lambda n: st.tuples(
        st.lists(st.integers(1, 1000), min_size=n, max_size=n),
        st.lists(st.floats(0, 50), min_size=n, max_size=n),
        st.floats(0, 20),
        st.floats(0, 0.05),
    )
)


@settings(max_examples=150, deadline=None)
@given(instances)
def test_equals_brute_force(instance: tuple[list[int], list[float], float, float]) -> None:
    sizes, gaps, alpha, beta = instance
    ready = [sum(gaps[: i + 1]) for i in range(len(gaps))]
    params = specs_of(sizes)

    def cost(nbytes: int) -> float:
        return alpha + beta * nbytes

    plan = optimal_groups(params, ready, cost)
    plan.check_covers(params)
    finish, fewest = brute_force(params, ready, cost)
    assert finish_of(plan, params, ready, cost) == pytest.approx(finish, rel=1e-9, abs=1e-9)
    assert len(plan.groups) == fewest or beta < 1e-12 or alpha < 1e-12


@pytest.mark.parametrize("seed", range(3))
def test_equals_brute_force_with_twelve_tensors_and_a_choice_of_algorithm(seed: int) -> None:
    import random

    rng = random.Random(seed)
    params = specs_of([rng.randint(1, 10**6) for _ in range(12)])
    ready = sorted(rng.random() for _ in params)
    costs: dict[str, Cost] = {"fast_start": lambda b: 0.001 + b * 3e-7, "fast_wire": lambda b: 0.2 + b * 1e-7}

    def cheapest(nbytes: int) -> float:
        return min(cost(nbytes) for cost in costs.values())

    plan = optimal_groups(params, ready, costs)
    assert finish_of(plan, params, ready, cheapest) == pytest.approx(brute_force(params, ready, cheapest)[0])
    for group in plan.groups:
        assert group.algorithm is not None
        assert costs[group.algorithm](group.bytes) == cheapest(group.bytes)


def test_a_cost_that_falls_at_a_switch_size_is_still_exact() -> None:
    """Hybrid all-reduce changes algorithm at a size: the cost is not monotone, and pruning must not assume it is."""
    params = specs_of([100, 900, 50, 700, 10, 300, 20])
    ready = [0.5, 1.0, 1.2, 2.0, 2.5, 3.0, 3.5]

    def cost(nbytes: int) -> float:
        return 0.1 + nbytes * 4e-4 if nbytes < 3000 else 0.5 + nbytes * 5e-5

    plan = optimal_groups(params, ready, cost)
    assert finish_of(plan, params, ready, cost) == pytest.approx(brute_force(params, ready, cost)[0])


@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("model", ["resnet50", "alexnet_bn", "resnet20"])
@pytest.mark.parametrize(("alpha", "beta"), [(1e-3, 1e-10), (1e-5, 1e-9), (5e-3, 1e-11)])
def test_never_worse_than_the_other_strategies(model: str, dtype: str, alpha: float, beta: float) -> None:
    params = tensors(model, dtype=dtype)
    ready = [0.03 * (i + 1) / len(params) for i in range(len(params))]

    def cost(nbytes: int) -> float:
        return alpha + beta * nbytes

    best = finish_of(plan_groups(params, "optimal", ready_s=ready, cost=cost), params, ready, cost)
    for strategy in set(STRATEGIES) - {"optimal"}:
        assert best <= finish_of(plan_groups(params, strategy), params, ready, cost) * (1 + 1e-9), strategy


def test_mixed_precision_sends_the_small_tensors_last() -> None:
    params = tensors("resnet50", dtype="float16")
    plan = optimal_groups(params, list(range(len(params))), lambda nbytes: 1.0)
    assert [group.dtype for group in plan.groups] == ["float16"] * (len(plan.groups) - 1) + ["float32"]
    plan.check_covers(params)


def test_free_network_is_one_group_and_slow_start_is_one_group() -> None:
    params, ready = specs_of([5, 5, 5]), [1.0, 2.0, 3.0]
    assert len(optimal_groups(params, ready, lambda nbytes: 0.0).groups) == 1
    assert len(optimal_groups(params, ready, lambda nbytes: 100.0).groups) == 1


def test_the_search_is_quadratic() -> None:
    params = tensors("resnet152")
    calls = 0

    def cost(nbytes: int) -> float:
        nonlocal calls
        calls += 1
        return 5e-4 + nbytes * 1e-10

    n = len(params)
    plan = optimal_groups(params, [0.05 * (i + 1) / n for i in range(n)], {"flat": cost})
    assert calls == n * (n + 1) // 2 + len(plan.groups)


def test_ready_times_must_match() -> None:
    with pytest.raises(ValueError, match="ready_s has 1 times for 2 parameters"):
        optimal_groups(specs_of([1, 2]), [0.0], lambda nbytes: 1.0)
