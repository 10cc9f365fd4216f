"""Predicts the time of a collective: latency plus bandwidth, per algorithm, on nodes whose devices share NICs.

A cost is affine in the bytes, fixed_s + bytes * s_per_byte. p ranks in R nodes of C devices, S bytes:

    ring          2(p-1) hops in a chain through every rank; 2(p-1)/p S through each node's NICs
    tree          2 log2(R) hops between nodes, 2(C-1) in them; 2S through each node's NICs
    flat          the backend's own all-reduce: the fastest of its algorithms
    hierarchical  reduce to a leader in the node, ring over leaders (one NIC), broadcast in the node
    torus         reduce-scatter in the row, all-reduce of S/C in each column, all-gather in the row; in chunks, the
                  rows of one chunk overlap with the columns of another
    hybrid        hierarchical for small messages, flat above (Tencent)

Small messages are less efficient: a ring sends S/p at a time, so below S = p * latency * bandwidth the latency of a hop
exceeds the time of its bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from hyperbatch.errors import InputError, nearest
from hyperbatch.plan.machine import Link, Network
from hyperbatch.plan.types import RankGrid
from hyperbatch.vocabulary import ALGORITHMS, HYBRID_SWITCH_BYTES

# NCCL's own tuning table (src/graph/tuning.cc) gives a tree's network hop about twice the latency of a ring's
# (8.5 against 4.0 us with LL128), and a tree 92 % of a ring's bandwidth.
TREE_HOP_FACTOR = 8.5 / 4.0
TREE_BANDWIDTH = 0.92


@dataclass(frozen=True, slots=True)
class Cost:
    """The time of a message in seconds: fixed_s + bytes * s_per_byte."""

    fixed_s: float
    s_per_byte: float

    def seconds(self, nbytes: float) -> float:
        return self.fixed_s + nbytes * self.s_per_byte

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.fixed_s + other.fixed_s, self.s_per_byte + other.s_per_byte)


FREE = Cost(0.0, 0.0)


def all_reduce_cost(
    network: Network, grid: RankGrid, algorithm: str, nbytes: float, *, hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES
) -> Cost:
    """The cost of an all-reduce of `nbytes`. It depends on the size if the backend can choose between ring and tree."""
    if algorithm == "hybrid":
        algorithm = "hierarchical" if nbytes <= hybrid_switch_bytes else "flat"
    return min(all_reduce_options(network, grid, algorithm), key=lambda cost: cost.seconds(nbytes))


def cost_function(
    network: Network, grid: RankGrid, algorithm: str, *, hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES
) -> Callable[[float], float]:
    """Returns a function from bytes to seconds that is fast enough for the planner's inner loop."""
    if algorithm == "hybrid":
        small = cost_function(network, grid, "hierarchical")
        large = cost_function(network, grid, "flat")
        return lambda nbytes: small(nbytes) if nbytes <= hybrid_switch_bytes else large(nbytes)
    options = all_reduce_options(network, grid, algorithm)
    if len(options) == 1:
        return options[0].seconds
    lines = [(cost.fixed_s, cost.s_per_byte) for cost in options]
    if len(lines) == 2:
        (a0, b0), (a1, b1) = lines
        return lambda nbytes: min(a0 + nbytes * b0, a1 + nbytes * b1)
    return lambda nbytes: min(a + nbytes * b for a, b in lines)


def all_reduce_options(network: Network, grid: RankGrid, algorithm: str) -> list[Cost]:
    """The costs among which the backend may choose for this algorithm, one for each way it can send."""
    if grid.size == 1:
        return [FREE]
    call = Cost(network.call_s, 0.0)
    if algorithm in ("ring", "tree", "flat"):
        names = network.flat_algorithms if algorithm == "flat" else (algorithm,)
        return [call + {"ring": ring_cost, "tree": tree_cost}[name](network, grid.size) for name in names]
    if algorithm == "hierarchical":
        return [call + cost for cost in hierarchical_options(network, grid)]
    if algorithm == "torus":
        return [call + cost for cost in torus_options(network, grid)]
    raise InputError(f"unknown all-reduce {algorithm!r}{nearest(algorithm, ALGORITHMS)}")


def ring_cost(network: Network, ranks: int) -> Cost:
    """One ring (or one per NIC, which share the message) through node after node. A chunk passes every rank twice."""
    nodes = network.nodes(ranks)
    return _ring(network, ranks, nodes, network.node_bytes_per_s if nodes > 1 else network.intra.bytes_per_s)


