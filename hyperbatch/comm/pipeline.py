"""The torus all-reduce in chunks, on CPUs, so that work inside a node overlaps with messages between nodes.

chunk 0   [cast, rows][====== columns ======][rows, cast]
chunk 1              [cast, rows]    [====== columns ======][rows, cast]
chunk 2                               [cast, rows]   [====== columns ======][rows, cast]

The links between nodes (columns) are slow. They always carry two chunks, while the previous chunk is gathered in its
row, and the next one is cast, exchanged and summed. On GPUs the phases follow each other on one stream.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.comm import shards
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.phases import Log, PhaseMarks
from hyperbatch.comm.scaling import scale, scaled_copy
from hyperbatch.comm.shards import shard_bounds, sum_parts
from hyperbatch.stopwatch import Mark, mark

CHUNK_BYTES = 2 << 20  # on the wire; smaller chunks need more messages, larger ones overlap less
_LIVE = 4  # most chunks that are between `scatter` and `land`


def pipelines(flat: Tensor, comm: GridComm, wire_dtype: torch.dtype) -> bool:
    both = comm.row is not None and comm.column is not None
    return both and not flat.is_cuda and flat.numel() * wire_dtype.itemsize >= 2 * CHUNK_BYTES


def torus_in_chunks(flat: Tensor, comm: GridComm, op: str, wire_dtype: torch.dtype, log: Log = None) -> None:
    """All-reduces `flat` in place. The sums are the same as those of the torus without chunks."""
    count = flat.numel() * wire_dtype.itemsize // CHUNK_BYTES
    size = flat.numel() // count // comm.grid.columns * comm.grid.columns
    chunks: list[_Chunk] = []
    for i in range(count + 3):
        if i < count:
            whole = flat[i * size : flat.numel() if i == count - 1 else (i + 1) * size]
            chunks.append(_Chunk(whole, i, comm, op, wire_dtype, log))
            chunks[i].scatter()
        if 0 <= i - 1 < count:
            chunks[i - 1].reduce()
        if 0 <= i - 2 < count:
            chunks[i - 2].gather()
        if 0 <= i - 3 < count:
            chunks[i - 3].land()


class _Chunk:
    """One chunk in flight. Each call waits for the phase that the previous call started, and starts the next one."""

    def __init__(self, target: Tensor, number: int, comm: GridComm, op: str, wire_dtype: torch.dtype, log: Log) -> None:
        self.target, self.comm, self.op, self.log = target, comm, op, log
        numel, self.parts = target.numel(), comm.grid.columns
        self.wire = target
        if wire_dtype != target.dtype:
            self.wire = comm.scratch(f"wire {number % _LIVE}", numel, wire_dtype, target.device)
        self.each = numel // self.parts
        self.body, self.tail = self.wire[: self.each * self.parts], self.wire[self.each * self.parts :]
        # Two buffers are in use at once: one is being received, and the other is being summed.
        self.received = comm.scratch(f"received {number % 2}", self.body.numel(), wire_dtype, target.device)
        start, stop = shard_bounds(numel, self.parts, comm.column_index)
        self.shard = self.wire[start:stop]
        self.began: Mark = 0.0
        self.work: Any = None

    def scatter(self) -> None:
        start = mark(self.target.device)
        if self.wire is self.target:
            scale(self.wire, self.comm.size, self.op)
        else:
            scaled_copy(self.wire, self.target, self.comm.size, self.op)
            self._book("cast", start)
        self._begin(dist.all_to_all_single(self.received, self.body, group=self.comm.row, async_op=True))

    def reduce(self) -> None:
        self._wait()
        sum_parts(self.received.view(self.parts, self.each), self.shard[: self.each])
        if self.tail.numel():
            dist.reduce(self.tail, group=self.comm.row, group_dst=self.parts - 1)
        self._book("row reduce-scatter", self.began)
        self._begin(dist.all_reduce(self.shard, group=self.comm.column, async_op=True))

    def gather(self) -> None:
        self._wait()
        self._book("column all-reduce", self.began)
        mine = self.shard[: self.each]
        self._begin(shards.all_gather(self.body, mine, group=self.comm.row, async_op=True))

    def land(self) -> None:
        self._wait()
        if self.tail.numel():
            dist.broadcast(self.tail, group=self.comm.row, group_src=self.parts - 1)
        self._book("row all-gather", self.began)
        if self.wire is not self.target:
            start = mark(self.target.device)
            self.target.copy_(self.wire)
            self._book("cast", start)

    def _begin(self, work: Any) -> None:
        self.work, self.began = work, mark(self.target.device)

    def _wait(self) -> None:
        self.work.wait()
        self.work = None

    def _book(self, name: str, start: Mark) -> None:
        if self.log is not None:
            nbytes = self.shard.nbytes if name.startswith("column") else self.wire.nbytes
            self.log.append(PhaseMarks(name, nbytes, start, mark(self.target.device)))
