"""The shared values: grids, group plans, their hash and their covering check."""

import json

import pytest

from hyperbatch.errors import InputError
from hyperbatch.plan.types import GradGroup, GroupPlan, RankGrid, TensorSpec


def group(index, *names):
    return GradGroup(index=index, parameters=names, bytes=4 * len(names), dtype="float32")


PARAMS = [TensorSpec(name=name, shape=(2, 3)) for name in "abc"]


def test_grid_rows_partition_the_ranks():
    grid = RankGrid.parse("3x4")
    assert (grid.rows, grid.columns, grid.size, str(grid)) == (3, 4, 12, "3x4")
    rows = [rank for row in range(3) for rank in grid.row_ranks(row)]
    assert rows == list(range(12))


@pytest.mark.parametrize("text", ["4", "4x", "x8", "axb", "0x4", "-1x4", "2x2x2"])
def test_bad_grids(text):
    with pytest.raises(InputError):
        RankGrid.parse(text)


def test_grid_that_does_not_fit_the_world():
    with pytest.raises(InputError, match="grid 2x2 holds 4 ranks, but there are 6"):
        RankGrid(2, 2).check_world(6)


@pytest.mark.parametrize(
    ("world_size", "ranks_per_host", "grid"),
    [(1, 8, "1x1"), (8, 8, "1x8"), (16, 8, "2x8"), (6, 8, "1x6"), (12, 8, "1x12"), (4, 1, "4x1"), (6, 6, "1x6")],
)
def test_the_default_grid_is_hosts_by_ranks_per_host(world_size, ranks_per_host, grid):
    assert str(RankGrid.of_hosts(world_size, ranks_per_host)) == grid


@pytest.mark.parametrize(
    ("world_size", "grid"), [(1, "1x1"), (2, "2x1"), (4, "2x2"), (6, "3x2"), (7, "7x1"), (12, "4x3")]
)
def test_a_square_has_two_directions_where_it_can(world_size, grid):
    assert str(RankGrid.square(world_size)) == grid


def test_plan_must_cover_each_parameter_exactly_once():
    GroupPlan(strategy="x", groups=(group(0, "a", "b"), group(1, "c"))).check_covers(PARAMS)
    with pytest.raises(ValueError, match=r"missing \['c'\]"):
        GroupPlan(strategy="x", groups=(group(0, "a", "b"),)).check_covers(PARAMS)
    with pytest.raises(ValueError, match=r"twice \['a'\]"):
        GroupPlan(strategy="x", groups=(group(0, "a", "b"), group(1, "a", "c"))).check_covers(PARAMS)
    with pytest.raises(ValueError, match=r"unknown \['d'\]"):
        GroupPlan(strategy="x", groups=(group(0, "a", "b"), group(1, "c", "d"))).check_covers(PARAMS)


def test_plan_survives_json_and_its_hash_tells_plans_apart():
    plan = GroupPlan(strategy="x", groups=(group(0, "a", "b"), group(1, "c")))
    again = GroupPlan.from_dict(json.loads(json.dumps(plan.to_dict())))
    assert again == plan
    assert again.hash == plan.hash
    assert plan.hash != GroupPlan(strategy="x", groups=(group(0, "a"), group(1, "b", "c"))).hash
    assert plan.hash != plan.with_algorithms(["flat", "torus"]).hash