def tree_cost(network: Network, ranks: int) -> Cost:
    """Two binary trees over the nodes, each with half of the message; a chain inside the node."""
    nodes = network.nodes(ranks)
    return ring_cost(network, ranks) if nodes == 1 else _tree(network, ranks, nodes, network.node_bytes_per_s)


def hierarchical_options(network: Network, grid: RankGrid) -> list[Cost]:
    """Costs of a reduce and a broadcast in the row, each a chain of C-1 hops, and 2(R-1) hops between leaders. A leader
    uses one NIC. (Tencent, whose backend reduces and broadcasts in 2(C-1) hops each, counts 4(C-1).)"""
    row, hops = _row_link(network, grid), 2 * (grid.columns - 1)
    inside = Cost(hops * row.latency_s, 2 / row.bytes_per_s) if hops else FREE
    return [inside + leaders for leaders in _between(network, grid, network.inter.bytes_per_s)]


def torus_options(network: Network, grid: RankGrid) -> list[Cost]:
    """Costs of the torus. All columns send S/C at the same time, so the columns of a node share its NICs."""
    row, hops = _row_link(network, grid), 2 * (grid.columns - 1)
    rows = Cost(hops * row.latency_s, hops / grid.columns / row.bytes_per_s)
    share = network.inter.bytes_per_s * network.nics_per_node / min(grid.columns, network.devices_per_node)
    columns = _between(network, grid, min(share, network.intra.bytes_per_s))
    columns = [Cost(column.fixed_s, column.s_per_byte / grid.columns) for column in columns]
    plain = [rows + column for column in columns]
    if network.torus_chunk_bytes is None or min(grid.rows, grid.columns) == 1:
        return plain
    # The slower direction is always busy. It waits for the other only at the first and last chunk.
    chunk_s = network.torus_chunk_bytes * rows.s_per_byte
    fixed_s = rows.fixed_s + chunk_s
    return plain + [Cost(c.fixed_s + fixed_s, max(c.s_per_byte, rows.s_per_byte)) for c in columns]


def reduce_scatter_cost(network: Network, grid: RankGrid, algorithm: str) -> Cost:
    """The cost of a reduce-scatter, half of an all-reduce, for the sharded update. The all-gather costs the same."""
    if grid.size == 1:
        return FREE
    whole = torus_options(network, grid)[0] if algorithm == "torus" else ring_cost(network, grid.size)
    return Cost(network.call_s + whole.fixed_s / 2, whole.s_per_byte / 2)


def _row_link(network: Network, grid: RankGrid) -> Link:
    """The narrowest link of a ring through one row: the NICs if a row is wider than a node."""
    if grid.columns <= network.devices_per_node:
        return network.intra
    spans = network.nodes(grid.columns)
    chain = spans * network.inter.latency_s + (grid.columns - spans) * network.intra.latency_s
    return Link(bandwidth_bytes_per_s=network.node_bytes_per_s, latency_s=chain / grid.columns)


def _between(network: Network, grid: RankGrid, bytes_per_s: float) -> list[Cost]:
    """Costs of an all-reduce over one rank of each row, one for each algorithm of the backend.

    If rows are narrower than a node, several members of a column are in one node.
    """
    if grid.rows == 1:
        return [FREE]
    nodes = min(grid.rows, network.nodes(grid.size))
    if nodes == 1:
        return [_ring(network, grid.rows, 1, network.intra.bytes_per_s)]
    known = {"ring": _ring, "tree": _tree}
    return [known[name](network, grid.rows, nodes, bytes_per_s) for name in network.flat_algorithms]


def _ring(network: Network, members: int, nodes: int, bytes_per_s: float) -> Cost:
    between = nodes if nodes > 1 else 0
    turns = 2 * (members - 1) / members
    chain = between * network.inter.latency_s + (members - between) * network.intra.latency_s
    return Cost(turns * chain, turns / bytes_per_s)


def _tree(network: Network, members: int, nodes: int, bytes_per_s: float) -> Cost:
    depth = math.ceil(math.log2(nodes))
    inside = math.ceil(members / nodes) - 1
    hops = depth * network.inter.latency_s * TREE_HOP_FACTOR + inside * network.intra.latency_s
    return Cost(2 * hops, 2 / (bytes_per_s * TREE_BANDWIDTH))
