"""Muon whose matrices are shared out over ranks equals Muon on every rank, bit for bit.

The ranks of the fused path are started in the process with Triton's interpreter (`interpreter.py`).
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from interpreter import inside, outside, run_by_the_interpreter
from torch import Tensor, nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.errors import InputError
from hyperbatch.optim import Muon
from hyperbatch.optim.shares import deal_out
from hyperbatch.params import param_groups
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid


@outside
def test_fused_shares_by_the_interpreter():
    run_by_the_interpreter(__file__)


@outside
@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
@pytest.mark.parametrize("count", [0, 1, 5, 40])
def test_every_matrix_is_dealt_out_once_and_none_overlap(ranks, count):
    generator = torch.Generator().manual_seed(count)
    sizes = (torch.randint(1, 50, (count,), generator=generator) * 64).tolist()
    costs = [float(size**2) for size in sizes]
    deal = deal_out(costs, sizes, ranks)
    taken = torch.zeros(deal.numel, dtype=torch.int32)
    load = [0.0] * ranks
    for share, size, cost in zip(deal.shares, sizes, costs, strict=True):
        start, stop = deal.waves[share.wave]
        segment = (stop - start) // ranks
        assert start + share.rank * segment <= share.offset
        assert share.offset + size <= start + (share.rank + 1) * segment
        taken[share.offset : share.offset + size] += 1
        load[share.rank] += cost
    assert taken.max().item() <= 1 if count else deal.numel == 0
    if count == 40:
        assert max(load) - min(load) <= max(costs)
        assert {share.wave for share in deal.shares} == {0, 1}


class Layers(nn.Module):
    """Gradients are small integers on every rank, so that their mean is exact."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.convs = nn.ModuleList([nn.Conv2d(3, 5, 3, bias=False), nn.Conv2d(5, 9, 1), nn.Conv2d(3, 5, 3)])
        self.to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.idle = nn.Parameter(torch.ones(9, 2))
        self.fc = nn.Linear(17, 7)

    def loss(self, rank: int, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, (name, param) in enumerate(self.named_parameters()):
            if name != "idle":
                values = (torch.arange(param.numel()) ** 2 * 5 + i + 3 * rank + step) % 9 - 4
                total = total + (param.double() * values.view(param.shape)).sum()
        return total


def train(rank: int, grid: str, dtype: torch.dtype, shared: bool, spoil: int, options: dict) -> dict[str, Tensor]:
    comm = GridComm(RankGrid.parse(grid))
    model = Layers()
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=dtype)
    sync = GradSync(arena, plan_groups(arena.specs, "cubic", base=1), comm)
    optimizer = Muon(param_groups(model, 0.01), lr=0.1, steps=3, arena=arena, **options)
    if shared:
        optimizer.share(comm)
    for step in range(3):
        arena.zero_grad()
        sync.begin()
        (model.loss(rank, step) * (torch.inf if step == spoil and rank == 0 else 1.0)).backward()
        sync.finish()
        optimizer.step()
    assert optimizer.skipped_steps == (spoil >= 0)
    sync.close()
    masters = arena.named_masters()
    weights = {name: masters.get(name, p).detach().clone() for name, p in model.named_parameters()}
    buffers = {
        f"m {name}": optimizer.state[p]["momentum_buffer"].clone()
        for name, p in model.named_parameters()
        if p.grad is not None
    }
    return {**weights, **buffers}


def compare(rank: int, grid: str, dtype: torch.dtype, spoil: int, options: dict) -> None:
    plain, shared = (train(rank, grid, dtype, is_shared, spoil, options) for is_shared in (False, True))
    assert plain.keys() == shared.keys()
    for name, expected in plain.items():
        assert torch.equal(shared[name], expected), name
        everywhere = [torch.empty_like(expected) for _ in range(dist.get_world_size())]
        dist.all_gather(everywhere, expected.contiguous())
        assert all(torch.equal(expected, other) for other in everywhere), name
    assert torch.equal(shared["idle"], torch.ones(9, 2))


@outside
@pytest.mark.parametrize(
    ("grid", "dtype", "spoil"),
    [("2x1", torch.float32, -1), ("2x2", torch.bfloat16, 1), ("4x1", torch.float64, -1), ("1x3", torch.float32, -1)],
)
def test_shared_weights_are_those_of_one_rank_bit_for_bit(grid, dtype, spoil):
    run_ranks(RankGrid.parse(grid).size, compare, grid, dtype, spoil, {})


@inside
@pytest.mark.filterwarnings("ignore:invalid value|overflow:RuntimeWarning")
def test_so_are_those_of_the_kernels():
    run_ranks(2, compare, "2x1", torch.float32, -1, {"fused": True}, timeout_s=240)


@outside
def test_the_reference_is_not_shared():
    with pytest.raises(InputError, match="reference path"):
        Muon([nn.Parameter(torch.ones(2, 2))], lr=0.1, foreach=False).share(GridComm(RankGrid(1, 1)))
