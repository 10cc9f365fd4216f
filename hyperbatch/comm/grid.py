"""The process groups of a rank grid.

row 0   0  1  2  3      row group: the ranks of one node, the fast direction
row 1   4  5  6  7      column group: the ranks with the same position in each node; column 0 holds the first ranks
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from hyperbatch.comm.agree import check_agreement
from hyperbatch.comm.runner import Exchange, ExchangeHandle, InlineRunner, StreamRunner, Then, ThreadRunner
from hyperbatch.errors import InputError, check_kind, shown
from hyperbatch.plan.types import RankGrid


class GridComm:
    """This rank's row group, column group and world group. Every rank must create it at the same point.

    By default, ranks are placed row by row. `ranks` sets a different placement, e.g. [[0, 2], [1, 3]] if a launcher
    assigns ranks round-robin to two nodes. A two-dimensional DeviceMesh does the same (its first dimension gives the
    rows); its process groups are then used, and other code must not use them while a collective is in flight. A
    direction with only one rank has no group (None).

    A slice of a larger mesh, such as `mesh["dp"]` of a mesh ("dp", "tp"), is a grid of the slice's ranks only. Every
    rank must then be in one slice.

    Without an initialised process group only a 1x1 grid is accepted, and every collective is the identity.
    """

    grid: RankGrid
    ranks: list[list[int]]  # numbers in the default process group, row by row
    members: list[int]  # the same numbers in ascending order
    rank: int  # this rank's index among the members
    world: dist.ProcessGroup | None  # the group of all members
    row: dist.ProcessGroup | None  # the ranks of this rank's node
    column: dist.ProcessGroup | None  # one rank of each node: those in the same position as this rank

    def __init__(
        self,
        grid: RankGrid | DeviceMesh,
        *,
        ranks: Sequence[Sequence[int]] | None = None,
        timeout: timedelta | None = None,
        alone: bool = False,
    ) -> None:
        """timeout: for the groups created here; by default that of the default process group.

        alone: if True, a single rank sends its collectives to itself through the backend instead of skipping them, so
        that the collectives of a step can be counted and timed on one GPU.
        """
        if timeout is not None:
            check_kind("timeout", timeout, timedelta, "give a datetime.timedelta")
        ready = dist.is_initialized()
        me = dist.get_rank() if ready else 0
        self.world = self.row = self.column = None
        self._closed = False
        self._made: list[dist.ProcessGroup] = []
        self._inline = InlineRunner()
        self._thread: ThreadRunner | None = None
        self._streams: dict[torch.device, StreamRunner] = {}
        self._scratch: dict[tuple[str, torch.dtype], Tensor] = {}

        mesh = grid if isinstance(grid, DeviceMesh) else None
        everyone = list(range(dist.get_world_size() if ready else 1))
        problem = None
        try:
            self.grid, self.ranks = _placement(grid, ranks)
            _check_placement(self.grid, self.ranks, everyone if mesh is None else None, me, ready)
        except InputError as error:
            problem = str(error)
        description = []
        if problem is None:
            self.members = sorted(rank for row in self.ranks for rank in row)
            placed = self.ranks if self.members == everyone else "of a slice"
            description = [f"grid {self.grid} with ranks {placed}"]
        default = dist.group.WORLD if ready else None
        check_agreement(default, "the rank grid", description, problem)
        slices = [everyone] if self.members == everyone else _slices(self.members, everyone)

        self.rank = self.members.index(me)
        self.column_index = next(row.index(me) for row in self.ranks if me in row)
        if self.size > 1 or (alone and ready):
            self._make_groups(mesh, slices, timeout or _world_timeout())

    @property
    def size(self) -> int:
        return self.grid.size

    def submit(self, exchange: Exchange, device: torch.device, then: Then | None = None) -> ExchangeHandle:
        """Runs an exchange after all earlier ones, on the communication thread or a GPU's communication stream."""
        if self._closed:
            raise RuntimeError("this GridComm is closed; make a new one")
        if device.type == "cuda" and self.world is not None:
            if device not in self._streams:
                self._streams[device] = StreamRunner(device)
            return self._streams[device].submit(exchange, then)
        # On a group that other code also uses, a thread's collectives could interleave with those of the caller.
        if self.world not in self._made:
            return self._inline.submit(exchange, then)
        if self._thread is None:
            self._thread = ThreadRunner(f"hyperbatch-comm-{self.rank}")
        return self._thread.submit(exchange, then)

    def drain(self) -> None:
        """Waits until the communication thread is idle, so that the caller may use the groups directly."""
        if self._thread is not None:
            self._thread.submit(_nothing).wait()

    def scratch(self, role: str, numel: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns a buffer for the running exchange. On a CPU, buffers are reused, because new pages of memory cost
        more time than a sum over them."""
        if device.type == "cuda":
            return torch.empty(numel, dtype=dtype, device=device)  # the caching allocator reuses the memory
        kept = self._scratch.get((role, dtype))
        if kept is None or kept.numel() < numel:
            kept = self._scratch[role, dtype] = torch.empty(numel, dtype=dtype)
        return kept[:numel]

    def close(self) -> None:
        """Ends the communication thread and the groups created here. Every rank must call it while nothing is in
        flight."""
        self._closed = True
        if self._thread is not None:
            self._thread.close()
            self._thread = None
        while self._made:
            group = self._made.pop()
            if dist.is_initialized():  # otherwise the default group and these were destroyed already
                dist.destroy_process_group(group)
        self.world = self.row = self.column = None
        self._scratch.clear()

    def _make_groups(self, mesh: DeviceMesh | None, slices: list[list[int]], timeout: timedelta | None) -> None:
        def make(members: list[list[int]]) -> dist.ProcessGroup | None:
            """Creates the groups and returns the one that this rank is in. torch requires that all ranks create all
            groups in the same order."""
            mine = None
            for ranks in members:
                group = dist.new_group(ranks, timeout=timeout)
                if isinstance(group, dist.ProcessGroup):  # otherwise this rank is not a member
                    mine = group
                    self._made.append(group)
            return mine

        # On the default group the thread's collectives would interleave with the caller's, so it needs a group of its
        # own. NCCL launches on streams in program order, and a second communicator would only cost memory.
        if not cuda_uses_nccl():
            self.world = make(slices)
        elif len(slices) == 1:
            self.world = dist.group.WORLD
        else:
            self.world = mesh.get_group() if mesh is not None and mesh.ndim == 1 else make(slices)
        rows, columns = self.grid.rows, self.grid.columns
        if min(rows, columns) == 1:
            self.row = self.world if rows == 1 else None
            self.column = self.world if columns == 1 else None
        elif mesh is not None:
            self.column, self.row = mesh.get_all_groups()
        else:
            self.row = make(self.ranks)
            self.column = make([[row[column] for row in self.ranks] for column in range(columns)])


def _nothing() -> None:
    pass


def _placement(grid: RankGrid | DeviceMesh, ranks: Sequence[Sequence[int]] | None) -> tuple[RankGrid, list[list[int]]]:
    if isinstance(grid, DeviceMesh):
        if grid.mesh.ndim > 2 or ranks is not None:
            raise InputError("GridComm accepts a mesh of one or two dimensions, and no ranks in addition")
        table = grid.mesh.reshape(-1, grid.mesh.shape[-1]).tolist()
        return RankGrid(len(table), len(table[0])), table
    check_kind("grid", grid, RankGrid, "give a RankGrid(rows, columns) or a DeviceMesh")
    if ranks is None:
        return grid, [grid.row_ranks(row) for row in range(grid.rows)]
    if not isinstance(ranks, Sequence) or not all(isinstance(row, Sequence) for row in ranks):
        raise InputError(f"ranks is {shown(ranks)}; give {grid.rows} rows of {grid.columns} ranks, as [[0, 1], [2, 3]]")
    table = [list(row) for row in ranks]
    if len(table) != grid.rows or any(len(row) != grid.columns for row in table):
        raise InputError(f"ranks {table} do not fill grid {grid}; give {grid.rows} rows of {grid.columns}")
    return grid, table


def _check_placement(grid: RankGrid, ranks: list[list[int]], everyone: list[int] | None, me: int, ready: bool) -> None:
    """Raises InputError if the placement is invalid. everyone: the ranks that must all be placed; None for a mesh,
    which may be a slice of a larger one."""
    if not ready and grid.size > 1:
        raise InputError(f"grid {grid} needs a process group; call torch.distributed.init_process_group first")
    placed = sorted(rank for row in ranks for rank in row)
    if everyone is not None:
        grid.check_world(len(everyone))
        if placed != everyone:
            raise InputError(f"ranks {ranks} must name each of 0 to {everyone[-1]} once")
    elif me not in placed:
        raise InputError(f"this rank is not in the mesh of ranks {placed}; every rank needs a place in a mesh")
    # torch numbers a group's ranks in ascending order; a shard would land in the wrong column otherwise.
    if any(row != sorted(row) for row in ranks):
        raise InputError(f"ranks {ranks}: the ranks of a row must ascend; sort each row")


def _slices(members: list[int], everyone: list[int]) -> list[list[int]]:
    """Returns the members of every slice of the mesh. The list is the same on every rank, because all ranks must create
    all groups."""
    found: list[list[int]] = [[] for _ in everyone]
    dist.all_gather_object(found, members)
    slices = sorted({tuple(each) for each in found})
    if sorted(rank for each in slices for rank in each) != everyone:
        raise InputError(f"the meshes of the ranks overlap or leave ranks out: {slices}; give each rank one slice")
    return [list(each) for each in slices]


def cuda_uses_nccl() -> bool:
    """Whether NCCL carries the CUDA tensors of the default process group.

    `dist.get_backend()` does not tell: for a group with a backend per device it returns "cpu:gloo,cuda:nccl".
    """
    return "cuda:nccl" in dist.get_backend_config().split(",")


def _world_timeout() -> timedelta | None:
    """Returns the default group's timeout. With new_group's own half hour, a dead rank would be noticed late."""
    world = dist.group.WORLD
    assert world is not None
    backend = world._get_backend(torch.device("cuda" if cuda_uses_nccl() else "cpu"))
    return getattr(getattr(backend, "options", None), "_timeout", None)
