"""A model's weights and buffers to and from name -> tensor tables, and from rank 0 to all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch.arena import Arena
from hyperbatch.checkpoint import per_rank
from hyperbatch.engine.ranks import Ranks, host_group
from hyperbatch.errors import InputError
from hyperbatch.models.norm import merge_norm_statistics


def weights(model: nn.Module, arena: Arena) -> dict[str, Tensor]:
    """Parameters by name, on the CPU; fp32 masters where the working weights have 16 bits."""
    masters = arena.named_masters()
    return {
        name: masters.get(name, param).detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        for name, param in model.named_parameters()
    }


def load_weights(model: nn.Module, tensors: Mapping[str, Tensor], *, where: str, arena: Arena | None = None) -> None:
    """Fills parameters, their masters and, where given, buffers. InputError names what does not fit."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = [name for name, _ in model.named_parameters() if name not in tensors]
    unknown = [name for name in tensors if name not in own]
    other = [name for name in tensors if name in own and tensors[name].shape != own[name].shape]
    if missing or unknown or other:
        faults = (("missing", missing), ("unknown", unknown), ("of another shape", other))
        text = ", ".join(f"{len(names)} {what} (e.g. {names[0]})" for what, names in faults if names)
        raise InputError(f"weights in {where} do not fit the model: {text}")
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)
    if arena is not None:
        arena.load_masters(tensors)


def gather_buffers(model: nn.Module, ranks: Ranks) -> dict[str, Tensor]:
    """name -> tensor[world_size, ...] on the CPU of rank 0; the others' tables hold their own rank only.

    All floating buffers travel as one flat tensor, so a large world gathers one message per rank.
    """
    own = {name: buffer.detach().cpu() for name, buffer in model.named_buffers()}
    if ranks.world_size == 1 or not own:
        return {name: buffer[None] for name, buffer in own.items()}
    flat = torch.cat([buffer.double().reshape(-1) for buffer in own.values()])
    rows = [torch.empty_like(flat) for _ in range(ranks.world_size)] if ranks.rank == 0 else None
    dist.gather(flat, rows, dst=0, group=host_group())
    stacked = torch.stack(rows) if rows is not None else flat[None]
    parts = stacked.split([buffer.numel() for buffer in own.values()], dim=1)
    # fp32 values and counts below 2^53 survive the way through fp64 exactly.
    return {
        name: part.reshape(len(stacked), *buffer.shape).to(buffer.dtype)
        for (name, buffer), part in zip(own.items(), parts, strict=True)
    }


def load_buffers(model: nn.Module, stacked: Mapping[str, Tensor], ranks: Ranks) -> None:
    """Each rank its own statistics again; merged ones when the world size has changed."""
    rows = per_rank(stacked)
    row = rows[ranks.rank] if len(rows) == ranks.world_size else merge_norm_statistics(rows)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(row[name])


def broadcast_model(model: nn.Module, arena: Arena, ranks: Ranks) -> None:
    """Rank 0's weights and buffers on every rank: ranks that started apart would never agree again."""
    if ranks.world_size == 1:
        return
    with torch.no_grad():
        for flat in arena.flat_weights():
            dist.broadcast(flat, src=0)
        for buffer in model.buffers():
            dist.broadcast(buffer, src=0)
