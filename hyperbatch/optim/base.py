"""The parts that all update rules share: fp32 masters, arena storage, loss scaling, skipped steps, layer statistics.

param (16 or 32 bit) --grad--> [ norms | inf? ] --> update of master and state in fp32 --> param
                                    |
                 found_inf (on the device) --> LossScaler.update(), skipped_steps
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from hyperbatch.arena import Arena
from hyperbatch.errors import InputError, check_kind
from hyperbatch.optim.dtensor import agreed, local, local_grad, spread_of
from hyperbatch.optim.loading import load
from hyperbatch.optim.naming import mix_names, names_of, tell_apart, title
from hyperbatch.optim.rule import Entry, Rule, norms_of_layers
from hyperbatch.optim.tensors import (
    adopt_writes,
    capturing,
    check_keys,
    check_setting,
    is_dense,
    on_device,
    read_is_free,
    scalar,
    why_not_fused,
    write_setting,
)
from hyperbatch.params import HALF_DTYPES, is_dtensor

if TYPE_CHECKING:
    from hyperbatch.optim.fused import FusedStep
    from hyperbatch.optim.shares import MatrixShares

Work = list[tuple[dict[str, Any], list[Entry]]]  # each group with its parameters that have a gradient


@dataclass(frozen=True, slots=True)
class LayerStats:
    """Norms of one step, one element per layer, still on the device."""

    names: list[str]
    weight_norms: Tensor
    grad_norms: Tensor
    trust: Tensor


class LayerwiseOptimizer(torch.optim.Optimizer):
    """A torch optimizer around a `Rule`. Each subclass sets the rule and takes the rule's settings as arguments."""

    rule: Rule
    shares: MatrixShares | None = None  # how the ranks share Muon's work; None if they do not
    state_names: ClassVar[tuple[str, ...]]  # names of the rule's state tensors
    group_state_names: ClassVar[tuple[str, ...]]
    # With this flag, torch's GradScaler sets the two attributes below and does not synchronise. They have no value
    # here, because GradScaler multiplies its scale into an existing value, and it deletes both after the step.
    _step_supports_amp_scaling = True
    grad_scale: Tensor | None  # the factor by which the gradients were multiplied
    found_inf: Tensor | None  # not 0 if GradScaler has already found an inf or nan
    _loaded: dict[str, Any] | None = None  # the state dict that is being loaded
    _fused_step: FusedStep | None = None  # the rule's kernels with their tables; None before the first step

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        cls.state_names, cls.group_state_names = cls.rule.state_names, cls.rule.group_state_names

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
        scalar(defaults["lr"], "lr")  # before anything else, as in torch
        if arena is not None:
            check_kind("arena", arena, Arena, "give the Arena of the model")
        self._setup(arena, capturable, foreach, fused)
        super().__init__(params, defaults)
        if arena is not None:
            if not any(param in self._arena_names for group in self.param_groups for param in group["params"]):
                raise InputError("arena holds none of the parameters; give the Arena of the same model")
            arena.call_on_load(self.refresh)

    def _setup(self, arena: Arena | None, capturable: bool, foreach: bool | None, fused: bool | None) -> None:
        self.arena = arena
        self._capturable, self.foreach, self.fused = capturable, foreach, fused
        self._arena_names: dict[Tensor, str] = {} if arena is None else {slot.param: slot.name for slot in arena.slots}
        self._arena_state = [] if arena is None else [arena.views(arena.new_buffers()) for _ in self.state_names]
        self._arena_masters = {} if arena is None else arena.named_masters()
        self._stats: list[LayerStats] = []  # views into `_stats_tables`
        # By layer names: the table of the last step, and those of captured steps, whose replays write to them.
        self._stats_tables: dict[tuple[str, ...], Tensor] = {}
        self._captured_tables: set[tuple[str, ...]] = set()
        self.last_found_inf: Tensor | None = None  # 1 when the last step was skipped; a device tensor
        self.skipped_steps: Tensor | None = None  # the number of skipped steps; a device tensor

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_foreach": self.foreach, "_fused": self.fused}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if self._loaded is not None:
            load(self, state["param_groups"], self._loaded)
            return
        if "defaults" in state:  # this optimizer was unpickled or deep-copied, and has no arena
            self._setup(None, state["defaults"]["capturable"], state.get("_foreach"), state.get("_fused"))
        super().__setstate__(state)

    # --- groups -------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        # torch's wrapper is avoided because it imports what torch.compile needs, which takes seconds.
        plain = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", torch.optim.Optimizer.add_param_group)
        mix_names(self, param_group)
        plain(self, param_group)
        tell_apart(self.param_groups)
        group = self.param_groups[-1]
        try:
            check_keys(group, self.defaults)
            self.check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise
        self._fused_step = None  # it is built again at the next step, for all groups
        if self.fused and (reason := self.why_not_fused()):
            self.param_groups.pop()
            raise ValueError(f"fused=True, but {reason}")
        # The decay before a schedule scales it; `set_rate` multiplies this value.
        group.setdefault("base_weight_decay", float(group["weight_decay"]))
        if self._capturable:
            self._to_device(group)

    def check_group(self, group: dict[str, Any]) -> None:
        if group["lr"] is None:
            raise ValueError(f"lr is missing: give {type(self).__name__} an lr, or put one into every param group")
        settings = self.rule.read(group)
        for field in fields(settings):
            check_setting(field.name, getattr(settings, field.name), field.type)
        for param in group["params"]:
            if not param.is_floating_point():
                raise ValueError(
                    f"params must be real floating-point tensors, but {title(self, param)} is {param.dtype}"
                )
            if is_dtensor(param) and self.foreach is False:
                raise ValueError("foreach=False takes norms of whole tensors; leave it out for DTensor parameters")
        settings.check()

    def _to_device(self, group: dict[str, Any]) -> None:
        """Moves rates to the device. A captured graph must read them there, or it would replay the old values."""
        device = group["params"][0].device if group["params"] else torch.device("cpu")
        for name in ("lr", "weight_decay", *self.group_state_names):
            group[name] = torch.as_tensor(group[name], dtype=torch.float32, device=device)

    def group_names(self) -> Iterator[tuple[dict[str, Any], list[str]]]:
        """Yields each group with the names of its parameters: the group's own, the arena's, or `group.index`."""
        for index, group in enumerate(self.param_groups):
            yield group, names_of(self, index, group)

    def arena_name(self, param: Tensor) -> str | None:
        return self._arena_names.get(param)

    # --- a step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self.arena is not None:
            if self.arena.holds_shards:
                raise RuntimeError(
                    "GradSync(sharded=True) leaves this rank only a part of each gradient; replace optimizer.step() by "
                    "that of ShardedUpdate(optimizer, arena, sync)"
                )
            self.arena.reclaim()
        if self.step_fused():
            return loss
        work = [(group, self._entries(group, names)) for group, names in self.group_names()]
        entries = [entry for _, part in work for entry in part]
        if not entries:
            return loss
        if not capturing(entries[0].param.device):
            self._adopt_writes((entry.param, entry.weight) for entry in entries)
        grad_norms, found = self._measure(entries)
        self.apply_update(work, grad_norms, found)
        return loss

    def apply_update(self, work: Work, grad_norms: Tensor, found: Tensor) -> bool:
        """The part of a step after the norms, for callers that compute and exchange norms themselves.

        grad_norms: the norms of the gradients, still scaled, one per entry in the order of `work`.
        found: a device tensor, 1 if the step must be skipped, else 0.
        Returns False if the step was skipped and the host knows it.
        """
        self.last_found_inf = found
        self.skipped_steps = found.clone() if self.skipped_steps is None else self.skipped_steps.add_(found)
        skip = None if read_is_free(found.device) else found > 0
        if skip is None and found.item():
            return False
        self._stats, done = [], 0
        for group, part in work:
            if part:
                stats = self._update_group(group, part, grad_norms[done : done + len(part)], skip)
                self._stats.append(self._keep(stats, skip))
                done += len(part)
        if len(self._stats_tables) > len(self._stats):  # in earlier steps, other layers had gradients
            needed = {tuple(stats.names) for stats in self._stats} | self._captured_tables
            self._stats_tables = {names: table for names, table in self._stats_tables.items() if names in needed}
        half = [entry for _, part in work for entry in part if entry.weight is not entry.param]
        if half:
            torch._foreach_copy_([entry.param for entry in half], [entry.weight for entry in half])
        return True

    def _update_group(
        self, group: dict[str, Any], entries: list[Entry], grad_norms: Tensor, skip: Tensor | None
    ) -> LayerStats:
        rule, scale = self.rule, self.scale_of_grads()
        h = rule.read(group, grad_norms.device)
        if self.foreach is False:
            path = rule.reference
        else:
            path = rule.in_place if rule.in_place and skip is None and not self.foreach else rule.foreach
        grad_norms = grad_norms if scale is None else grad_norms / scale
        weight_norms, trust = path(entries, h, grad_norms, scale, skip)
        for name, value in h.next_group_state().items():  # a skipped step keeps the old value
            old = getattr(h, name)
            write_setting(group, name, value if skip is None else torch.where(skip, on_device(old, skip.device), value))
        return LayerStats([entry.name for entry in entries], weight_norms, grad_norms, trust)

    def step_fused(self) -> bool:
        """Does the whole step with the rule's fused kernels if they can run. Returns whether it did."""
        if self.fused is False or (self.fused is None and self.foreach is not None):
            return False
        if not any(group["params"] for group in self.param_groups):
            return False
        if self._fused_step is None or not self._fused_step.holds():
            self._fused_step = None
            if reason := self.why_not_fused():
                if self.fused:
                    raise ValueError(f"fused=True, but {reason}")
                return False
            from hyperbatch.optim.fused import FusedStep  # imports Triton

            self._fused_step = FusedStep(self)
        self._fused_step.run()
        return True

    def why_not_fused(self) -> str | None:
        """Returns in one line why the rule's fused kernels cannot update these parameters; None if they can."""
        return why_not_fused(self.param_groups)

    def report_from(self, outcome: Tensor, stats: LayerStats) -> None:
        """Reads statistics from these tensors from now on. Kernels write to them.

        outcome: whether the last step was skipped, and how many steps were skipped so far.
        """
        if self.skipped_steps is not None:
            outcome[1].copy_(self.skipped_steps)
        self.last_found_inf, self.skipped_steps = outcome.unbind()
        self._stats = [stats]

    def _entries(self, group: dict[str, Any], names: list[str]) -> list[Entry]:
        entries = []
        for name, param in zip(names, group["params"], strict=True):
            if param.grad is None:
                continue
            if param.grad.layout != torch.strided:
                raise ValueError(
                    f"the gradient of {title(self, param)} is sparse, and {type(self).__name__} supports only dense "
                    "gradients; use sparse=False in its layer"
                )
            state = self.init_state(param)
            part, buffers = local(param), tuple(local(state[key]) for key in self.state_names)
            weight = local(state["master"]) if "master" in state else part
            entries.append(Entry(name, part, weight, local_grad(param), buffers, spread=spread_of(param)))
        return entries

    def init_state(self, param: Tensor) -> dict[str, Tensor]:
        """Returns the parameter's state, in fp32 or wider. It is created on first use, in the arena if there is one.

        16-bit parameters have a `master`. So do parameters with gaps or overlaps in memory, which kernels do not
        support. If other code has replaced a state tensor of the arena, its values are copied back into the arena's
        tensor.
        """
        state = self.state[param]
        name = self._arena_names.get(param)
        if name is not None:
            homes = {key: views[name] for key, views in zip(self.state_names, self._arena_state, strict=True)}
            if name in self._arena_masters:
                homes["master"] = self._arena_masters[name]
            for key, home in homes.items():
                if state.get(key) is not home:
                    if key in state:
                        home.copy_(state[key])
                    state[key] = home
            return state
        wide = torch.promote_types(param.dtype, torch.float32)
        gaps = not state and not is_dense(local(param))
        for key in self.state_names:
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=wide)
        if "master" not in state and (gaps or param.dtype in HALF_DTYPES):
            state["master"] = torch.empty_like(param, dtype=wide).copy_(param.detach())
        return state

    def _adopt_writes(self, pairs: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Copies 16-bit weights that other code wrote into their masters. Compares values: `.data` has no version."""
        arena = self.arena
        if arena is not None and arena.masters is not None:
            adopt_writes(arena.weights[arena.dtype], arena.masters)
        for param, master in pairs:
            if master is not param and param not in self._arena_names:
                adopt_writes(param, master)

    def _measure(self, entries: list[Entry]) -> tuple[Tensor, Tensor]:
        """Returns the norms of the gradients, still scaled, and 1 if any has inf or nan, else 0; both on the device."""
        norms = norms_of_layers([entry.grad for entry in entries], entries)
        found = (~torch.isfinite(norms).all()).float()
        told = self.told_inf()
        if told is not None:
            found = torch.maximum(found, (told != 0).float().reshape(()))
        return norms, agreed(found, [entry.spread for entry in entries])

    @torch.no_grad()
    def grad_norm(self) -> Tensor:
        """The norm over all gradients as they are, so possibly loss-scaled. Does not wait for the device."""
        entries = [entry for group, names in self.group_names() for entry in self._entries(group, names)]
        return torch.linalg.vector_norm(self._measure(entries)[0]) if entries else torch.zeros(())

    def scale_of_grads(self) -> Tensor | None:
        return getattr(self, "grad_scale", None)

    def told_inf(self) -> Tensor | None:
        return getattr(self, "found_inf", None)

    def _keep(self, stats: LayerStats, skip: Tensor | None) -> LayerStats:
        """Keeps statistics in fixed tensors. Replays of a captured step write to them; skipped steps do not."""
        new, names = torch.stack([stats.weight_norms, stats.grad_norms, stats.trust]), tuple(stats.names)
        kept = self._stats_tables.get(names)
        if kept is None or kept.device != new.device:
            kept = self._stats_tables[names] = torch.full_like(new, torch.nan)
        if capturing(new.device):
            self._captured_tables.add(names)
        kept.copy_(new if skip is None else torch.where(skip, kept, new))
        return LayerStats(stats.names, *kept.unbind())

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.arena is not None:
            self.arena.zero_grad()

    def refresh(self) -> None:
        """Adopts weights that other code wrote. Ordinary steps do this themselves; call it between graph replays."""
        self._follow_arena()
        if self._fused_step is not None and self._fused_step.holds():
            self._fused_step.refresh()
            return
        self._fused_step = None
        states = ((p, self.state.get(p, {})) for group in self.param_groups for p in group["params"])
        self._adopt_writes((local(p), local(state["master"])) for p, state in states if "master" in state)

    def _follow_arena(self) -> None:
        """Takes state and masters from the arena, after the arena was laid out again or loaded."""
        if self.arena is None:
            return
        if any(view.device != self.arena.device for views in self._arena_state for view in views.values()):
            self._arena_state = [self.arena.views(self.arena.new_buffers()) for _ in self.state_names]
        self._arena_masters = self.arena.named_masters()
        for param, name in self._arena_names.items():
            if param in self.state:
                if name in self._arena_masters:
                    self.state[param]["master"] = self._arena_masters[name]
                self.init_state(param)

    # --- reading and saving -------------------------------------------------------------------------------------

    def layer_stats(self) -> list[LayerStats]:
        """Norms and trust ratios of the last step that was not skipped, on the device. Does not synchronise.

        They are copies, so later steps and replays do not change them.
        """
        return [
            LayerStats(stats.names, stats.weight_norms.clone(), stats.grad_norms.clone(), stats.trust.clone())
            for stats in self._stats
        ]

    def clear_stats(self) -> None:
        """Resets the statistics in place, because captured steps write to these tensors."""
        for stats in self._stats:
            for column in (stats.weight_norms, stats.grad_norms, stats.trust):
                column.fill_(torch.nan)

    def layer_norms(self) -> dict[str, tuple[float, float, float]]:
        """Maps names to (|w|, |g|, trust) of the last step. Waits for the device."""
        rows = {}
        for stats in self.layer_stats():
            columns = torch.stack([stats.weight_norms, stats.grad_norms, stats.trust]).double().tolist()
            rows.update(zip(stats.names, zip(*columns, strict=True), strict=True))
        return rows

    def trust_ratios(self) -> dict[str, float]:
        """The last step's trust ratio of each adapted parameter, by name. Waits for the device."""
        adapted = self.adapted_names()
        return {name: trust for name, (_, _, trust) in self.layer_norms().items() if name in adapted}

    def adapted_names(self) -> set[str]:
        """The names of the parameters that get a trust ratio."""
        return {name for group, names in self.group_names() if group.get("adapt", True) for name in names}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Like torch's, but fp32 state of 16-bit weights stays fp32 (torch would cast it) and stays in the arena."""
        loaded: dict[str, Any] = {}

        def take_state(_: Any, final: dict[str, Any]) -> dict[str, Any]:
            loaded.update(final)
            return {**final, "state": {}}

        handle = self.register_load_state_dict_pre_hook(take_state)  # runs after other hooks and sees their result
        self._loaded = loaded
        try:
            super().load_state_dict(state_dict)  # calls __setstate__, then the post hooks
        finally:
            self._loaded = None
            handle.remove()
