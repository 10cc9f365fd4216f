"""Our parts in a plain DDP script: the hook, the bucket caps, and the example before and after."""

from __future__ import annotations

import contextlib
import inspect
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from hyperbatch.comm import GridComm
from hyperbatch.comm.ddp import GridHookState, ddp_bucket_bytes, ddp_kwargs, grid_hook, register_ddp_hook
from hyperbatch.errors import InputError
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

ROOT = Path(__file__).parents[2]
HAS_CAP_LIST = "bucket_cap_mb_list" in inspect.signature(DistributedDataParallel.__init__).parameters


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4)).double()


def train(ddp: DistributedDataParallel, rank: int, steps: int = 20) -> None:
    generator = torch.Generator().manual_seed(rank)
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        ddp(torch.randn(4, 8, dtype=torch.float64, generator=generator)).square().mean().backward()
        optimizer.step()


def hooked(rank: int) -> None:
    comm = GridComm(RankGrid(2, 2))
    plan = plan_groups(network(), "cubic", base=1)
    plain = network()
    train(DistributedDataParallel(plain), rank)
    for algorithm in ("flat", "hierarchical", "torus", "hybrid"):
        model = network()
        ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, **ddp_kwargs(plan))
        register_ddp_hook(ddp, comm, algorithm=algorithm, hybrid_switch_bytes=500)
        train(ddp, rank)
        difference = max((a - b).abs().max().item() for a, b in zip(model.parameters(), plain.parameters()))
        assert difference < 1e-13, (algorithm, difference)  # fp64 rounding of 20 steps

    model = network()
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(GridHookState(comm, wire_dtype=torch.float16), grid_hook)  # torch's own way
    train(ddp, rank, 5)
    flat = torch.cat([param.grad.view(-1) for param in model.parameters() if param.grad is not None])
    assert torch.equal(flat, flat.half().double()), "the last gradients came over a 16-bit wire"
    with pytest.raises(InputError, match="did you mean 'torus'"):
        register_ddp_hook(DistributedDataParallel(network()), comm, algorithm="toros")


def test_training_with_the_hook_equals_plain_ddp() -> None:
    run_ranks(4, hooked)


def started_apart(rank: int) -> bool:
    """DDP itself sends rank 0's weights round when it is made, so the hook need not compare them."""
    model = network()
    with torch.no_grad():
        model[0].weight.add_(rank)  # pyright: ignore[reportArgumentType]
    ddp = DistributedDataParallel(model)
    register_ddp_hook(ddp, GridComm(RankGrid(2, 1)))
    train(ddp, rank, 2)
    flat = torch.cat([param.detach().view(-1) for param in model.parameters()])
    both = [torch.empty_like(flat) for _ in range(2)]
    dist.all_gather(both, flat)
    return torch.equal(both[0], both[1])


def test_ranks_that_start_apart_are_brought_together_by_ddp() -> None:
    assert run_ranks(2, started_apart) == [True, True]


def other_ranks(rank: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    comm = GridComm(mesh["dp"])
    try:
        register_ddp_hook(DistributedDataParallel(network()), comm)
    except InputError as error:
        register_ddp_hook(DistributedDataParallel(network(), process_group=mesh["dp"].get_group()), comm)
        return str(error)
    return "no error"


def test_a_hook_over_other_ranks_than_ddps_is_refused() -> None:
    messages = run_ranks(4, other_ranks)
    assert messages[1].startswith("rank 1: this DDP model averages over ranks [0, 1, 2, 3], and the grid holds [1, 3]")


def unlike_options(rank: int) -> list[str]:
    comm, messages = GridComm(RankGrid(1, 2)), []
    for options in ({"algorithm": "torus" if rank else "flat"}, {"wire_dtype": torch.int8 if rank else None}):
        with pytest.raises(InputError) as raised:
            register_ddp_hook(DistributedDataParallel(network()), comm, **options)
        messages.append(str(raised.value))
    register_ddp_hook(DistributedDataParallel(network()), comm)
    return messages


def test_ranks_that_would_wait_for_each_other_in_backward_are_told_before() -> None:
    for differs, wrong in run_ranks(2, unlike_options):
        assert differs == (
            "the DDP hook differs between ranks: rank 0 has 'algorithm flat', rank 1 has 'algorithm torus'; "
            "use the same on all ranks"
        )
        assert wrong.startswith("rank 1: wire_dtype is torch.int8; give one of torch.float16")


def buckets(rank: int, strategy: str, options: dict) -> tuple[list[int], tuple[int, ...]]:
    model = network()
    plan = plan_groups(model, strategy, **options)
    ddp = DistributedDataParallel(model, **ddp_kwargs(plan))
    train(ddp, rank, 3)
    return [group.bytes for group in plan.groups], ddp_bucket_bytes(ddp)


@pytest.mark.parametrize(
    ("strategy", "options"), [("single", {}), ("cubic", {"base": 1}), ("equal", {"count": 2}), ("per_layer", {})]
)
def test_buckets_follow_the_plan(strategy: str, options: dict) -> None:
    planned, made = run_ranks(2, buckets, strategy, options)[0]
    assert sum(planned) == sum(made)
    if HAS_CAP_LIST:
        assert tuple(planned) == made


def test_older_torch_gets_one_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DistributedDataParallel, "__init__", lambda self, module, bucket_cap_mb=None: None)
    plan = plan_groups(network(), "equal", count=2)
    assert ddp_kwargs(plan) == {"bucket_cap_mb": plan.bytes / 2 / 2**20}


def lose_a_rank(rank: int) -> str:
    ddp = DistributedDataParallel(network(), **ddp_kwargs(plan_groups(network(), "per_layer")))
    register_ddp_hook(ddp, GridComm(RankGrid(3, 1)))
    train(ddp, rank, 3)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        train(ddp, rank, 3)
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_a_dead_rank_raises_in_backward() -> None:
    results = run_ranks(3, lose_a_rank, collective_timeout_s=10, may_die=[1])
    assert results[0] != "no error"
    assert results[2] != "no error"


def run_example(rank: int, script: str) -> str:
    """As torchrun would, but with the process group of the harness: importing torch anew takes longer than training."""
    dist.init_process_group = lambda backend: None
    dist.destroy_process_group = lambda *_: None
    sys.argv = [script, "--steps", "30"]
    sys.path.insert(0, str(ROOT / "examples"))
    with contextlib.redirect_stdout(io.StringIO()) as out:
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
    return out.getvalue()


@pytest.mark.parametrize("script", ["ddp_before.py", "ddp_after.py"])
def test_example_learns(script: str) -> None:
    first, second = run_ranks(2, run_example, script)
    assert second == "", "one rank speaks"
    result = json.loads(first)
    assert result["loss"] < 0.5 * result["first_loss"]
    assert result["ranks"] == 2
    assert len(result.get("bucket_bytes", [])) == (2 if script == "ddp_after.py" and HAS_CAP_LIST else 0)
