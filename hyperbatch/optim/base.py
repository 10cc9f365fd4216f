"""What LARS and LAMB share: fp32 masters, arena storage, loss scaling, skipped steps, readable layer norms.

param (16 or 32 bit) --grad--> [ norms | inf? ] --> update of master and state in fp32 --> param
                                    |
                 found_inf (on the device) --> LossScaler.update(), skipped_steps
"""

# pyright: reportPrivateImportUsage=false
# torch._foreach_* is the multi-tensor interface that torch.optim itself is written in.
from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hyperbatch import vocabulary

if TYPE_CHECKING:
    from hyperbatch.arena import Arena

Scalar = float | Tensor  # a Tensor stays on the device: capturable rates, loss scales
HALF_DTYPES = tuple(getattr(torch, name) for name in vocabulary.HALF_DTYPES)


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter with a gradient: what a step reads and writes."""

    name: str
    param: Tensor
    weight: Tensor  # full precision: the parameter itself, or its fp32 master
    grad: Tensor  # as backward left it: perhaps 16-bit, perhaps loss-scaled
    state: tuple[Tensor, ...]
    weight_norm: Tensor | None = None  # |w| of the whole layer, where the tensors above are one rank's part of it


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Norms of one step, one element per layer, still on the device."""

    names: list[str]
    weight_norms: Tensor
    grad_norms: Tensor
    trust: Tensor


