"""Collectives, the exchange and the sharded update over 2 and 4 real NCCL ranks that share one GPU, by value."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm, all_gather, all_reduce, check_collectives, own_shard, reduce_scatter
from hyperbatch.errors import InputError
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.params import param_groups
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
CUDA = torch.device("cuda", 0)
GRIDS = {2: ["1x2", "2x1"], 4: ["2x2", "1x4", "4x1"]}
ALGORITHMS = ("flat", "hierarchical", "torus", "hybrid")


@pytest.fixture(params=[2, 4])
def world_size(request):
    return request.param


def numbers(numel, rank, dtype):
    """Small whole numbers, other ones on every rank: their sums are exact in every precision."""
    return ((torch.arange(numel, device=CUDA) * 7 + rank * 3) % 16).to(dtype)


def run_captured(run, *spoilt):
    """Runs once as it is, then captures, spoils these tensors and replays. The graph ends here: NCCL closes no
    communicator that a graph still holds."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        run()
    for tensor in spoilt:
        tensor.fill_(7)
    graph.replay()
    torch.cuda.synchronize()


def reduce_everything(rank, grid):
    size, wrong = dist.get_world_size(), []
    comm = GridComm(RankGrid.parse(grid))

    def expect(case, actual, expected):
        if not torch.equal(actual, expected):
            wrong.append(case)

    for algorithm in ALGORITHMS:
        for dtype, wire in ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.bfloat16, None)):
            for numel in (1, 7, 1027, 600_001):  # hybrid changes from hierarchical to flat in between
                case = (algorithm, str(dtype), str(wire), numel)
                total = sum(numbers(numel, other, torch.float32) for other in range(size))
                tensor = numbers(numel, rank, dtype)
                all_reduce(tensor, comm, algorithm=algorithm, op="sum", wire_dtype=wire)
                expect((*case, "sum"), tensor, total.to(dtype))
                tensor = numbers(numel, rank, dtype)
                handle = all_reduce(tensor, comm, algorithm=algorithm, wire_dtype=wire, async_op=True)
                handle.wait()
                expect((*case, "mean, asynchronous"), tensor, (total / size).to(dtype))
        kept, tensor = numbers(1027, rank, torch.float32), torch.empty(1027, device=CUDA)

        def run(algorithm=algorithm, kept=kept, tensor=tensor):
            tensor.copy_(kept)
            all_reduce(tensor, comm, algorithm=algorithm, op="sum")

        run_captured(run, tensor)
        expect((algorithm, "captured"), tensor, sum(numbers(1027, other, torch.float32) for other in range(size)))

    for algorithm in ("flat", "torus"):
        whole, total = numbers(1027, rank, torch.float32), sum(numbers(1027, r, torch.float32) for r in range(size))
        start, stop = own_shard(1027, comm, algorithm)
        shard, gathered = torch.empty(stop - start, device=CUDA), torch.empty(1027, device=CUDA)
        reduce_scatter(shard, whole, comm, op="sum", algorithm=algorithm)
        expect((algorithm, "reduce_scatter"), shard, total[start:stop])
        all_gather(gathered, shard, comm, algorithm=algorithm)
        expect((algorithm, "all_gather"), gathered, total)
    comm.close()
    return wrong


def test_every_collective_gives_the_right_values(world_size):
    for grid in GRIDS[world_size]:
        assert run_ranks(world_size, reduce_everything, grid, cuda=True) == [[]] * world_size, grid


def doctor_rows(rank, grid):
    return check_collectives(CUDA, grid=RankGrid.parse(grid), sizes_bytes=(1 << 12, 1 << 22), rounds=2)


def test_the_doctor_finds_nothing_wrong(world_size):
    rows = run_ranks(world_size, doctor_rows, GRIDS[world_size][0], cuda=True)[0]
    assert len(rows) == 12
    assert all(row.correct for row in rows), rows


def network(dtype):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5))
    model = model.to(CUDA)
    order = [name for name, _ in model.named_parameters()][::-1]
    return model, Arena(model, order, dtype=dtype)


def backward(model, images):
    model(images).float().square().sum().backward()


def images_of(rank, dtype):
    generator = torch.Generator("cpu").manual_seed(100 + rank)
    return torch.randn(4, 3, 8, 8, generator=generator).to(CUDA, dtype)


