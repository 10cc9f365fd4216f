"""The exchange through NCCL on one GPU: values, streams, the number of collectives, and capture in a CUDA graph."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm, all_reduce
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.params import param_groups
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
DEVICE = torch.device("cuda", 0)


@pytest.fixture
def comm(tmp_path):
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1, device_id=DEVICE)
    comm = GridComm(RankGrid(1, 1), alone=True)
    yield comm
    comm.close()
    dist.destroy_process_group()


def network(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    model = model.to(DEVICE)
    order = [name for name, _ in model.named_parameters()][::-1]
    return model, Arena(model, order, dtype=dtype)


def backward(model, dtype):
    images = torch.ones(4, 3, 8, 8, device=DEVICE, dtype=dtype) * torch.arange(4, device=DEVICE).view(4, 1, 1, 1)
    model(images).float().square().sum().backward()


def nccl_calls(run):
    """How many NCCL kernels or calls the profiler sees, by name."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        run()
        torch.cuda.synchronize()
    return {event.key: event.count for event in profile.key_averages() if event.key.startswith("nccl:")}


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "torus"])
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_one_rank_through_nccl_is_the_identity(comm, algorithm, wire):
    values = torch.arange(1027, device=DEVICE, dtype=torch.float32) % 256
    tensor = values.clone()
    handle = all_reduce(tensor, comm, algorithm=algorithm, wire_dtype=wire, async_op=True)
    handle.wait()
    assert torch.equal(tensor, values)


@pytest.mark.parametrize("algorithm", ["flat", "torus"])
def test_gradients_pass_and_each_group_is_its_collectives(comm, algorithm):
    model, arena = network()
    plan = plan_groups(arena.specs, "cubic", base=1)
    arena.zero_grad()
    backward(model, torch.float32)
    expected = {slot.name: slot.param.grad.clone() for slot in arena.slots}
    sync = GradSync(arena, plan, comm, algorithm=algorithm)

    def step():
        arena.zero_grad()
        sync.begin()
        backward(model, torch.float32)
        sync.finish()

    step()
    calls = nccl_calls(step)
    for slot in arena.slots:
        assert torch.allclose(slot.param.grad, expected[slot.name], rtol=1e-4, atol=1e-3), slot.name
    per_group = 1 if algorithm == "flat" else 3
    assert sum(calls.values()) == per_group * len(plan.groups) + 1, calls  # one tells which parameters were used
    timings, phases = sync.timings(), sync.phases()
    assert [t.index for t in timings] == [group.index for group in plan.groups]
    assert all(t.ready_s <= t.start_s <= t.end_s for t in timings)
    assert len(phases) == per_group * len(plan.groups)
    sync.close()


def test_a_step_with_its_exchange_is_captured(comm):
    model, arena = network()
    plan = plan_groups(arena.specs, "cubic", base=1)
    sync = GradSync(arena, plan, comm, algorithm="torus")
    arena.pinned = True

    def step():
        for grad in arena.grads.values():
            grad.zero_()
        for slot in arena.slots:
            slot.param.grad = None
        sync.begin()
        backward(model, torch.float32)
        sync.finish()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(4):
            step()
    torch.cuda.current_stream().wait_stream(side)
    sync.check()  # nothing but the last step could still hold pinned memory, which must not be freed in the capture
    expected = {dtype: grad.clone() for dtype, grad in arena.grads.items()}
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for grad in arena.grads.values():
        grad.fill_(7)
    sync.check()
    graph.replay()
    torch.cuda.synchronize()
    for dtype, grad in arena.grads.items():
        assert torch.allclose(grad, expected[dtype], rtol=1e-4, atol=1e-3)
    assert sync.timings() == ()
    sync.close()


def test_the_sharded_update_waits_for_nobody_and_equals_the_plain_one(comm):
    weights = []
    for sharded in (False, True):
        model, arena = network(torch.bfloat16)
        sync = GradSync(arena, plan_groups(arena.specs, "cubic", base=1), comm, sharded=sharded)
        optimizer = LARS(param_groups(model, 0.01), lr=0.1, arena=arena)
        update = ShardedUpdate(optimizer, arena, sync) if sharded else optimizer
        for _ in range(5):
            arena.zero_grad()
            sync.begin()
            backward(model, torch.bfloat16)
            sync.finish()
            update.step()
        sync.close()
        assert arena.masters is not None
        weights.append(arena.masters.clone())
    assert torch.allclose(weights[0], weights[1], rtol=1e-2, atol=1e-4)
    assert not torch.equal(weights[0], network(torch.bfloat16)[1].masters)