class LayerwiseOptimizer(torch.optim.Optimizer, ABC):
    """Subclasses name their state, check a group and update one."""

    state_names: tuple[str, ...] = ()  # tensors per parameter
    group_state_names: tuple[str, ...] = ()  # numbers per group
    # torch's GradScaler then hands over the two attributes below and asks the host nothing. They have no value here:
    # GradScaler multiplies its scale into one that is there, and deletes both after the step.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None  # what the gradients were multiplied by
    found_inf: Tensor | None  # not 0: somebody saw an inf or nan already

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        arena: Arena | None,
        capturable: bool,
        foreach: bool | None,
        fused: bool | None,
    ) -> None:
        if foreach and fused:
            raise ValueError("foreach and fused cannot both be True")
        self._setup(arena, capturable, foreach, fused)
        super().__init__(params, defaults)
        if arena is not None:
            arena.call_on_load(self.refresh)

    def _setup(self, arena: Arena | None, capturable: bool, foreach: bool | None, fused: bool | None) -> None:
        self.arena = arena
        self._capturable, self._foreach, self._fused = capturable, foreach, fused
        self._arena_names: dict[Tensor, str] = {} if arena is None else {slot.param: slot.name for slot in arena.slots}
        self._arena_state = [] if arena is None else [arena.views(arena.new_buffers()) for _ in self.state_names]
        self._versions: dict[Tensor, int] = {}  # of parameters with a master, after our own last write
        self._stats: list[LayerStats] = []
        self.last_found_inf: Tensor | None = None  # 1 when the last step was skipped; a device tensor
        self.skipped_steps: Tensor | None = None  # how many were; a device tensor

    def __setstate__(self, state: dict[str, Any]) -> None:
        if "_versions" not in self.__dict__:  # unpickled or deep-copied: an optimizer of ordinary parameters
            self._setup(None, state["defaults"]["capturable"], None, None)
        super().__setstate__(state)

    # --- groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # Not through torch's wrapper: it imports what torch.compile needs, which takes seconds.
        plain = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
        plain(self, param_group)
        group = self.param_groups[-1]
        try:
            self._check(group)
        except ValueError:
            self.param_groups.pop()
            raise
        # Before a schedule scales it: set_rate multiplies this one.
        group.setdefault("base_weight_decay", float(group["weight_decay"]))
        if self._capturable:
            self._to_device(group)

    def _check(self, group: dict[str, Any]) -> None:
        # Values on the device are not read here: that would synchronise.
        for name in ("lr", "weight_decay", "eps"):
            if is_number(group[name]) and not group[name] >= 0.0:
                raise ValueError(f"{name} must not be negative, but is {group[name]}")
        for param in group["params"]:
            if not param.is_floating_point():
                raise ValueError(f"params must be real floating-point tensors, not {param.dtype}")
        self.check_group(group)

    @abstractmethod
    def check_group(self, group: dict[str, Any]) -> None:
        """Raises ValueError naming the setting that is wrong."""

    def _to_device(self, group: dict[str, Any]) -> None:
        """A captured graph must read its rates from device memory, or it would replay the captured ones."""
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for name in ("lr", "weight_decay", *self.group_state_names):
            group[name] = torch.as_tensor(group[name], dtype=torch.float32, device=device)

    def group_names(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Each group with its parameters' names: its own, the arena's, or group.index."""
        for index, group in enumerate(self.param_groups):
            given = group.get("param_names")
            yield (
                group,
                [
                    given[i] if given else self._arena_names.get(param, f"{index}.{i}")
                    for i, param in enumerate(group["params"])
                ],
            )

    # --- a step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.arena is not None:
            self.arena.settle()
        if self.step_fused():
            return loss
        work = [(group, self._entries(group, names)) for group, names in self.group_names()]
        entries = [entry for _, part in work for entry in part]
        if not entries:
            return loss
        for entry in entries:
            if entry.weight is not entry.param and self._versions.get(entry.param) != entry.param._version:
                reconcile(entry.param, entry.weight)
        grad_norms, found = self._measure(entries)
        self._count(found)
        skip = None
        if found.device.type == "cpu":  # reading it costs nothing here
            if found.item():
                return loss
        else:
            skip = found > 0
        self._stats, done = [], 0
        for group, part in work:
            if part:
                self._stats.append(self.update_group(group, part, grad_norms[done : done + len(part)], skip))
                done += len(part)
        self._write_back(entries)
        return loss

    @abstractmethod
    def update_group(
        self, group: dict[str, Any], entries: list[Entry], grad_norms: Tensor, skip: Tensor | None
    ) -> LayerStats:
        """grad_norms: of the gradients as they are, one per entry. skip: None when the host knows the step is good."""

    def step_fused(self) -> bool:
        """Does the whole step, where there are kernels for it, and says so."""
        return False

    def _entries(self, group: dict[str, Any], names: list[str]) -> list[Entry]:
        entries = []
        for name, param in zip(names, group["params"], strict=True):
            if param.grad is None:
                continue
            if param.grad.is_sparse:
                raise ValueError(f"grad of {name} is sparse; {type(self).__name__} needs dense gradients")
            state = self.init_state(param)
            master = state.get("master")
            weight = param if master is None else master
            entries.append(Entry(name, param, weight, param.grad, tuple(state[key] for key in self.state_names)))
        return entries

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """The parameter's state, in fp32 or wider, made on first use: in the arena, or beside the parameter.

        16-bit parameters have a `master`; so have those with gaps or overlaps in memory, since kernels want none.
        """
        state = self.state[param]
        if state:
            return state
        name = self._arena_names.get(param)
        if self.arena is not None and name is not None:
            state.update((key, views[name]) for key, views in zip(self.state_names, self._arena_state, strict=True))
            if param.dtype in HALF_DTYPES:
                state["master"] = self.arena.named_masters()[name]
            return state
        wide = torch.promote_types(param.dtype, torch.float32)
        state.update((key, torch.zeros_like(param, dtype=wide)) for key in self.state_names)
        if param.dtype in HALF_DTYPES or not is_dense(param):
            state["master"] = torch.empty_like(param, dtype=wide).copy_(param)
        return state

    def _measure(self, entries: list[Entry]) -> tuple[Tensor, Tensor]:
        """Norms of the gradients as they are, and 1 when any holds inf or nan, else 0: both on the device."""
        norms = norms_of([entry.grad for entry in entries])
        found = (~torch.isfinite(norms).all()).float()
        told = self.told_inf()
        if told is not None:
            found = torch.maximum(found, (told != 0).float().reshape(()))
        return norms, found

    def scale_of_grads(self) -> Tensor | None:
        return getattr(self, "grad_scale", None)

    def told_inf(self) -> Tensor | None:
        return getattr(self, "found_inf", None)

    def _count(self, found: Tensor) -> None:
        self.last_found_inf = found
        self.skipped_steps = found.clone() if self.skipped_steps is None else self.skipped_steps.add_(found)

    def _write_back(self, entries: list[Entry]) -> None:
        half = [entry for entry in entries if entry.weight is not entry.param]
        if half:
            torch._foreach_copy_([entry.param for entry in half], [entry.weight for entry in half])
        for entry in half:
            self._versions[entry.param] = entry.param._version

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.arena is not None:
            self.arena.zero_grad()

    def refresh(self) -> None:
        """After weights were changed from outside, or the arena was laid out anew: follows it there."""
        if self.arena is None:
            return
        if any(views[name].device != self.arena.device for views in self._arena_state for name in views):
            fresh = [self.arena.views(self.arena.new_buffers()) for _ in self.state_names]
            for new, old in zip(fresh, self._arena_state, strict=True):
                for name, view in new.items():
                    view.copy_(old[name])
            self._arena_state = fresh
        masters = self.arena.named_masters()
        for param, name in self._arena_names.items():
            if param in self.state:
                state = self.state[param]
                state.update((key, views[name]) for key, views in zip(self.state_names, self._arena_state, strict=True))
                if name in masters:
                    state["master"] = masters[name]

    # --- reading and saving -------------------------------------------------------------------------------------

    def layer_stats(self) -> list[LayerStats]:
        """Norms and trust ratios of the last step that was not skipped, on the device: no synchronisation."""
        return self._stats

    def layer_norms(self) -> dict[str, tuple[float, float, float]]:
        """name -> (|w|, |g|, trust) of the last step. Synchronises: the values go to the host."""
        rows = {}
        for stats in self.layer_stats():
            columns = torch.stack([stats.weight_norms, stats.grad_norms, stats.trust]).double().tolist()
            rows.update(zip(stats.names, zip(*columns, strict=True), strict=True))
        return rows

    def trust_ratios(self) -> dict[str, float]:
        """Last step's trust ratio of each adapted parameter, by name where param groups carry names. Synchronises."""
        adapted = {name for group, names in self.group_names() if group.get("adapt", True) for name in names}
        return {name: trust for name, (_, _, trust) in self.layer_norms().items() if name in adapted}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As torch's, but fp32 state stays fp32 beside 16-bit weights (torch casts it), and stays in the arena."""
        live, state = [dict(group) for group in self.param_groups], dict(self.state)
        super().load_state_dict(state_dict)
        order = [param for group in self.param_groups for param in group["params"]]
        saved_order = [index for group in state_dict["param_groups"] for index in group["params"]]
        self.state.clear()
        self.state.update(state)  # filled in place: the arena, kernels' tables and captured graphs point there
        with torch.no_grad():
            for param, index in zip(order, saved_order, strict=True):
                saved = state_dict["state"].get(index, {})
                if not saved and param not in self.state:
                    continue
                for key, value in self.init_state(param).items():
                    if key in saved:
                        value.copy_(saved[key])
                    elif key in self.state_names:
                        value.zero_()
        for group, before in zip(self.param_groups, live, strict=True):
            for name in ("lr", "weight_decay", *self.group_state_names):
                loaded = group[name]
                if isinstance(before[name], Tensor):  # a captured graph reads this very tensor
                    group[name] = before[name]
                    put(group, name, loaded)
        self._versions.clear()
        self.refresh()


def is_number(value: Any) -> bool:
    return not isinstance(value, Tensor)


@torch.no_grad()
def reconcile(param: Tensor, master: Tensor) -> None:
    """A weight that somebody else wrote wins over its master, except where it is just the master rounded."""
    same = master.to(param.dtype) == param
    master.copy_(torch.where(same, master, param.to(master.dtype)))


def norms_of(tensors: list[Tensor]) -> Tensor:
    """|tensor| of each, in fp64: a long fp32 sum of squares loses digits (4e-5 over 2 million elements on a CPU)."""
    if tensors[0].device.type == "cpu":
        return torch.stack([_cpu_norm(tensor) for tensor in tensors])
    return torch.stack(list(torch._foreach_norm(tensors, 2, torch.float64)))


def _cpu_norm(tensor: Tensor) -> Tensor:
    """fp64 over fp32 norms of short rows: as exact as converting every element, and seven times as fast."""
    row, n = 4096, tensor.numel()
    if tensor.dtype != torch.float32 or n < 2 * row or not is_dense(tensor):
        return torch.linalg.vector_norm(tensor, dtype=torch.float64)
    flat = tensor.as_strided((n,), (1,))
    whole = n // row * row
    rows = torch.linalg.vector_norm(flat[:whole].view(-1, row), dim=1)
    return torch.linalg.vector_norm(torch.cat([rows, flat[whole:]]), dtype=torch.float64)


def on_device(value: Scalar, device: torch.device) -> Tensor:
    """A number as a tensor: full() is filled on the device, where tensor() would be copied there and waited for."""
    return value if isinstance(value, Tensor) else torch.full((), value, dtype=torch.float64, device=device)


def unless(skip: Tensor, value: Scalar, otherwise: float) -> Tensor:
    """`value`, or `otherwise` on a skipped step."""
    return torch.where(skip, otherwise, on_device(value, skip.device))


def put(group: dict[str, Any], name: str, value: Scalar) -> None:
    """Sets a group's number; one that lives on the device is written in place, as captured graphs expect."""
    old = group[name]
    if isinstance(old, Tensor):
        old.copy_(value) if isinstance(value, Tensor) else old.fill_(value)
    else:
        group[name] = value.clone() if isinstance(value, Tensor) else value


def is_dense(tensor: Tensor) -> bool:
    """Without gaps or overlaps in memory, in whatever order of dimensions."""
    return torch.empty_like(tensor, device="meta").stride() == tensor.stride()
