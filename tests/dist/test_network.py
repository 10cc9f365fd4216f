"""Links of a process group are measured the same on every rank, whatever the grid."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks

from hyperbatch.engine import network as measuring
from hyperbatch.plan.machine import Network
from hyperbatch.plan.types import RankGrid


def measured(rank: int, rows: int) -> Network:
    measuring.LARGE_BYTES = {"cpu": (1 << 14, 1 << 18)}
    return measuring.measure_network(RankGrid(rows, 4 // rows), torch.device("cpu"), rounds=1)


@pytest.mark.parametrize("rows", [1, 2, 4])
def test_every_rank_gets_the_same_answer(rows: int) -> None:
    first, *others = run_ranks(4, measured, rows)
    assert all(other == first for other in others)
    assert first.devices_per_node == 4 // rows
    assert 1 <= first.nics_per_node <= 4 // rows
    assert not first.flat_uses_all_nics, "gloo"
    for link in (first.intra, first.inter):
        assert link.bytes_per_s > 0
        assert link.latency_s >= 0


def through_nccl(rank: int, device: str) -> Network:
    """Our own set-up on GPUs, without one: a backend per device, and times that are given."""
    dist.get_backend_config = lambda *_: "cpu:gloo,cuda:nccl"
    measuring._link = lambda *_, **__: measuring.ASSUMED
    return measuring.measure_network(RankGrid(2, 1), torch.device(device))


@pytest.mark.parametrize(("device", "nccl"), [("cuda", True), ("cpu", False)])
def test_the_network_is_that_of_the_devices_backend(device: str, nccl: bool) -> None:
    network = run_ranks(2, through_nccl, device)[0]
    assert network.flat_uses_all_nics is nccl
    assert network.flat_algorithms == (("ring", "tree") if nccl else ("ring",))


def test_alone_there_is_nothing_to_measure() -> None:
    network = measuring.measure_network(RankGrid(1, 1), torch.device("cpu"))
    assert network.intra == network.inter == measuring.ASSUMED
