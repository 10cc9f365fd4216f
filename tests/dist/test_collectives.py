"""Each all-reduce against the backend's own, bit for bit on integer values, on every grid of 1 to 8 ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from harness import RankFailed, run_ranks
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, pipeline, shards
from hyperbatch.comm.collectives import ALGORITHMS, all_gather, all_reduce, reduce_scatter
from hyperbatch.comm.doctor import LARGEST_SUM, CollectiveCheck, check_collectives, values_of
from hyperbatch.comm.grid import GridComm, cuda_uses_nccl
from hyperbatch.comm.shards import own_shard, shard_bounds
from hyperbatch.errors import InputError
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

SIZES = (0, 1, 7, 1023, 2**16 + 3)
LARGE = 2**20 + 3
DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def grids_of(world_size: int) -> list[RankGrid]:
    return [RankGrid(rows, world_size // rows) for rows in range(1, world_size + 1) if world_size % rows == 0]


def round_robin(grid: RankGrid) -> list[list[int]]:
    return [[column * grid.rows + row for column in range(grid.columns)] for row in range(grid.rows)]


def integers(numel: int, rank: int, dtype: torch.dtype) -> Tensor:
    """Small enough that every partial sum of 8 ranks is exact in bf16."""
    return ((torch.arange(numel) * 7 + rank * 3) % 11).to(dtype)


# -- values ------------------------------------------------------------------------------------------------------


def equals_backend(rank: int, world_size: int) -> list[str]:
    """The grid of cases is sampled above four ranks: all meet all grids, placements and dtypes, in turn with sizes."""
    wrong = []
    for turn, grid in enumerate(grids_of(world_size)):
        for ranks in [None, round_robin(grid)] if min(grid.rows, grid.columns) > 1 else [None]:
            comm = GridComm(grid, ranks=ranks)
            for i, dtype in enumerate(DTYPES):
                sizes = SIZES if world_size <= 4 else SIZES[(turn + i) % 2 :: 2]
                flights = []
                for numel in (*sizes, LARGE) if (turn + i) % len(DTYPES) == 0 else sizes:
                    expected = integers(numel, rank, dtype)
                    dist.all_reduce(expected)
                    for algorithm in ALGORITHMS:  # all sizes and algorithms are in flight together
                        actual = integers(numel, rank, dtype)
                        handle = all_reduce(
                            actual, comm, algorithm=algorithm, op="sum", async_op=True, hybrid_switch_bytes=2000
                        )
                        flights.append((f"{grid} {ranks} {dtype} {numel} {algorithm}", expected, actual, handle))
                for name, expected, actual, handle in flights:
                    handle.wait()
                    if not torch.equal(expected, actual):
                        wrong.append(name)
            comm.close()
    return wrong


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_every_algorithm_equals_the_backend(world_size: int) -> None:
    assert run_ranks(world_size, equals_backend, world_size, timeout_s=120) == [[]] * world_size


def in_chunks(rank: int, grid: str) -> int:
    """Chunks of 1000 bytes in the last four all-reduces."""
    pipeline.CHUNK_BYTES = 1000
    comm, begun = GridComm(RankGrid.parse(grid)), []
    scatter = pipeline._Chunk.scatter
    pipeline._Chunk.scatter = lambda chunk: (begun.append(chunk), scatter(chunk))[1]
    for numel in (500, 501, 1023, 4099, 7003):
        for dtype, wire in ((torch.float32, None), (torch.float32, torch.bfloat16), (torch.float16, torch.float32)):
            expected = integers(numel, rank, dtype)
            dist.all_reduce(expected)
            handles, tensors = [], [integers(numel, rank, dtype) for _ in range(3)]
            begun.clear()
            for tensor in tensors:
                handles.append(all_reduce(tensor, comm, algorithm="torus", op="sum", wire_dtype=wire, async_op=True))
            for tensor, handle in zip(tensors, handles):
                handle.wait()
                assert torch.equal(tensor, expected), (numel, dtype, wire)
            mean = integers(numel, rank, torch.float64)
            dist.all_reduce(mean)
            tensor = integers(numel, rank, torch.float32)
            all_reduce(tensor, comm, algorithm="torus", wire_dtype=wire)
            tolerance = 2.0**-7 if wire == torch.bfloat16 else 2.0**-21  # a few roundings of the precision on the wire
            assert torch.allclose(tensor.double(), mean / comm.size, rtol=tolerance, atol=4 * tolerance)
    assert all(chunk.work is None for chunk in begun), "everything begun was waited for"
    return len(begun)


@pytest.mark.parametrize("grid", ["2x2", "2x3", "4x2"])
def test_the_pipelined_torus_equals_the_backend(grid: str) -> None:
    assert set(run_ranks(RankGrid.parse(grid).size, in_chunks, grid)) == {4 * 28}, "7003 fp32 elements"


def means_and_shards(rank: int) -> None:
    comm = GridComm(RankGrid(2, 2))
    for algorithm in ALGORITHMS:
        # A sum of four would be infinite in fp16; the mean is not.
        for wire in (None, torch.float16):
            large = torch.full((1001,), 60000.0, dtype=torch.float16 if wire is None else torch.float32)
            all_reduce(large, comm, algorithm=algorithm, wire_dtype=wire)
            assert (large == 60000).all(), algorithm

        # bf16 on the wire carries 4 * k exactly for these k, and the tensor keeps its own precision and shape.
        narrow = (integers(6 * 7, rank, torch.float32) * 4).view(6, 7)
        expected = narrow.clone()
        dist.all_reduce(expected)
        all_reduce(narrow, comm, algorithm=algorithm, wire_dtype=torch.bfloat16)
        assert narrow.dtype == torch.float32
        assert torch.equal(narrow, expected / 4)

        # Wider on the wire than the gradient: summed without the gradient's rounding.
        wide = torch.tensor([2048.0 if rank == 0 else 1.0], dtype=torch.float16)  # 2048 + 1 is 2048 in fp16
        all_reduce(wide, comm, algorithm=algorithm, op="sum", wire_dtype=torch.float32)
        assert wide.item() == 2052, "2051 rounds to even at fp16's spacing of 2"

        # Same inputs, same bits, on every rank and every time.
        results = []
        for _ in range(2):
            noise = torch.randn(4099, generator=torch.Generator().manual_seed(rank))
            all_reduce(noise, comm, algorithm=algorithm)
            everywhere = [torch.empty_like(noise) for _ in range(4)]
            dist.all_gather(everywhere, noise)
            results += everywhere
        assert all(torch.equal(results[0], other) for other in results), algorithm

    for numel in SIZES:
        whole = integers(numel, rank, torch.float32)
        expected = whole.clone()
        dist.all_reduce(expected)
        start, stop = shard_bounds(numel, 4, rank)
        shard = torch.empty(stop - start)
        reduce_scatter(shard, whole, comm)
        assert torch.equal(shard, expected[start:stop] / 4)
        assert torch.equal(whole, integers(numel, rank, torch.float32)), "the input stays"
        gathered = torch.full((numel,), -1.0)
        all_gather(gathered, shard, comm)
        assert torch.equal(gathered, expected / 4)

    counts = torch.tensor([rank, 1])
    all_reduce(counts, comm, op="sum", algorithm="torus")
    assert counts.tolist() == [6, 4]


def test_means_precision_determinism_and_shards() -> None:
    run_ranks(4, means_and_shards)


def torus_messages(rank: int, numel: int) -> list[tuple[str, int, bool]]:
    """(collective, elements, in place) of one torus all-reduce."""
    seen: list[tuple[str, int, bool]] = []
    tensor = integers(numel, rank, torch.float32)
    first, last = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes

    def watch(home: object, attribute: str, payload: int) -> None:
        original = getattr(home, attribute)

        def watched(*args, **kwargs):
            sent = args[payload]
            seen.append((attribute.strip("_"), sent.numel(), first <= sent.data_ptr() < last))
            return original(*args, **kwargs)

        setattr(home, attribute, watched)

    comm = GridComm(RankGrid(2, 3))
    for name, payload in (("all_reduce", 0), ("all_to_all_single", 1), ("reduce", 0), ("broadcast", 0)):
        watch(dist, name, payload)
    watch(shards, "all_gather", 1)
    all_reduce(tensor, comm, algorithm="torus")
    return seen


@pytest.mark.parametrize("numel", [1023, 1024])
def test_torus_sends_shards_and_never_copies_for_a_remainder(numel: int) -> None:
    for rank, seen in enumerate(run_ranks(6, torus_messages, numel)):
        tail = numel % 3
        mine = 341 + (tail if rank % 3 == 2 else 0)
        expected = [("all_to_all_single", 1023, True), ("all_reduce", mine, True), ("all_gather", 341, True)]
        if tail:
            expected = [expected[0], ("reduce", tail, True), *expected[1:], ("broadcast", tail, True)]
        assert seen == expected


# -- grids -------------------------------------------------------------------------------------------------------


def build(rank: int, case: str) -> str:
    try:
        if case == "differs":
            GridComm(RankGrid(2, 2) if rank < 3 else RankGrid(4, 1))
        elif case == "placement":
            GridComm(RankGrid(2, 2), ranks=[[0, 1], [2, 3]] if rank else [[0, 2], [1, 3]])
        elif case == "one wrong":
            GridComm(RankGrid(2, 2) if rank != 1 else RankGrid(3, 2))
        elif case == "twice":
            GridComm(RankGrid(2, 2), ranks=[[0, 1], [1, 3]])
        elif case == "descending":
            GridComm(RankGrid(2, 2), ranks=[[1, 0], [2, 3]])
    except InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("differs", "the rank grid differs between ranks: rank 0 has 'grid 2x2"),
        ("placement", "rank 0 has 'grid 2x2 with ranks [[0, 2], [1, 3]]', rank 1 has"),
        ("one wrong", "rank 1: grid 3x2 holds 6 ranks, but there are 4"),
        ("twice", "must name each of 0 to 3 once"),
        ("descending", "the ranks of a row must ascend"),
    ],
)
def test_a_wrong_grid_is_an_error_on_every_rank(case: str, message: str) -> None:
    errors = run_ranks(4, build, case, timeout_s=20)
    assert len(set(errors)) == 1
    assert message in errors[0]


def rows_in_any_order(rank: int) -> None:
    comm = GridComm(RankGrid(2, 2), ranks=[[1, 3], [0, 2]])
    whole = integers(1023, rank, torch.float32)
    expected = whole.clone()
    dist.all_reduce(expected)
    for algorithm in ALGORITHMS:
        tensor = whole.clone()
        all_reduce(tensor, comm, algorithm=algorithm, op="sum")
        assert torch.equal(tensor, expected), algorithm
    for algorithm in ("flat", "torus"):
        start, stop = own_shard(1023, comm, algorithm)
        shard = torch.empty(stop - start)
        reduce_scatter(shard, whole, comm, op="sum", algorithm=algorithm)
        assert torch.equal(shard, expected[start:stop]), algorithm
        gathered = torch.zeros(1023)
        all_gather(gathered, shard, comm, algorithm=algorithm)
        assert torch.equal(gathered, expected), algorithm


def test_hosts_may_come_in_any_order() -> None:
    run_ranks(4, rows_in_any_order)


def with_mesh(rank: int) -> tuple[str, list[list[int]]]:
    comm = GridComm(init_device_mesh("cpu", (2, 3)))
    tensor = integers(1023, rank, torch.float32)
    expected = tensor.clone()
    dist.all_reduce(expected)
    all_reduce(tensor, comm, algorithm="torus", op="sum")
    assert torch.equal(tensor, expected)
    assert dist.get_process_group_ranks(comm.row) == [3 * (rank // 3) + column for column in range(3)]
    assert dist.get_process_group_ranks(comm.column) == [rank % 3, rank % 3 + 3]
    return str(comm.grid), comm.ranks


def test_a_device_mesh_is_a_grid() -> None:
    assert run_ranks(6, with_mesh)[0] == ("2x3", [[0, 1, 2], [3, 4, 5]])


def on_a_slice(rank: int, case: str) -> None:
    """Every collective on a slice of a mesh against sums over the ranks it should hold."""
    if case == "dp":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
        members, grid = [rank % 2, rank % 2 + 2], "1x2"
    elif case == "dp inside":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))["dp"]
        members, grid = [rank // 2 * 2, rank // 2 * 2 + 1], "1x2"
    elif case == "two dimensions":
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))["replicate", "shard"]
        members, grid = list(range(rank % 2, 8, 2)), "2x2"
    else:
        mesh = init_device_mesh("cpu", (1, 4), mesh_dim_names=("dp", "tp"))["dp"]
        members, grid = [rank], "1x1"
    comm = GridComm(mesh)
    assert (str(comm.grid), comm.members, comm.rank) == (grid, members, members.index(rank))
    for numel in (7, 1023):
        whole = integers(numel, rank, torch.float32)
        expected = sum(integers(numel, other, torch.float32) for other in members)
        assert isinstance(expected, Tensor)
        for algorithm in ALGORITHMS:
            tensor = whole.clone()
            all_reduce(tensor, comm, algorithm=algorithm, op="sum", hybrid_switch_bytes=500)
            assert torch.equal(tensor, expected), algorithm
        for algorithm in ("flat", "torus"):
            start, stop = own_shard(numel, comm, algorithm)
            shard = torch.empty(stop - start)
            reduce_scatter(shard, whole, comm, op="sum", algorithm=algorithm)
            assert torch.equal(shard, expected[start:stop]), algorithm
            gathered = torch.zeros(numel)
            all_gather(gathered, shard, comm, algorithm=algorithm)
            assert torch.equal(gathered, expected), algorithm
    comm.close()
    again = GridComm(mesh)
    dist.barrier()  # a rank that left now would break off the connections that others are still making
    again.close()


@pytest.mark.parametrize(("case", "ranks"), [("dp", 4), ("dp inside", 4), ("two dimensions", 8), ("alone", 4)])
def test_a_slice_of_a_larger_mesh_is_a_grid_of_its_own(case: str, ranks: int) -> None:
    run_ranks(ranks, on_a_slice, case)


def train_on_a_slice(rank: int) -> None:
    """Data parallel over `dp`, each place of `tp` with weights and gradients of its own."""
    comm = GridComm(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"])
    model = torch.nn.Linear(5, 3, bias=False)
    torch.nn.init.constant_(model.weight, rank % 2)
    arena = Arena(model, ["weight"])
    for sharded in (False, True):
        sync = GradSync(arena, plan_groups(arena.specs, "single"), comm, sharded=sharded)
        arena.zero_grad()
        sync.begin()
        (model.weight.sum() * (rank + 1)).backward()
        sync.finish()
        start, stop = sync.shard(0) if sharded else (0, 15)
        mine = arena.grads[torch.float32][start : min(stop, 15)]
        assert (mine == (2 if rank % 2 == 0 else 3)).all(), "the mean of ranks 0 and 2, or of 1 and 3"
        sync.close()
    torch.nn.init.constant_(model.weight, rank)
    with pytest.raises(InputError, match=f"rank {rank % 2} has .*rank {rank % 2 + 2} has"):
        GradSync(arena, plan_groups(arena.specs, "single"), comm)


def test_gradients_are_exchanged_within_a_slice() -> None:
    run_ranks(4, train_on_a_slice)


def wrong_slices(rank: int, case: str) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    try:
        GridComm(
            mesh["dp" if rank < 2 or case == "outside" else "tp"] if case == "mixed" else DeviceMesh("cpu", [0, 1])
        )
    except InputError as error:
        return str(error)
    return "no error"


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("mixed", "the meshes of the ranks overlap or leave ranks out: [(0, 2), (1, 3), (2, 3)]"),
        ("outside", "rank 2: this rank is not in the mesh of ranks [0, 1]"),
    ],
)
def test_slices_must_part_the_ranks(case: str, message: str) -> None:
    errors = run_ranks(4, wrong_slices, case, timeout_s=20)
    assert len(set(errors)) == 1
    assert message in errors[0]


# -- backends ----------------------------------------------------------------------------------------------------


def backend_per_device(rank: int) -> None:
    """A group opened as "cpu:gloo,cuda:nccl". Here gloo stands in for NCCL: who issues on which group counts."""
    assert not cuda_uses_nccl()
    assert dist.get_backend_config() == "cpu:gloo,cuda:gloo"
    threads = threading.active_count()
    dist.get_backend_config = lambda *_: "cpu:gloo,cuda:nccl"
    comm = GridComm(RankGrid(2, 2))
    assert comm.world is dist.group.WORLD, "NCCL needs no second communicator of all ranks"
    for algorithm in ALGORITHMS:
        tensors = [integers(1023, rank, torch.float32) for _ in range(3)]
        handles = []
        for tensor in tensors:
            handles.append(all_reduce(tensor, comm, algorithm=algorithm, op="sum", async_op=True))
            mine = torch.ones(5)
            dist.all_reduce(mine)  # the caller's own, on the same group: nothing may get between
            assert (mine == 4).all()
        for tensor, handle in zip(tensors, handles):
            handle.wait()
            assert torch.equal(tensor, sum(integers(1023, other, torch.float32) for other in range(4)))
    assert threading.active_count() == threads, "CPU tensors travel from the caller's thread"
    dp = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"]
    assert GridComm(dp).world is dp.get_group()


def test_a_backend_per_device_shares_the_world() -> None:
    run_ranks(4, backend_per_device)


@pytest.mark.parametrize(
    ("config", "nccl"),
    [
        ("cuda:nccl", True),
        ("cpu:gloo,cuda:nccl", True),
        ("cuda:nccl,cpu:gloo", True),
        ("cpu:gloo,cuda:gloo", False),
        ("cpu:fake,cuda:fake", False),
        ("cpu:gloo", False),
    ],
)
def test_nccl_is_found_among_the_backends(config: str, nccl: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda: config)
    assert cuda_uses_nccl() is nccl


def test_one_rank_needs_no_process_group() -> None:
    threads = threading.active_count()
    comm = GridComm(RankGrid(1, 1))
    tensor = torch.tensor([1.0, 2.0])
    for algorithm in ALGORITHMS:
        handle = all_reduce(tensor, comm, algorithm=algorithm, async_op=True, wire_dtype=torch.bfloat16)
        assert handle is not None
        assert handle.done()
    shard = torch.empty(2)
    reduce_scatter(shard, tensor, comm)
    all_gather(tensor, shard, comm)
    assert tensor.tolist() == shard.tolist() == [1.0, 2.0]
    assert threading.active_count() == threads
    with pytest.raises(InputError, match="needs a process group"):
        GridComm(RankGrid(2, 1))


def test_wrong_calls_name_what_is_wrong() -> None:
    comm = GridComm(RankGrid(1, 1))
    with pytest.raises(InputError, match="did you mean 'torus'"):
        all_reduce(torch.ones(2), comm, algorithm="torsu")
    with pytest.raises(InputError, match="choose mean or sum"):
        all_reduce(torch.ones(2), comm, op="max")
    with pytest.raises(InputError, match="use op='sum'"):
        all_reduce(torch.ones(2, dtype=torch.int64), comm)
    with pytest.raises(InputError, match="contiguous"):
        all_reduce(torch.ones(2, 3).t(), comm)
    with pytest.raises(InputError, match="one-dimensional with 4"):
        reduce_scatter(torch.ones(2, 2), torch.ones(2, 2), comm)


# -- faults ------------------------------------------------------------------------------------------------------


def lose_a_rank(rank: int, algorithm: str, killed: bool) -> tuple[str, float]:
    comm = GridComm(RankGrid(2, 2))
    tensor = torch.ones(4096)
    all_reduce(tensor, comm, algorithm=algorithm)
    if rank == 3:
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(3)
        return "slept", 0.0
    start = time.monotonic()
    try:
        # A rank may get through the phases that do not need the lost one; the next all-reduce then fails.
        for _ in range(3):
            all_reduce(tensor, comm, algorithm=algorithm)
    except RuntimeError as error:
        waited_s = time.monotonic() - start
        with pytest.raises(RuntimeError):  # at once, not after another timeout
            all_reduce(tensor, comm, algorithm=algorithm)
        return type(error).__name__, waited_s
    return "no error", 0.0


@pytest.mark.parametrize("algorithm", ["flat", "hierarchical", "torus"])
def test_a_killed_rank_raises_on_the_others(algorithm: str) -> None:
    results = run_ranks(4, lose_a_rank, algorithm, True, collective_timeout_s=8, timeout_s=30, may_die=[3])
    for name, waited_s in results[:3]:
        assert name != "no error"
        assert waited_s < 20, "the timeout of 8 s, with room for a busy machine"


def test_a_silent_rank_raises_on_the_others_within_the_timeout() -> None:
    results = run_ranks(4, lose_a_rank, "torus", False, collective_timeout_s=1.5, timeout_s=30)
    assert [name for name, _ in results].count("no error") == 0


def finish_and_close(rank: int) -> int:
    before = threading.active_count()
    comm = GridComm(RankGrid(2, 1))
    for _ in range(50):
        all_reduce(torch.ones(8), comm)
    assert threading.active_count() == before + 1
    comm.close()
    with pytest.raises(RuntimeError, match="closed"):
        all_reduce(torch.ones(8), comm)
    return threading.active_count() - before


def test_close_ends_the_thread() -> None:
    assert run_ranks(2, finish_and_close) == [0, 0]


def stuck(rank: int) -> None:
    time.sleep(60 if rank == 1 else 0.5)  # a rank that left at once would break the other's start


def raises(rank: int) -> None:
    time.sleep(0.5)
    if rank == 1:
        raise ValueError("from rank one")


def test_the_harness_names_stuck_and_failing_ranks() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 was stuck at:.*in stuck"):
        run_ranks(2, stuck, timeout_s=2)
    with pytest.raises(RankFailed, match=r"(?s)rank 1: .*from rank one"):
        run_ranks(2, raises)


def doctor(rank: int) -> list[CollectiveCheck]:
    return check_collectives(torch.device("cpu"), sizes_bytes=(4096,), rounds=2)


def test_doctor_checks_every_algorithm() -> None:
    rows = run_ranks(4, doctor)[0]
    assert {row.algorithm for row in rows} == {"flat", "hierarchical", "torus"}
    assert all(row.correct and row.median > 0 for row in rows)
    assert {row.grid for row in rows} == {"2x2"}


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8, 16, 32, 63, 64, 65, 128, 255, 256, 257, 511, 513, 1000, 2048, 4096])
def test_values_of_the_doctor_are_exact_in_bf16_and_tell_places_and_ranks_apart(size: int) -> None:
    places = torch.arange(1029)
    values = torch.stack([values_of(places, rank, size) for rank in range(size)])
    total = values.sum(0)
    assert values.min() >= 0
    assert total.max() <= LARGEST_SUM, "whole numbers up to 256 are exact in bf16, and so is every part of the sum"
    assert torch.equal(values.bfloat16().long(), values)
    assert (values.max(1).values > 0).all(), "every rank adds something: one that is left out is missed"
    # Neighbouring shards swapped, or one of them doubled, would show.
    for count in (2, 3, 8):
        parts = total[: 1029 // count * count].view(count, -1)
        assert all((left != right).any() for left, right in pairwise(parts))
