"""Collective costs: the textbook limits, and the identities between algorithms."""

from __future__ import annotations

from dataclasses import replace

import pytest

from hyperbatch.errors import InputError
from hyperbatch.plan.cost import all_reduce_cost, cost_function, reduce_scatter_cost, ring_cost
from hyperbatch.plan.machine import Link, Network
from hyperbatch.plan.planner import best_grid, grids
from hyperbatch.plan.types import RankGrid

FAST = Link(bandwidth_bytes_per_s=100e9, latency_s=1e-6)
SLOW = Link(bandwidth_bytes_per_s=10e9, latency_s=5e-6)
NODES = Network(devices_per_node=8, nics_per_node=2, intra=FAST, inter=SLOW, flat_algorithms=("ring",))
ONE_EACH = Network(devices_per_node=1, nics_per_node=1, intra=FAST, inter=SLOW, flat_algorithms=("ring",))


def seconds(network: Network, grid: RankGrid, algorithm: str, nbytes: float) -> float:
    return all_reduce_cost(network, grid, algorithm, nbytes).seconds(nbytes)


def test_one_rank_is_free() -> None:
    for algorithm in ("flat", "hierarchical", "torus", "hybrid"):
        assert seconds(NODES, RankGrid(1, 1), algorithm, 1e9) == 0


def test_ring_is_the_textbook_formula() -> None:
    p, nbytes = 16, 160e6
    cost = ring_cost(ONE_EACH, p)
    assert cost.fixed_s == pytest.approx(2 * (p - 1) * 5e-6)
    assert cost.seconds(nbytes) - cost.fixed_s == pytest.approx(2 * (p - 1) / p * nbytes / 10e9)


def test_one_row_and_one_column_are_a_ring() -> None:
    for nbytes in (1e3, 1e8):
        ring = seconds(ONE_EACH, RankGrid(16, 1), "flat", nbytes)
        assert seconds(ONE_EACH, RankGrid(16, 1), "torus", nbytes) == pytest.approx(ring)
        inside = seconds(NODES, RankGrid(1, 8), "flat", nbytes)
        assert seconds(NODES, RankGrid(1, 8), "torus", nbytes) == pytest.approx(inside)


def test_nics_are_shared_by_the_devices_of_a_node() -> None:
    """Large messages: whatever the algorithm, 2(R-1)/R of them leave through the node's two NICs."""
    grid, nbytes = RankGrid(64, 8), 1e12
    floor = 2 * 63 / 64 * nbytes / (2 * 10e9)
    assert seconds(NODES, grid, "torus", nbytes) > floor
    assert seconds(NODES, grid, "flat", nbytes) == pytest.approx(floor, rel=0.02)
    doubled = replace(NODES, nics_per_node=4)
    assert seconds(doubled, grid, "flat", nbytes) == pytest.approx(floor / 2, rel=0.02)


def test_a_torus_needs_fewer_hops_than_a_ring_and_a_leader_has_one_nic() -> None:
    grid = RankGrid(64, 8)
    assert seconds(NODES, grid, "torus", 8) < seconds(NODES, grid, "flat", 8)
    assert seconds(NODES, grid, "torus", 1e9) < seconds(NODES, grid, "hierarchical", 1e9)
    hierarchical = all_reduce_cost(NODES, grid, "hierarchical", 8).fixed_s
    assert hierarchical == pytest.approx(2 * 7 * 1e-6 + 2 * 63 / 64 * 64 * 5e-6), "2(k-1) + 2(p/k-1) hops"


def test_trees_win_small_messages_on_many_nodes() -> None:
    both = replace(NODES, flat_algorithms=("ring", "tree"))
    grid = RankGrid(512, 8)
    assert seconds(both, grid, "flat", 1e3) < seconds(NODES, grid, "flat", 1e3) / 10
    assert seconds(both, grid, "flat", 1e10) == seconds(NODES, grid, "flat", 1e10)


