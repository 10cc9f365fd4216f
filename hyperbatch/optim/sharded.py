"""The sharded update (Xu et al., 2020; Google's MLPerf entries): each of N ranks updates 1/N of the weights.

gradients  --reduce-scatter-->  my shard  --update-->  my shard of the weights  --all-gather-->  weights
                                   |  |g|^2, |w|^2 of my part of every layer, inf?
                                   '--> one small all-reduce --> trust ratios, skip    (LAMB: another of |direction|^2)

Half of the all-reduce happens before the update and half after it, so as many bytes are sent as without sharding (fewer
if weights are 16-bit and gradients are not), and each rank does 1/N of the update's work. Momentum and masters keep
their full size, but are current only in this rank's shard until `gather_state`. This saves time, not memory.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hyperbatch.arena import Arena, Slot
from hyperbatch.comm.collectives import all_reduce_now
from hyperbatch.comm.shards import gather_now
from hyperbatch.comm.sync import GradSync
from hyperbatch.errors import InputError, check_kind
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.rule import Entry
from hyperbatch.optim.tensors import adopt_writes, capturing, norms_of


class ShardedUpdate:
    """Replaces the optimizer's `step()`; the optimizer keeps the rates, the loss scale, the statistics and the state.

        sync = GradSync(arena, plan, comm, sharded=True)
        optimizer = LARS(groups, lr, arena=arena)
        update = ShardedUpdate(optimizer, arena, sync)
        ...
        sync.finish(); update.step()
        update.gather_state()              # on every rank, before state or masters are read, e.g. for a checkpoint

    Between `sync.finish()` and the next step, `param.grad` holds the mean over ranks only in this rank's shard.
    """

    def __init__(self, optimizer: LayerwiseOptimizer, arena: Arena, sync: GradSync) -> None:
        check_kind("optimizer", optimizer, LayerwiseOptimizer, "give one of hyperbatch")
        check_kind("sync", sync, GradSync, "give a GradSync(sharded=True)")
        if optimizer.arena is not arena:
            raise InputError(
                f"ShardedUpdate needs the optimizer's state in the arena; give arena=... to {type(optimizer).__name__}"
            )
        if not optimizer.rule.shardable:
            raise InputError(
                f"the sharded update supports sgd, lars, lamb and adamw, not {optimizer.rule.name}; call "
                "optimizer.share(comm)"
            )
        if optimizer.foreach is False:
            raise InputError("the sharded update has no reference path (foreach=False): it takes norms of whole layers")
        if not sync.sharded:
            raise InputError(
                "ShardedUpdate needs GradSync(sharded=True): otherwise every rank receives the whole gradient"
            )
        self.optimizer, self._arena, self._sync, self._comm = optimizer, arena, sync, sync.comm
        self._number: dict[Tensor, int] = {slot.param: i for i, slot in enumerate(arena.slots)}
        self._parts: list[tuple[int, int]] = [(0, 0)] * len(arena.slots)  # [start, stop) within each slot, mostly empty
        for index, group in enumerate(sync.plan.groups):
            start, stop = sync.shard(index)
            for name in group.parameters:
                slot = arena.slot(name)
                first = min(max(start - slot.offset, 0), slot.numel)
                self._parts[self._number[slot.param]] = (first, min(max(stop - slot.offset, first), slot.numel))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Like the optimizer's step. If any rank finds an inf or nan, the step is skipped on all ranks."""
        # torch's schedulers warn if no step came before theirs.
        self.optimizer._opt_called = True  # pyright: ignore[reportAttributeAccessIssue]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._arena.reclaim()
        weight_norms = torch.zeros(len(self._arena.slots), dtype=torch.float64, device=self._arena.device)
        entries: dict[int, Entry] = {}
        work = []
        for group in self.optimizer.param_groups:
            used = [self._number[param] for param in group["params"] if param.grad is not None]
            entries.update((i, self._entry(i, weight_norms[i])) for i in used)
            work.append((group, [entries[i] for i in used]))
        if not entries:
            return loss
        self._adopt_writes()
        grad_norms, found = self._measure(entries, weight_norms)
        if self.optimizer.apply_update(work, torch.stack([grad_norms[i] for i in entries]), found):
            self._gather([self._group_slice(i, self._arena.weights) for i in range(len(self._sync.plan.groups))])
        return loss

    @torch.no_grad()
    def gather_state(self) -> None:
        """Completes momentum and masters on every rank, e.g. before a checkpoint. All ranks must call it."""
        for index, group in enumerate(self._sync.plan.groups):
            slots = [self._arena.slot(name) for name in group.parameters]
            states = [self.optimizer.init_state(slot.param) for slot in slots]
            numel = slots[-1].end - slots[0].offset
            self._gather([_flat(views, 0, numel) for views in states[0].values()], index)

    def _measure(self, entries: dict[int, Entry], weight_norms: Tensor) -> tuple[Tensor, Tensor]:
        """Computes whole layers' norms from all ranks' parts, in one message: two numbers per slot and a flag for inf.

        Slots without a gradient send zeros, so the message has the same layout on every rank. Everything happens on
        the device, so that a graph can capture it.
        """
        count = len(weight_norms)
        nothing = [self._arena.grads[slot.dtype][:0] for slot in self._arena.slots]
        grads = [entries[i].grad if i in entries else nothing[i] for i in range(count)]
        weights = [entries[i].weight if i in entries else nothing[i] for i in range(count)]
        norms = torch.cat([norms_of(grads), norms_of(weights)])
        told = self.optimizer.told_inf()
        flag = torch.zeros_like(norms[:1]) if told is None else (told != 0).to(norms.dtype).reshape(1)
        table = torch.cat([norms.square(), flag])
        self._sum_over_ranks(table)
        weight_norms.copy_(table[count:-1].sqrt())
        found = (~torch.isfinite(table[:count]).all() | (table[-1] != 0)).float()
        return table[:count].sqrt(), found

    def _sum_over_ranks(self, table: Tensor) -> Tensor:
        job = partial(all_reduce_now, table, self._comm, "flat", "sum")
        self._comm.submit(job, table.device).wait()
        return table

    def _entry(self, number: int, weight_norm: Tensor) -> Entry:
        """This rank's part of a parameter. Many parts are empty, but every rank has an entry for every layer."""
        slot, (start, stop) = self._arena.slots[number], self._parts[number]
        state = self.optimizer.init_state(slot.param)
        working = self._part(self._arena.weights, slot, start, stop)
        master = _flat(state["master"], start, stop) if "master" in state else working
        grad = self._part(self._arena.grads, slot, start, stop)
        buffers = tuple(_flat(state[key], start, stop) for key in self.optimizer.state_names)
        return Entry(slot.name, working, master, grad, buffers, weight_norm, sum_over_ranks=self._sum_over_ranks)

    def _adopt_writes(self) -> None:
        """Copies 16-bit weights that other code wrote into their masters, as the optimizer's own step does."""
        weights, masters = self._arena.weights.get(self._arena.dtype), self._arena.masters
        if weights is None or masters is None or capturing(weights.device):
            return
        for index, group in enumerate(self._sync.plan.groups):
            if self._arena.slot(group.parameters[0]).dtype == weights.dtype:
                mine = slice(*self._sync.shard(index))
                adopt_writes(weights[mine], masters[mine])

    def _gather(self, slices: list[Tensor], index: int | None = None) -> None:
        """Gathers the ranks' shards of each slice.

        index: the group that all slices belong to; None means that slice i belongs to group i.
        """
        handles = []
        for i, flat in enumerate(slices):
            algorithm = self._sync.algorithm(i if index is None else index)
            handles.append(self._comm.submit(partial(gather_now, flat, self._comm, algorithm), flat.device))
        for handle in handles:
            handle.wait()

    def _group_slice(self, index: int, buffers: dict[torch.dtype, Tensor]) -> Tensor:
        return self._arena.slice_of(self._sync.plan.groups[index].parameters, buffers)

    @staticmethod
    def _part(buffers: dict[torch.dtype, Tensor], slot: Slot, start: int, stop: int) -> Tensor:
        return buffers[slot.dtype][slot.offset + start : slot.offset + stop]


def _flat(view: Tensor, start: int, stop: int) -> Tensor:
    """Elements [start, stop), counted from the parameter's first in memory. They may reach into its neighbours."""
    return view.as_strided((stop - start,), (1,), view.storage_offset() + start)
