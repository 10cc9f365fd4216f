"""What ranks measure together is the same on each of them: the network, a message, the batch that fits."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GridComm
from hyperbatch.config import OptimConfig
from hyperbatch.engine import measure
from hyperbatch.engine import network as measuring
from hyperbatch.engine.ranks import Ranks
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


def link_and_batch(rank: int) -> tuple[tuple[float, float], int]:
    comm = GridComm(RankGrid(1, 2))
    link = measure.measure_link(comm, "flat", torch.device("cpu"))
    comm.close()
    measure.free_bytes = lambda *_: (3 - rank) << 30
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2))
    arena = Arena(model, ["1.bias", "1.weight"])
    ranks = Ranks(rank=rank, world_size=2)
    fits = measure.fitting_batch(OptimConfig(precision="fp32"), model, arena, torch.zeros(2, 1, 8, 8), 1000, 0, ranks)
    return link, fits


def test_ranks_agree_on_what_a_message_costs_and_on_the_batch_that_fits() -> None:
    first, second = run_ranks(2, link_and_batch)
    assert first == second, "the slowest rank's times, and the smallest batch"
    (latency_s, s_per_byte), fits = first
    assert latency_s >= 0
    assert s_per_byte >= 0
    assert fits == int((0.8 * (2 << 30) - 12 * 130) / 1500)


def free_of_shared_gpu(rank: int) -> int:
    """GPUs are played: the first two ranks use the same one, although each is a host of its own for its launcher."""
    torch.cuda.get_device_properties = lambda _: SimpleNamespace(uuid=UUID(int=rank // 2))
    torch.cuda.mem_get_info = lambda _: (1000, 2000)
    torch.cuda.memory_reserved, torch.cuda.memory_allocated = lambda _: 70, lambda _: 30
    return measure.free_bytes(torch.device("cuda", 0), Ranks(rank=rank, world_size=3))


def test_ranks_that_share_a_gpu_share_its_free_memory() -> None:
    assert run_ranks(3, free_of_shared_gpu) == [500 + 40, 500 + 40, 1000 + 40]


def test_alone_there_is_nothing_to_measure() -> None:
    network = measuring.measure_network(RankGrid(1, 1), torch.device("cpu"))
    assert network.intra == network.inter == measuring.ASSUMED