def test_hybrid_switches_at_its_size() -> None:
    grid = RankGrid(64, 8)
    for nbytes, same in ((1 << 20, "hierarchical"), ((1 << 20) + 1, "flat")):
        assert seconds(NODES, grid, "hybrid", nbytes) == seconds(NODES, grid, same, nbytes)


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "torus", "hybrid"])
@pytest.mark.parametrize("flat", [("ring",), ("ring", "tree")])
def test_the_fast_function_agrees_with_the_readable_one(algorithm: str, flat: tuple[str, ...]) -> None:
    network, grid = replace(NODES, flat_algorithms=flat, call_s=1e-5), RankGrid(16, 8)
    fast = cost_function(network, grid, algorithm)
    for nbytes in (1, 10_000, 1 << 20, (1 << 20) + 1, 10**8):
        assert fast(nbytes) == pytest.approx(seconds(network, grid, algorithm, nbytes), rel=1e-12)


def test_reduce_scatter_and_all_gather_make_an_all_reduce() -> None:
    grid = RankGrid(16, 8)
    for algorithm in ("flat", "torus"):
        half = reduce_scatter_cost(NODES, grid, algorithm).seconds(1e8)
        assert 2 * half == pytest.approx(seconds(NODES, grid, algorithm, 1e8))


def test_unknown_algorithm() -> None:
    with pytest.raises(InputError, match="did you mean 'torus'"):
        all_reduce_cost(NODES, RankGrid(2, 8), "toros", 1.0)


@pytest.mark.parametrize("ranks", [1, 2, 7, 12, 2053, 2048, 3456, 4216])
def test_a_grid_for_every_world_size(ranks: int) -> None:
    found = list(grids(ranks))
    assert all(grid.size == ranks for grid in found)
    assert len({grid.columns for grid in found}) == len(found) == sum(ranks % n == 0 for n in range(1, ranks + 1))
    best = best_grid(NODES, ranks, 5e7)
    assert best.size == ranks
    least = min(seconds(NODES, grid, "torus", 5e7) for grid in found)
    assert seconds(NODES, best, "torus", 5e7) == least


def test_sony_s_grids_have_rows_wider_than_a_node() -> None:
    """On 512 nodes of 4, a ring over a column of 512 costs more hops than a wide row: Sony used 32 x 64 or so."""
    abci = Network(devices_per_node=4, nics_per_node=2, intra=FAST, inter=SLOW, flat_algorithms=("ring",))
    best = best_grid(abci, 2048, 51e6)
    assert best.columns > 4
    assert seconds(abci, best, "torus", 51e6) < seconds(abci, RankGrid(512, 4), "torus", 51e6)


def test_gloo_on_rails() -> None:
    """Measured with gloo: 4 hosts of 2 ranks, a NIC of 200 Mbit/s for each rank, 100 MB: flat 7.5 s, torus 4.1 s.

    Its one ring leaves a host by one NIC, so the second is of no use to it; a torus uses both.
    """
    lo = Link(bandwidth_bytes_per_s=100e6, latency_s=1e-4)  # assumed: two ranks on shared cores, through the kernel
    rail = Link(bandwidth_bytes_per_s=25e6, latency_s=1e-4)
    hosts = Network(
        devices_per_node=2,
        nics_per_node=2,
        intra=lo,
        inter=rail,
        flat_algorithms=("ring",),
        flat_uses_all_nics=False,
    )
    grid = RankGrid(4, 2)
    assert seconds(hosts, grid, "flat", 100e6) == pytest.approx(7.5, rel=0.1)
    assert seconds(hosts, grid, "torus", 100e6) == pytest.approx(4.1, rel=0.1)


def test_a_torus_in_chunks_hides_its_rows() -> None:
    """Long messages take as long as the slower direction alone, short ones as long as without chunks."""
    grid, chunk = RankGrid(4, 8), 4e6
    chunked = replace(NODES, torus_chunk_bytes=chunk)
    rows_s_per_byte = 2 * 7 / 8 / 100e9
    for nbytes in (1e3, chunk / 2):
        assert seconds(chunked, grid, "torus", nbytes) == seconds(NODES, grid, "torus", nbytes)
    saved = seconds(NODES, grid, "torus", 100e6) - seconds(chunked, grid, "torus", 100e6)
    assert saved == pytest.approx((100e6 - chunk) * rows_s_per_byte)
    trees = replace(chunked, flat_algorithms=("ring", "tree"))
    cost = cost_function(trees, grid, "torus")
    for nbytes in (1.0, 1e5, 1e9):
        assert cost(nbytes) == seconds(trees, grid, "torus", nbytes)
