"""Parameters that are sharded over ranks: the DTensors of FSDP2's `fully_shard` and of tensor parallelism.

Each rank updates its own part in place. Squared norms of a whole layer are summed over the mesh dimensions that shard
it, and the check for inf or nan combines all mesh dimensions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from hyperbatch.params import is_dtensor


class Spread(NamedTuple):
    """The process groups over which the values of a sharded layer are combined."""

    shards: tuple[Any, ...]  # one per mesh dimension that shards the layer
    ranks: tuple[Any, ...]  # one per mesh dimension


def local(tensor: Any) -> Tensor:
    """This rank's part of a DTensor, in the same memory. Other tensors are returned unchanged."""
    return tensor.to_local() if is_dtensor(tensor) else tensor


def local_grad(param: Any) -> Tensor:
    grad = param.grad
    if is_dtensor(grad) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local(grad)


def spread_of(param: Any) -> Spread | None:
    if not is_dtensor(param):
        return None
    ranks = tuple(param.device_mesh.get_group(dim) for dim in range(param.device_mesh.ndim))
    shards = (group for group, place in zip(ranks, param.placements, strict=True) if not place.is_replicate())
    return Spread(tuple(shards), ranks)


def whole_norms(norms: Tensor, spreads: Iterable[Spread | None]) -> Tensor:
    """Computes norms of whole layers from each rank's norms of its parts, with one message per set of groups."""
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, spread in enumerate(spreads):
        if spread is not None and spread.shards:
            alike.setdefault(spread.shards, []).append(i)
    if not alike:
        return norms
    rows = list(norms.unbind())
    for groups, places in alike.items():
        squares = torch.stack([rows[i] for i in places]).square()
        for group in groups:
            dist.all_reduce(squares, group=group)
        for i, norm in zip(places, squares.sqrt().unbind(), strict=True):
            rows[i] = norm
    return torch.stack(rows)


def agreed(found: Tensor, spreads: Iterable[Spread | None]) -> Tensor:
    """The maximum of `found` over the layers' meshes: it becomes 1 on every rank if it is 1 on any of them."""
    for group in dict.fromkeys(group for spread in spreads if spread is not None for group in spread.ranks):
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found
