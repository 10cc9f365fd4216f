"""The sharded update (Xu et al., 2020; Google's MLPerf entries): each rank updates its N-th of the weights.

gradients  --reduce-scatter-->  my shard  --update-->  my shard of the weights  --all-gather-->  weights
                                   |  |g|^2, |w|^2 of my part of every layer, inf?
                                   '--> one small all-reduce --> trust ratios, skip

Half of the all-reduce happens before the update and half after it, so the wire carries as much as ever (less, when the
weights are 16-bit and gradients are not), and each rank does an N-th of the update's work. Momentum and masters keep
their full size but are up to date in this rank's shard alone until `gather_state`: memory is not what is saved here.
"""

# pyright: reportPrivateImportUsage=false
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
from hyperbatch.errors import InputError
from hyperbatch.optim.base import Entry, LayerwiseOptimizer, capturing, norms_of, reconcile
from hyperbatch.optim.lars import LARS


class ShardedUpdate:
    """`step()` in the place of the optimizer's own; rates, loss scale, statistics and state stay the optimizer's.

        sync = GradSync(arena, plan, comm, sharded=True)
        optimizer = LARS(groups, lr, arena=arena)
        update = ShardedUpdate(optimizer, sync)
        ...
        sync.finish(); update.step()
        update.gather_state()              # on every rank, before state or masters are read: checkpoints

    Between `sync.finish()` and the next step `param.grad` holds the mean in this rank's shard only.
    """

    def __init__(self, optimizer: LayerwiseOptimizer, arena: Arena, sync: GradSync) -> None:
        if not isinstance(optimizer, LARS):
            raise InputError(
                f"the sharded update knows lars and sgd, not {type(optimizer).__name__.lower()}; "
                "leave --sharded-update out"
            )
        if optimizer._foreach is False:
            raise InputError("the sharded update has no reference path (foreach=False): it takes norms of whole layers")
        if not sync.sharded:
            raise InputError("ShardedUpdate needs GradSync(sharded=True): every gradient would arrive whole")
        self.optimizer, self._arena, self._sync, self._comm = optimizer, arena, sync, sync.comm
        self._number = {slot.name: i for i, slot in enumerate(arena.slots)}
        self._parts: list[tuple[int, int]] = [(0, 0)] * len(arena.slots)  # of each slot, in elements; mostly empty
        for index, group in enumerate(sync.plan.groups):
            start, stop = sync.shard(index)
            for name in group.parameters:
                slot = arena.slot(name)
                first = min(max(start - slot.offset, 0), slot.numel)
                self._parts[self._number[name]] = (first, min(max(stop - slot.offset, first), slot.numel))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """As the optimizer's: a step that met an inf or nan on any rank is skipped on all of them."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        optimizer = self.optimizer
        self._arena.settle()
        weight_norms = torch.zeros(len(self._arena.slots), dtype=torch.float64, device=self._arena.device)
        work = [(group, self._entries(names, weight_norms)) for group, names in self._named_groups()]
        entries = [entry for _, part in work for entry in part]
        if not entries:
            return loss
        self._heed_writes()
        grad_norms, found = self._measure(entries, weight_norms)
        optimizer._count(found)
        skip = None
        if found.device.type == "cpu":  # reading it costs nothing here
            if found.item():
                return loss
        else:
            skip = found > 0
        optimizer._stats = []
        for group, part in work:
            if part:
                norms = torch.stack([grad_norms[self._number[entry.name]] for entry in part])
                optimizer._stats.append(optimizer._keep(optimizer.update_group(group, part, norms, skip), skip))
        half = [entry for entry in entries if entry.weight is not entry.param]
        if half:
            torch._foreach_copy_([entry.param for entry in half], [entry.weight for entry in half])
        self._gather([self._group_slice(i, self._arena.weights) for i in range(len(self._sync.plan.groups))])
        return loss

    @torch.no_grad()
    def gather_state(self) -> None:
        """Momentum and masters become whole on every rank, which must all call it."""
        for index, group in enumerate(self._sync.plan.groups):
            slots = [self._arena.slot(name) for name in group.parameters]
            states = [self.optimizer.init_state(slot.param) for slot in slots]
            numel = slots[-1].end - slots[0].offset
            self._gather([_flat(views, 0, numel) for views in states[0].values()], index)

    def _measure(self, entries: list[Entry], weight_norms: Tensor) -> tuple[Tensor, Tensor]:
        """Norms of whole layers from everybody's parts: one message of two numbers a layer, and one more."""
        count = len(weight_norms)
        numbers = [self._number[entry.name] for entry in entries]
        table = torch.zeros(2 * count + 1, dtype=torch.float64, device=weight_norms.device)
        squares = torch.cat([norms_of([e.grad for e in entries]), norms_of([e.weight for e in entries])]).square()
        places = torch.tensor(numbers + [count + i for i in numbers], device=table.device)
        table.index_copy_(0, places, squares.to(table.dtype))
        told = self.optimizer.told_inf()
        if told is not None:
            table[-1] = (told != 0).double().reshape(())
        job = partial(all_reduce_now, table, self._comm, "flat", "sum")
        self._comm.submit(job, table.device).wait()
        weight_norms.copy_(table[count:-1].sqrt())
        found = (~torch.isfinite(table[:count]).all() | (table[-1] != 0)).float()
        return table[:count].sqrt(), found

    def _named_groups(self) -> list[tuple[dict[str, Any], list[tuple[str, Tensor]]]]:
        names = self.optimizer._arena_names
        return [(group, [(names[p], p) for p in group["params"]]) for group in self.optimizer.param_groups]

    def _entries(self, named: list[tuple[str, Tensor]], weight_norms: Tensor) -> list[Entry]:
        """This rank's part of every parameter that has a gradient; most are empty, so that all ranks see all layers."""
        entries = []
        for name, param in named:
            if param.grad is None:
                continue
            number = self._number[name]
            start, stop = self._parts[number]
            slot = self._arena.slots[number]
            state = self.optimizer.init_state(param)
            working = self._part(self._arena.weights, slot, start, stop)
            master = _flat(state["master"], start, stop) if "master" in state else working
            grad = self._part(self._arena.grads, slot, start, stop)
            buffers = tuple(_flat(state[key], start, stop) for key in self.optimizer.state_names)
            entries.append(Entry(name, working, master, grad, buffers, weight_norms[number]))
        return entries

    def _heed_writes(self) -> None:
        """16-bit weights that somebody else wrote win over their masters, as in the optimizer's own step."""
        weights, masters = self._arena.weights.get(self._arena.dtype), self._arena.masters
        if weights is None or masters is None or capturing(weights.device):
            return
        for index, group in enumerate(self._sync.plan.groups):
            if self._arena.slot(group.parameters[0]).dtype == weights.dtype:
                mine = slice(*self._sync.shard(index))
                reconcile(weights[mine], masters[mine])

    def _gather(self, slices: list[Tensor], index: int | None = None) -> None:
        """index: the group they all belong to; None: slice i belongs to group i."""
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
    """Elements [start, stop) from a parameter's first on, in memory order; beyond it come its arena neighbours."""
    return view.as_strided((stop - start,), (1,), view.storage_offset() + start)