def exchange(rank, grid, capture):
    """Largest relative error of a gradient, by algorithm and wire, against the mean taken one tensor at a time."""
    comm, errors = GridComm(RankGrid.parse(grid)), {}
    model, arena = network(torch.float32)
    images = images_of(rank, torch.float32)
    arena.zero_grad()
    backward(model, images)
    expected = {slot.name: slot.param.grad.clone() for slot in arena.slots}
    for tensor in expected.values():
        dist.all_reduce(tensor)
        tensor /= comm.size
    for algorithm in ALGORITHMS:
        for wire in (None, torch.bfloat16):
            plan = plan_groups(arena.specs, "cubic", base=1)
            sync = GradSync(arena, plan, comm, algorithm=algorithm, wire_dtype=wire)

            def step(sync=sync):
                arena.zero_grad()
                sync.begin()
                backward(model, images)
                sync.finish()

            for _ in range(4):
                step()
            if capture:
                run_captured(step, *arena.grads.values())
            found = [(slot.param.grad - expected[slot.name]).norm() for slot in arena.slots]
            scale = [expected[slot.name].norm() for slot in arena.slots]
            errors[algorithm, str(wire)] = max((a / b).item() for a, b in zip(found, scale, strict=True))
            sync.close()
    comm.close()
    return errors


@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
def test_gradients_become_the_mean_over_ranks(world_size, capture):
    for errors in run_ranks(world_size, exchange, GRIDS[world_size][0], capture, cuda=True, timeout_s=120):
        assert len(errors) == 8
        for (algorithm, wire), error in errors.items():
            # bf16 keeps 8 bits, and each of up to 4 additions rounds once more.
            assert error < (1e-5 if wire == "None" else 1.5e-2), (algorithm, wire)


def update(rank, grid, algorithm):
    """Weights after five steps: plain, sharded."""
    weights = []
    for sharded in (False, True):
        comm = GridComm(RankGrid.parse(grid))
        model, arena = network(torch.float32)
        plan = plan_groups(arena.specs, "cubic", base=1)
        sync = GradSync(arena, plan, comm, algorithm=algorithm, sharded=sharded)
        optimizer = LARS(param_groups(model, 0.01), lr=0.1, arena=arena)
        step = ShardedUpdate(optimizer, arena, sync) if sharded else optimizer
        for _ in range(5):
            arena.zero_grad()
            sync.begin()
            backward(model, images_of(rank, torch.float32))
            sync.finish()
            step.step()
        weights.append(torch.cat([flat.cpu() for flat in arena.weights.values()]))
        sync.close()
        comm.close()
    return weights


@pytest.mark.parametrize("algorithm", ["flat", "torus"])
def test_the_sharded_update_leaves_the_weights_of_the_plain_one(world_size, algorithm):
    answers = run_ranks(world_size, update, GRIDS[world_size][0], algorithm, cuda=True)
    for plain, sharded in answers:
        assert torch.equal(plain, answers[0][0])
        assert torch.equal(sharded, answers[0][1])
    plain, sharded = answers[0]
    assert not torch.equal(plain, torch.cat([flat.cpu() for flat in network(torch.float32)[1].weights.values()]))
    assert (plain - sharded).norm() < 1e-5 * plain.norm()


class Uneven(nn.Module):
    """Uses its second layer on the first rank alone, from the fifth step on."""

    def __init__(self, rank):
        super().__init__()
        self.first, self.second, self.rank, self.steps = nn.Linear(4, 4), nn.Linear(4, 4), rank, 0

    def forward(self, x):
        self.steps += 1
        both = self.steps < 5 or self.rank == 0
        return self.second(self.first(x)) if both else self.first(x)


def use_unevenly(rank, capture):
    torch.manual_seed(0)
    model = Uneven(rank).to(CUDA)
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1])
    comm = GridComm(RankGrid(1, dist.get_world_size()))
    sync = GradSync(arena, plan_groups(arena.specs, "single"), comm)

    def step():
        arena.zero_grad()
        sync.begin()
        model(torch.ones(2, 4, device=CUDA)).sum().backward()
        sync.finish()

    for _ in range(4):
        step()
    sync.check()  # so far all is well

    def uneven_step():
        run_captured(step) if capture else step()
        sync.check()

    with pytest.raises(InputError, match=r"second\.\w+, second\.\w+: got a gradient on 1 of \d ranks only \(0\)"):
        uneven_step()
    return True


@pytest.mark.parametrize("capture", [False, True], ids=["plain", "captured"])
def test_a_parameter_that_some_ranks_use_is_named(world_size, capture):
    assert all(run_ranks(world_size, use_unevenly, capture, cuda=True))
