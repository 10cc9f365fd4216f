"""All-reduce four ways, in place: flat, hierarchical, 2D torus, hybrid. Free functions over a GridComm."""

from __future__ import annotations

import torch
from torch import Tensor

from hyperbatch.comm.grid import GridComm


class Handle:
    """A collective in flight. `wait()` makes its result visible to the caller; `done()` asks without blocking."""

    def wait(self) -> None:
        raise NotImplementedError


def all_reduce(
    tensor: Tensor,
    comm: GridComm,
    *,
    algorithm: str = "flat",
    op: str = "mean",
    wire_dtype: torch.dtype | None = None,
    async_op: bool = False,
) -> Handle | None:
    raise NotImplementedError


def reduce_scatter(output: Tensor, tensor: Tensor, comm: GridComm, *, op: str = "mean") -> None:
    raise NotImplementedError


def all_gather(output: Tensor, tensor: Tensor, comm: GridComm) -> None:
    raise NotImplementedError
