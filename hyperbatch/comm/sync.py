"""GradSync starts the all-reduce of a gradient group, in place in the arena, when its last gradient is ready.

backward        fc . layer4 ........ layer3 ......... layer2 ... layer1 . conv1 | finish: wait | update
communication         [--- g0 ---]   [------- g1 -------]        [---- g2 ----] [- g3 -]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from hyperbatch.arena import Arena
from hyperbatch.comm.agree import check_agreement
from hyperbatch.comm.collectives import (
    HYBRID_SWITCH_BYTES,
    all_reduce_now,
    check_comm,
    message_bytes,
    reduce_scatter_now,
    resolve_algorithm,
)
from hyperbatch.comm.grid import GridComm
from hyperbatch.comm.phases import Log
from hyperbatch.comm.runner import Exchange, ExchangeHandle
from hyperbatch.comm.shards import own_shard
from hyperbatch.comm.usage import check_usage, exchange_usage, usage_bits
from hyperbatch.comm.weights import check_same_weights
from hyperbatch.errors import InputError, check_kind
from hyperbatch.plan.types import GradGroup, GroupPlan, GroupTiming
from hyperbatch.stopwatch import Mark, mark, seconds_between, wait


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseTiming:
    """One phase of one group's exchange, e.g. its all-reduce in columns."""

    index: int  # of the gradient group
    algorithm: str
    phase: str
    bytes: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class _Flight:
    """One gradient group in one step."""

    pending: int  # number of gradients that are not ready yet
    ready: Mark | None = None
    handle: ExchangeHandle | None = None
    phases: Log = None


@dataclass(slots=True)
class _Step:
    """The state of one step, from the begin() of its last micro-step on."""

    begin: Mark
    flights: list[_Flight]
    arrived: list[bool]  # whether each parameter's gradient is ready
    launched: int = 0  # number of groups
    usage: Tensor | None = None  # usage bits, which are sent after the last group


class GradSync:
    """Sends gradient groups in index order on every rank, in whatever order their gradients become ready.

    In each step, call `begin()` before every backward and `finish()` after the last. In between, do not touch
    `param.grad`: its group may be in flight. With one rank nothing is sent (unless `GridComm(alone=True)`).

    In every step ranks also exchange which parameters they used, because the weights of a parameter that only some of
    them update would differ from then on. On a CPU `finish()` raises at once. On a GPU it does not wait for the result:
    a later `finish()` raises, or `check()`. The parameters that a CUDA graph uses are fixed at capture: call `check()`
    after the capture.
    """

    def __init__(
        self,
        arena: Arena,
        plan: GroupPlan,
        comm: GridComm,
        *,
        wire_dtype: torch.dtype | None = None,
        algorithm: str = "flat",
        hybrid_switch_bytes: int = HYBRID_SWITCH_BYTES,
        sharded: bool = False,
    ) -> None:
        """Compares the plan and the weights (and masters) over all ranks; a difference is an error on each of them.

        sharded: gradients are only reduce-scattered: with `torus` by rows and columns, with any other algorithm over
        all ranks at once. Each rank then has the mean only in its `shard` of a group, and `ShardedUpdate` replaces the
        optimizer's `step()`.
        """
        check_kind("arena", arena, Arena, "give the Arena of the model")
        check_comm(comm)
        self.plan, self.comm = plan, comm
        self.sharded = sharded
        self._arena, self._wire_dtype = arena, wire_dtype
        self._slots = arena.slots
        self._algorithms: list[str] = []
        problem = None
        try:
            self._check_plan()
            if comm.world is not None:
                self._check_left_out()
            self._algorithms = [self._algorithm(group, algorithm, hybrid_switch_bytes) for group in plan.groups]
        except (InputError, ValueError) as error:
            problem = str(error)
        self._compare_plans(problem)
        # With a sharded update, a rank's masters are up to date only in its own shard.
        check_same_weights(arena, comm, masters=not sharded)

        self._device = arena.device
        number = {slot.name: i for i, slot in enumerate(self._slots)}
        self._group_of = {number[name]: i for i, group in enumerate(plan.groups) for name in group.parameters}
        self._slices: list[Tensor] = []
        self._sliced_from: dict[torch.dtype, Tensor] = {}
        self._used = [False] * len(self._slots)  # in any micro-step of this step
        # Usage bits of steps that the device has not finished yet.
        self._unchecked: deque[tuple[ExchangeHandle, Tensor]] = deque()
        self._captured: list[list[bool]] = []  # usage in captured steps that ranks have not compared yet
        self._open: _Step | None = None  # the step that communicates now
        self._last: _Step | None = None  # the step whose timings can be read
        self._timings: tuple[GroupTiming, ...] = ()
        self._phases: tuple[PhaseTiming, ...] = ()
        self._hooks = []
        if comm.world is not None:
            self._hooks = [
                slot.param.register_post_accumulate_grad_hook(partial(self._arrived, i))
                for i, slot in enumerate(self._slots)
            ]
            arena.holds_shards = sharded

    def begin(self, *, last_micro_step: bool = True) -> None:
        """Must be called before each backward. Only the last micro-step of an accumulated step communicates."""
        if self._hooks and self._arena.has_thawed():
            self._check_left_out()
        if self._open is not None and self._open.launched:
            raise RuntimeError("GradSync.begin() while groups of the step before are in flight; call finish() first")
        self._open = None
        if not last_micro_step:
            return
        flights = []
        if self._hooks:
            self._find_slices()
            flights = [_Flight(pending=len(group.parameters)) for group in self.plan.groups]
        self._open = _Step(
            begin=mark(self._device),
            flights=flights,
            arrived=[False] * len(self._slots),
        )

    def finish(self) -> None:
        """Must be called after the last backward and before the update. Gradients are then the mean over ranks.

        Groups with parameters that this step did not use are sent here. Raises the error of an exchange that failed.
        """
        step, used = self._open, self._used
        if step is None:
            raise RuntimeError("GradSync.finish() without begin(): call begin() before the last backward of each step")
        try:
            if not self._hooks:
                self._arena.collect()
                return
            while step.launched < len(step.flights):
                self._launch(step)
            for flight in step.flights:
                assert flight.handle is not None
                flight.handle.wait()
        finally:
            self._open = None
            self._used = [False] * len(self._slots)
        self._last, self._timings, self._phases = (None if step.usage is None else step), (), ()
        if step.usage is None:
            self._captured.append(used)  # compared by `check`: reading from the device would break the capture
            return
        handle = step.flights[-1].handle
        assert handle is not None
        self._unchecked.append((handle, step.usage))
        step.usage = None  # pinned memory: if `_last` freed it during a later capture, torch would record events there
        while self._unchecked and self._unchecked[0][0].done():
            self._check_next()

    def check(self) -> None:
        """Raises InputError if only some ranks used a parameter in the steps or captures so far.

        Every rank must call it at the same point, e.g. after a capture or before a checkpoint. It waits for the device.
        """
        for used in self._captured:
            bits = usage_bits(used, self.comm, self._device)
            exchange = partial(exchange_usage, bits, self.comm, self._device)
            self._unchecked.append((self.comm.submit(exchange, self._device), bits))
        self._captured = []
        if self._unchecked:
            wait(self._device)  # synchronises: the caller needs the result before it continues
        while self._unchecked:
            self._check_next()

    def shard(self, index: int) -> tuple[int, int]:
        """Returns [start, stop) of this rank's shard of a group, in elements of its dtype's buffers."""
        slots = [self._arena.slot(name) for name in self.plan.groups[index].parameters]
        first = slots[0].offset
        start, stop = own_shard(slots[-1].end - first, self.comm, self._algorithms[index])
        return first + start, first + stop

    def algorithm(self, index: int) -> str:
        """Returns the all-reduce algorithm of a group, with `hybrid` resolved."""
        return self._algorithms[index]

    def timings(self) -> tuple[GroupTiming, ...]:
        """Returns when each group of the last finished step was ready, started and ended, relative to the step's
        `begin`.

        Empty with one rank and for a captured step.
        """
        if self._last is not None:
            wait(self._device)  # synchronises: times can be read once the device has reached the events
            self._timings = tuple(self._timing(self._last, index) for index in range(len(self._last.flights)))
            self._phases = tuple(self._phase_timings(self._last))
            self._last = None
        return self._timings

    def phases(self) -> tuple[PhaseTiming, ...]:
        """Returns the phases of the groups in `timings`, on the same clock. Chunks of a pipelined torus overlap."""
        self.timings()
        return self._phases

    def under_way(self) -> int | None:
        """Returns the index of the first group in flight, or None. Any thread may call it and get an outdated
        result."""
        step = self._open or self._last
        flights = [] if step is None else step.flights[: step.launched]
        waiting = (i for i, flight in enumerate(flights) if flight.handle is not None and not flight.handle.done())
        return next(waiting, None)

    def forget(self) -> None:
        """Resets the state to that before the first step: nothing in flight, no timings, nothing to check."""
        self._open = self._last = None
        self._used = [False] * len(self._slots)
        self._timings, self._phases = (), ()
        self._unchecked.clear()
        self._captured = []

    def close(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._arena.holds_shards = False

    # -- one step ------------------------------------------------------------------------------------------------

    def _arrived(self, i: int, param: Tensor) -> None:
        """Called by the hook of parameter i, inside backward, when its gradient is ready."""
        self._used[i] = True
        step = self._open
        if step is None:
            return
        if step.arrived[i]:
            raise InputError(
                f"{self._slots[i].name} received two gradients after one begin(); call begin(last_micro_step=False) "
                "before every backward of a step but the last, and use_reentrant=False in torch.utils.checkpoint"
            )
        step.arrived[i] = True
        flight = step.flights[self._group_of[i]]
        flight.pending -= 1
        if flight.pending == 0:
            flight.ready = mark(self._device)
            while step.launched < len(step.flights) and step.flights[step.launched].pending == 0:
                self._launch(step)

    def _launch(self, step: _Step) -> None:
        index = step.launched
        step.launched += 1
        flight = step.flights[index]
        if flight.ready is None:  # the group has parameters that this backward did not use
            flight.ready = mark(self._device)
        # Unused parameters send zeros instead of the gradient of an earlier step.
        self._arena.collect(self.plan.groups[index].parameters)
        captured = _captured(self._device)
        flight.phases = None if captured else []
        tensor, algorithm = self._slices[index], self._algorithms[index]
        if self.sharded:
            exchange: Exchange = partial(
                reduce_scatter_now, tensor, self.comm, algorithm, self._wire_dtype, flight.phases
            )
        else:
            exchange = partial(all_reduce_now, tensor, self.comm, algorithm, "mean", self._wire_dtype, flight.phases)
        if step.launched == len(step.flights) and not captured:  # all parameters that this step uses are known now
            step.usage = usage_bits(self._used, self.comm, self._device)
            exchange = partial(_both, exchange, partial(exchange_usage, step.usage, self.comm, self._device))
        flight.handle = self.comm.submit(exchange, self._device)

    def _find_slices(self) -> None:
        """Finds the groups' slices again if the arena was rebuilt since the last step."""
        grads = self._arena.grads
        if self._sliced_from.keys() != grads.keys() or any(grads[d] is not self._sliced_from[d] for d in grads):
            self._sliced_from = dict(grads)
            self._slices = [self._arena.slice_of(group.parameters, grads) for group in self.plan.groups]
            self._device = self._arena.device

    def _timing(self, step: _Step, index: int) -> GroupTiming:
        flight = step.flights[index]
        assert flight.handle is not None
        assert flight.ready is not None
        return GroupTiming(
            index=index,
            algorithm=self._algorithms[index],
            bytes=self.plan.groups[index].bytes,
            ready_s=seconds_between(step.begin, flight.ready),
            start_s=seconds_between(step.begin, flight.handle.start),
            end_s=seconds_between(step.begin, flight.handle.end),
        )

    def _phase_timings(self, step: _Step) -> Iterator[PhaseTiming]:
        for index, flight in enumerate(step.flights):
            for phase in flight.phases or ():
                yield PhaseTiming(
                    index=index,
                    algorithm=self._algorithms[index],
                    phase=phase.name,
                    bytes=phase.bytes,
                    start_s=seconds_between(step.begin, phase.start),
                    end_s=seconds_between(step.begin, phase.end),
                )

    # -- agreement between ranks -----------------------------------------------------------------------------------

    def _algorithm(self, group: GradGroup, default: str, hybrid_switch_bytes: int) -> str:
        elements = group.bytes // getattr(torch, group.dtype).itemsize
        wire_bytes = message_bytes(elements, getattr(torch, group.dtype), self._wire_dtype)
        return resolve_algorithm(group.algorithm or default, wire_bytes, hybrid_switch_bytes)

    def _check_plan(self) -> None:
        check_kind("plan", self.plan, GroupPlan, "give the GroupPlan of plan_groups")
        self.plan.check_covers(self._arena.specs)
        place = {slot.name: i for i, slot in enumerate(self._slots)}
        dtypes = {slot.name: str(slot.dtype).removeprefix("torch.") for slot in self._slots}
        for group in self.plan.groups:
            odd = next((name for name in group.parameters if dtypes[name] != group.dtype), None)
            if odd:
                raise InputError(f"group {group.index} is {group.dtype}, but {odd} has {dtypes[odd]} gradients")
            places = [place[name] for name in group.parameters]
            between = self._slots[min(places) : max(places) + 1]
            if [slot.name for slot in between if dtypes[slot.name] == group.dtype] != [*group.parameters]:
                raise InputError(f"group {group.index} does not hold neighbours of the arena in the arena's order")

    def _check_left_out(self) -> None:
        """Raises InputError for trainable parameters outside the arena. Their gradients would not be exchanged, and
        they would differ between ranks."""
        if names := self._arena.left_out():
            more = "" if len(names) == 1 else f" and {len(names) - 1} more"
            raise InputError(
                f"{names[0]}{more}: trainable, but not in the arena; build the Arena, the optimizer and GradSync again "
                "after you unfreeze or replace layers"
            )

    def _compare_plans(self, problem: str | None) -> None:
        self.comm.drain()  # another GradSync may share the groups
        if problem:
            check_agreement(self.comm.world, "the gradient plan", [], problem)
        layout = [f"{s.name} {s.dtype} at {s.offset} of {tuple(s.param.shape)}" for s in self._slots]
        groups = [
            f"group {group.index} ({algorithm}, {group.dtype}): {' '.join(group.parameters)}"
            for group, algorithm in zip(self.plan.groups, self._algorithms)
        ]
        description = [
            *groups,
            *layout,
            f"wire {self._wire_dtype}",
            f"sharded {self.sharded}",
            f"plan {self.plan.hash}",
        ]
        check_agreement(self.comm.world, "the gradient plan", description)

    def _check_next(self) -> None:
        handle, bits = self._unchecked.popleft()
        handle.wait()
        check_usage(bits, [slot.name for slot in self._slots], self.comm)


def _both(first: Exchange, second: Exchange) -> None:
    first()
    second()


def _captured(device: torch.device) -> bool:
    """Whether a CUDA graph is being captured. Events in a capture cannot be read as times."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
