"""GradSync against DDP and against plain sums: every plan, accumulation, unused parameters, faults."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm, broadcast_weights, runner, usage, weights
from hyperbatch.comm import sync as sync_module
from hyperbatch.errors import InputError
from hyperbatch.params import backward_order
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import GroupPlan, RankGrid

PLANS: dict[str, dict] = {
    "single": {},
    "per_layer": {},
    "threshold": {"threshold_bytes": 600},
    "equal": {"count": 3},
    "cubic": {"base": 1},
}


def network() -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 12), nn.Tanh(), nn.Linear(12, 5), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(5, 3, bias=False)).double()


def batch(rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    return torch.randn(4, 1, 6, 6, dtype=torch.float64, generator=generator)


def build(model: nn.Module, run_backward: Callable[[], None], strategy: str, **options) -> tuple[Arena, GroupPlan]:
    arena = Arena(model, backward_order(model, run_backward), dtype=torch.float64)
    return arena, plan_groups(arena.specs, strategy, **options)


def descend(params, lr: float = 0.05) -> None:
    with torch.no_grad():
        for param in params:
            param.sub_(param.grad, alpha=lr)


# -- equal to DDP ------------------------------------------------------------------------------------------------


def train_both(rank: int, grid: str, micro_steps: int) -> list[tuple[str, str, float]]:
    """Largest difference of a weight from DDP's after 20 steps, for each plan and algorithm."""
    reference = network()
    ddp = DistributedDataParallel(reference)
    for step in range(20):
        ddp.zero_grad()
        for micro in range(micro_steps):
            ddp.require_backward_grad_sync = micro == micro_steps - 1
            (ddp(batch(rank, step * micro_steps + micro)).square().mean() / micro_steps).backward()
        descend(reference.parameters())

    comm = GridComm(RankGrid.parse(grid))
    differences = []
    for strategy, options in PLANS.items():
        for algorithm in ("flat", "torus") if strategy == "cubic" else ("hybrid",):
            model = network()
            arena, plan = build(model, lambda m=model: m(batch(9, 0)).sum().backward(), strategy, **options)
            sync = GradSync(arena, plan, comm, algorithm=algorithm, hybrid_switch_bytes=500)
            for step in range(20):
                arena.zero_grad()
                for micro in range(micro_steps):
                    sync.begin(last_micro_step=micro == micro_steps - 1)
                    (model(batch(rank, step * micro_steps + micro)).square().mean() / micro_steps).backward()
                sync.finish()
                descend(model.parameters())
            sync.close()
            pairs = zip(model.parameters(), reference.parameters(), strict=True)
            differences.append((strategy, algorithm, max((a - b).abs().max().item() for a, b in pairs)))
            everywhere = [torch.empty_like(arena.weights[torch.float64]) for _ in range(dist.get_world_size())]
            dist.all_gather(everywhere, arena.weights[torch.float64])
            assert all(torch.equal(everywhere[0], other) for other in everywhere), "ranks hold the same bits"
    return differences


@pytest.mark.parametrize(("grid", "micro_steps"), [("1x2", 1), ("3x1", 1), ("2x2", 3)])
def test_twenty_steps_equal_ddp(grid: str, micro_steps: int) -> None:
    for differences in run_ranks(RankGrid.parse(grid).size, train_both, grid, micro_steps):
        assert [name for name, _, difference in differences if difference > 1e-13] == []  # fp64 rounding of 20 steps


# -- exact values ------------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """A linear loss with integer gradients. `idle` is never used; `second` only when asked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.zeros(7))
        self.idle = nn.Parameter(torch.zeros(5))
        self.second = nn.Parameter(torch.zeros(3, 5))
        self.frozen = nn.Parameter(torch.ones(4), requires_grad=False)
        self.third = nn.Parameter(torch.zeros(11))

    def forward(self, factor: float, with_second: bool = True) -> Tensor:
        loss = factor * self.first.sum() + 3 * factor * self.third.sum() * self.frozen[0]
        return loss + 2 * factor * self.second.sum() if with_second else loss


def exact_gradients(rank: int, grid: str, dtype: torch.dtype) -> None:
    comm = GridComm(RankGrid.parse(grid))
    n = comm.size
    for strategy in PLANS:
        model = Branches()
        # Definition order, not backward's: groups become ready in another order than they leave in.
        order = [name for name, param in model.named_parameters() if param.requires_grad]
        arena = Arena(model, order, dtype=dtype)
        sync = GradSync(arena, plan_groups(arena.specs, strategy, count=4, base=1, threshold_bytes=30), comm)
        for step in range(5):
            arena.zero_grad()
            sync.begin(last_micro_step=False)
            model(float(rank + step)).backward()
            sync.begin()
            model(1.0).backward()
            sync.finish()
            mean = sum(rank + step + 1 for rank in range(n)) / n
            assert model.first.grad is not None
            assert model.second.grad is not None
            assert model.third.grad is not None
            assert (model.first.grad == mean).all(), (strategy, step)
            assert (model.second.grad == 2 * mean).all(), (strategy, step)
            assert (model.third.grad == 3 * mean).all(), (strategy, step)
            assert model.idle.grad is None
            assert model.frozen.grad is None
            starts = [timing.start_s for timing in sync.timings()]
            assert starts == sorted(starts)
            model.zero_grad(set_to_none=True)  # as a loop that does not know of the arena would
        sync.close()


@pytest.mark.parametrize(("grid", "dtype"), [("2x1", torch.float32), ("2x2", torch.bfloat16), ("4x2", torch.float32)])
def test_gradients_are_exact_with_accumulation_frozen_and_unused_parameters(grid: str, dtype: torch.dtype) -> None:
    run_ranks(RankGrid.parse(grid).size, exact_gradients, grid, dtype)


def launches(rank: int) -> tuple[list[str], list[str]]:
    """What happened in one backward, with the arena in backward's order and in the opposite one."""
    logs = []
    comm = GridComm(RankGrid(2, 1))
    submit = comm.submit
    for forward_order in (False, True):
        model = network()
        order = backward_order(model, lambda m=model: m(batch(0, 0)).sum().backward())
        arena = Arena(model, order[::-1] if forward_order else order, dtype=torch.float64)
        sync = GradSync(arena, plan_groups(arena.specs, "equal", count=2), comm)
        addresses = [arena.slice_of(group.parameters, arena.grads).data_ptr() for group in sync.plan.groups]
        log: list[str] = []

        def logged(job, device, then=None, log=log, addresses=addresses):
            exchange, *usage = job.args if len(job.args) == 2 else [job]
            log.append(f"group {addresses.index(exchange.args[0].data_ptr())}" + " and usage" * len(usage))
            return submit(job, device, then)

        comm.submit = logged
        arena.zero_grad()
        sync.begin()
        hidden = model[:5](batch(rank, 0))  # up to the middle
        hidden.register_hook(lambda _, log=log: log.append("middle of backward"))
        model[5:](hidden).sum().backward()
        log.append("end of backward")
        sync.finish()
        sync.close()
        comm.submit = submit
        logs.append(log)
    return logs[0], logs[1]


def test_groups_leave_during_backward_and_in_index_order() -> None:
    for in_order, opposite in run_ranks(2, launches):
        assert in_order == ["group 0", "middle of backward", "group 1 and usage", "end of backward"]
        # Group 1 is there first, and waits for group 0: every rank must send in the same order.
        assert opposite == ["middle of backward", "group 0", "group 1 and usage", "end of backward"]


def forget_old_gradient(rank: int) -> Tensor:
    model = Branches()
    arena = Arena(model, ["third", "second", "first", "idle"])
    sync = GradSync(arena, plan_groups(arena.specs, "single"), GridComm(RankGrid(2, 1)))
    for with_second in (True, False):
        model.zero_grad(set_to_none=True)  # as a loop does that knows no arena: the buffers keep the old gradients
        sync.begin()
        model(1.0, with_second).backward()
        sync.finish()
    assert model.second.grad is None
    return arena.grad_view("second")


def test_an_old_gradient_does_not_travel_again() -> None:
    for old in run_ranks(2, forget_old_gradient):
        assert (old == 0).all()


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8, bias=False)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


def mixed_precision(rank: int) -> list[tuple[str, str]]:
    torch.manual_seed(0)
    model = Normed()
    order = ["norm.bias", "norm.weight", "linear.weight"]
    arena = Arena(model, order, dtype=torch.bfloat16, copy_on_ready=False)
    plan = plan_groups(arena.specs, "cubic", base=1)
    with GridCommContext(2, 1) as comm:
        sync = GradSync(arena, plan, comm, wire_dtype=torch.float32, algorithm="torus")
        x = torch.randn(16, 8, generator=torch.Generator().manual_seed(rank)).bfloat16()
        arena.zero_grad()
        sync.begin()
        model(x).float().square().sum().backward()
        sync.finish()
        for slot in arena.slots:
            assert slot.param.grad is not None
            both = [torch.empty_like(slot.param.grad) for _ in range(2)]
            dist.all_gather(both, slot.param.grad)
            assert torch.equal(both[0], both[1])
            assert slot.param.grad.abs().sum() > 0 or slot.name == "linear.weight"
    return [(group.dtype, " ".join(group.parameters)) for group in plan.groups]


class GridCommContext:
    def __init__(self, rows: int, columns: int) -> None:
        self.comm = GridComm(RankGrid(rows, columns))

    def __enter__(self) -> GridComm:
        return self.comm

    def __exit__(self, *_: object) -> None:
        self.comm.close()


def test_mixed_precision_sends_fp32_norms_last() -> None:
    groups = run_ranks(2, mixed_precision)[0]
    assert groups == [("bfloat16", "linear.weight"), ("float32", "norm.bias norm.weight")]


# -- what is measured --------------------------------------------------------------------------------------------


def timed(rank: int) -> None:
    model = network()
    arena, plan = build(model, lambda: model(batch(0, 0)).sum().backward(), "cubic", base=1)
    comm = GridComm(RankGrid(2, 1))
    sync = GradSync(arena, plan, comm, algorithm="hybrid", hybrid_switch_bytes=200)
    assert sync.timings() == ()
    threads = set()
    for _ in range(6):
        arena.zero_grad()
        sync.begin()
        model(batch(rank, 0)).sum().backward()
        sync.finish()
        threads.add(threading.active_count())
    assert len(threads) == 1
    timings = sync.timings()
    assert [t.index for t in timings] == list(range(len(plan.groups)))
    assert [t.bytes for t in timings] == [group.bytes for group in plan.groups]
    assert [t.algorithm for t in timings] == ["hierarchical" if g.bytes <= 200 else "flat" for g in plan.groups]
    assert len({t.algorithm for t in timings}) == 2
    assert all(0 <= t.ready_s <= t.start_s <= t.end_s for t in timings)


def test_timings_follow_the_plan() -> None:
    run_ranks(2, timed)


def test_one_rank_does_nothing() -> None:
    model = Branches()
    arena = Arena(model, ["third", "second", "first", "idle"], copy_on_ready=False)
    sync = GradSync(arena, plan_groups(arena.specs, "single"), GridComm(RankGrid(1, 1)))
    sync.begin()
    model(2.0).backward()
    sync.finish()
    assert (arena.slice_of(["third"], arena.grads)[:11] == 6).all(), "gradients are in the arena as with many ranks"
    assert sync.timings() == ()
    arena.zero_grad()
    sync.begin()
    model(1.0, with_second=False).backward()
    sync.finish()
    assert model.second.grad is None
    assert not arena.grad_view("second").any(), "an old gradient has gone"


def alone(rank: int, algorithm: str) -> None:
    """One rank that talks to itself through the backend: the same values, and the collectives of a real step."""
    model = Branches()
    arena = Arena(model, ["third", "second", "first", "idle"])
    comm = GridComm(RankGrid(1, 1), alone=True)
    plan = plan_groups(arena.specs, "per_layer")
    sync = GradSync(arena, plan, comm, algorithm=algorithm, wire_dtype=torch.bfloat16)
    for _ in range(2):
        arena.zero_grad()
        sync.begin()
        model(2.0).backward()
        sync.finish()
        assert model.third.grad is not None
        assert (model.third.grad == 6).all()
        assert model.idle.grad is None
    phases = [phase.phase for phase in sync.phases()]
    exchange = {"flat": ["all-reduce"], "torus": ["row reduce-scatter", "column all-reduce", "row all-gather"]}[
        algorithm
    ]
    assert phases == ["cast", *exchange, "cast"] * len(plan.groups)
    for timing in sync.timings():
        mine = [phase for phase in sync.phases() if phase.index == timing.index]
        assert all(timing.start_s <= phase.start_s <= phase.end_s <= timing.end_s for phase in mine)
        assert {phase.algorithm for phase in mine} == {algorithm}
    sync.close()
    comm.close()


@pytest.mark.parametrize("algorithm", ["flat", "torus"])
def test_one_rank_through_the_backend(algorithm: str) -> None:
    run_ranks(1, alone, algorithm)


# -- errors ------------------------------------------------------------------------------------------------------


def message_of(action: Callable[[], object]) -> str:
    try:
        action()
    except (InputError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def differing_plans(rank: int, case: str) -> str:
    model = Branches()
    arena = Arena(model, ["third", "second", "first", "idle"])
    plan = plan_groups(arena.specs, "cubic", base=1)
    algorithm, wire_dtype = "flat", None
    if rank == 2:
        if case == "groups":
            plan = plan_groups(arena.specs, "single")
        elif case == "algorithm":
            algorithm = "torus"
        elif case == "wire":
            wire_dtype = torch.bfloat16
        elif case == "layout":
            arena = Arena(Branches(), ["third", "first", "second", "idle"])
            plan = plan_groups(arena.specs, "cubic", base=1)
        elif case == "missing":
            plan = replace(plan, groups=plan.groups[1:])
        elif case == "strategy":
            plan = replace(plan, strategy="other")
    comm = GridComm(RankGrid(3, 1))
    return message_of(lambda: GradSync(arena, plan, comm, algorithm=algorithm, wire_dtype=wire_dtype))


@pytest.mark.parametrize(
    ("case", "parts"),
    [
        ("groups", ["rank 0 has 'group 0 (flat, float32): third'", "rank 2 has", "second first"]),
        ("algorithm", ["group 0 (flat", "group 0 (torus"]),
        ("wire", ["wire None", "wire torch.bfloat16"]),
        ("layout", ["rank 2 has", "first"]),
        ("missing", ["rank 2: ", "missing ['third']"]),
        ("strategy", ["plan differs"]),
    ],
)
def test_plans_that_differ_are_an_error_on_every_rank(case: str, parts: list[str]) -> None:
    messages = run_ranks(3, differing_plans, case, timeout_s=20)
    assert len(set(messages)) == 1
    assert messages[0].startswith("InputError")
    for part in parts:
        assert part in messages[0]


class Steps:
    """Plain steps of `Branches` on three ranks."""

    def __init__(self, algorithm: str = "flat", **options) -> None:
        self.model = Branches()
        self.arena = Arena(self.model, ["third", "second", "first", "idle"])
        plan = plan_groups(self.arena.specs, "per_layer")
        self.sync = GradSync(self.arena, plan, GridComm(RankGrid(3, 1)), algorithm=algorithm, **options)

    def step(self, with_second: bool) -> None:
        self.arena.zero_grad()
        self.sync.begin()
        self.model(1.0, with_second).backward()
        self.sync.finish()


def partly_used(rank: int, algorithm: str, options: dict) -> str:
    steps = Steps(algorithm, **options)
    model, arena, sync = steps.model, steps.arena, steps.sync
    for i in range(6):
        steps.step(with_second=i % 2 == 0)
    arena.zero_grad()
    sync.begin(last_micro_step=False)
    model(1.0, True).backward()
    sync.begin()
    model(1.0, rank != 1).backward()  # used by every rank within the step: all is well
    sync.finish()
    sync.check()
    return message_of(lambda: steps.step(rank != 1))


PARTLY = "InputError: second: got a gradient on 2 of 3 ranks only (0, 2); make every rank run the same layers"


@pytest.mark.parametrize(
    ("algorithm", "options"), [("flat", {}), ("torus", {"wire_dtype": torch.bfloat16}), ("flat", {"sharded": True})]
)
def test_a_parameter_used_on_some_ranks_only_is_an_error_in_any_step(algorithm: str, options: dict) -> None:
    messages = run_ranks(3, partly_used, algorithm, options, timeout_s=20)
    assert len(set(messages)) == 1
    assert messages[0].startswith(PARTLY)


def looked_at_later(rank: int) -> list[str]:
    """As on a GPU, where the counts of a step may be on their way when its finish() returns."""
    steps = Steps()
    arrived = runner.ThreadHandle.done
    runner.ThreadHandle.done = lambda handle: False
    messages = [message_of(lambda: steps.step(rank != 1)), message_of(lambda: steps.step(True))]
    runner.ThreadHandle.done = arrived
    messages.append(message_of(lambda: steps.step(True)))
    runner.ThreadHandle.done = lambda handle: False
    messages += [message_of(lambda: steps.step(rank != 1)), message_of(steps.sync.check)]
    steps.step(rank != 1)
    steps.sync.forget()
    return [*messages, message_of(steps.sync.check)]


def test_usage_that_is_still_on_its_way_is_looked_at_by_a_later_step_or_a_check() -> None:
    for messages in run_ranks(3, looked_at_later, timeout_s=20):
        assert messages[:2] == ["no error", "no error"]
        assert messages[2].startswith(PARTLY)
        assert messages[3] == "no error"
        assert messages[4].startswith(PARTLY)
        assert messages[5] == "no error", "what was forgotten is not looked at"


def captured(rank: int) -> list[str]:
    """Capture is played: no bits may travel from inside of it, and none of its handles may be asked."""
    steps = Steps()
    sync_module._captured = lambda device: True
    steps.step(True)
    steps.step(rank == 1)
    sync_module._captured = lambda device: False
    return [message_of(steps.sync.check), message_of(steps.sync.check)]


def test_what_a_captured_step_uses_is_compared_after_the_capture() -> None:
    for first, second in run_ranks(3, captured, timeout_s=20):
        assert first.startswith("InputError: second: got a gradient on 1 of 3 ranks only (1);")
        assert second == "no error", "once per capture"


class Place(NamedTuple):
    """What `usage` asks of a GridComm."""

    rank: int
    members: list[int]

    @property
    def size(self) -> int:
        return len(self.members)


@pytest.mark.parametrize("size", [2, 61, 62, 63, 125, 4096])
def test_usage_of_any_number_of_ranks_tells_them_apart(size: int) -> None:
    members = list(range(10, 10 + size))  # a slice of a larger world
    names = [f"layer{i}" for i in range(9)]
    unused = {0, size - 1}
    total: Any = 0
    for rank in range(size):
        used = [name not in ("layer3", "layer7") or rank not in unused for name in names]
        used[5] = False
        total = total + usage.usage_bits(used, cast(Any, Place(rank, members)), torch.device("cpu"))
    comm: Any = Place(0, members)
    usage.check_usage(total[:, [0, 1, 2, 5]], names, comm)
    if size == 2:
        usage.check_usage(total, names, comm)  # nobody used them
        return
    users = "11" if size == 3 else f"11-{size + 8}"
    with pytest.raises(
        InputError, match=rf"layer3, layer7: got a gradient on {size - 2} of {size} ranks only \({users}\)"
    ):
        usage.check_usage(total, names, comm)


def test_many_partly_used_parameters_make_one_short_line() -> None:
    comm: Any = Place(0, [0, 1])
    with pytest.raises(InputError, match=r"^a0, a1, a2 and 97 more: got a gradient on 1 of 2 ranks only \(1\); "):
        usage.check_usage(torch.full((1, 100), 2), [f"a{i}" for i in range(100)], comm)


# -- initial weights ---------------------------------------------------------------------------------------------


def different_starts(rank: int, case: str) -> str:
    torch.manual_seed(rank if case == "seed" else 0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4, bias=False))
    order = [name for name, _ in model.named_parameters()][::-1]
    arena = Arena(model, order, dtype=torch.float32 if case == "bit" else torch.bfloat16)
    comm = GridComm(RankGrid(3, 1))
    if rank == 2:
        if case in ("masters", "sharded"):
            assert arena.masters is not None
            arena.masters.view(torch.int32)[3] ^= 1  # too little for bf16 to show
        elif case == "bit":
            arena.weights[torch.float32].view(torch.int32)[5] ^= -(2**31)
    plan = plan_groups(arena.specs, "single")
    message = message_of(lambda: GradSync(arena, plan, comm, sharded=case == "sharded"))
    broadcast_weights(arena, comm)
    GradSync(arena, plan, comm)
    return message


@pytest.mark.parametrize(
    ("case", "first", "other"),
    [
        ("seed", "'2.weight with torch.bfloat16 checksum", "rank 1 has '2.weight"),
        ("masters", "'2.weight with torch.float32 checksum", "rank 2 has '2.weight"),
        ("bit", "'2.weight with torch.float32 checksum", "rank 2 has '2.weight"),
    ],
)
def test_ranks_that_start_apart_are_told_so(case: str, first: str, other: str) -> None:
    messages = run_ranks(3, different_starts, case, timeout_s=20)
    assert len(set(messages)) == 1
    assert messages[0].startswith(f"InputError: the initial model differs between ranks: rank 0 has {first}")
    assert other in messages[0]
    assert "call hyperbatch.comm.broadcast_weights(arena, comm)" in messages[0]


def test_masters_of_a_sharded_update_may_differ() -> None:
    assert run_ranks(3, different_starts, "sharded", timeout_s=20) == ["no error"] * 3


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_checksum_shows_every_flipped_bit_and_every_swap(dtype: torch.dtype, monkeypatch) -> None:
    monkeypatch.setattr(weights, "_BLOCK", 16)
    flat = torch.randn(41, generator=torch.Generator().manual_seed(0)).to(dtype)
    bits, width = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]), 8 * dtype.itemsize
    seen = {weights.checksum(flat).item()}
    for place in range(41):
        for bit in range(width):
            mask = -(2 ** (width - 1)) if bit == width - 1 else 1 << bit
            bits[place] ^= mask
            seen.add(weights.checksum(flat).item())
            bits[place] ^= mask
    assert len(seen) == 1 + 41 * width, "all different"
    assert weights.checksum(flat[:0]).item() == 0
    seen = {weights.checksum(flat[torch.arange(41).roll(n)]).item() for n in range(41)}
    assert len(seen) == 41


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_a_sum_of_words_shows_every_flipped_bit(dtype: torch.dtype) -> None:
    """Of a buffer as long as two slots may be: a multiple of 256 bytes."""
    flat = torch.randn(512 // dtype.itemsize, generator=torch.Generator().manual_seed(0)).to(dtype)
    words, before = flat.view(torch.int64), weights.word_sum(flat)
    for place in range(64):
        for bit in range(64):
            mask = -(2**63) if bit == 63 else 1 << bit
            words[place] ^= mask
            assert weights.word_sum(flat) != before
            words[place] ^= mask
    assert weights.word_sum(flat) == before
    assert weights.word_sum(flat.roll(1)) != before


# -- sparse gradients --------------------------------------------------------------------------------------------


def sparse(rank: int, copy_on_ready: bool) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(10, 4, sparse=True), nn.Linear(4, 2))
    arena = Arena(model, ["1.bias", "1.weight", "0.weight"], copy_on_ready=copy_on_ready)
    sync = GradSync(arena, plan_groups(arena.specs, "single"), GridComm(RankGrid(2, 1)))
    sync.begin()
    return message_of(lambda: model(torch.tensor([1, 2])).sum().backward())


@pytest.mark.parametrize("copy_on_ready", [True, False])
def test_a_sparse_gradient_is_refused(copy_on_ready: bool) -> None:
    for message in run_ranks(2, sparse, copy_on_ready):
        assert message.startswith("InputError: the gradient of 0.weight is sparse")
        assert "sparse=False" in message


def misuse(rank: int) -> list[str]:
    model = Branches()
    arena = Arena(model, ["third", "second", "first", "idle"])
    sync = GradSync(arena, plan_groups(arena.specs, "single"), GridComm(RankGrid(2, 1)))
    never_begun = message_of(sync.finish)
    sync.begin(last_micro_step=False)
    not_last = message_of(sync.finish)
    sync.begin()
    model(1.0).backward()
    twice = message_of(lambda: model(1.0).backward())
    sync.finish()
    sync.begin()
    (model(1.0) + model.idle.sum()).backward()
    in_flight = message_of(sync.begin)
    sync.finish()
    model.extra = nn.Parameter(torch.ones(()), requires_grad=False)
    arena = Arena(model, ["third", "second", "first", "idle"])
    frozen = GradSync(arena, plan_groups(arena.specs, "single"), GridComm(RankGrid(2, 1)))
    model.extra.requires_grad_(True)
    thawed = message_of(frozen.begin)
    added = message_of(lambda: GradSync(arena, frozen.plan, frozen.comm))
    frozen.close()
    sync.close()
    model(1.0).backward()  # no hook is left to object
    return [never_begun, not_last, twice, in_flight, thawed, added]


def test_misuse_is_named() -> None:
    never_begun, not_last, twice, in_flight, thawed, added = run_ranks(2, misuse)[0]
    assert "extra: trainable, but not in the arena; build the Arena" in thawed
    assert "extra: trainable, but not in the arena; build the Arena" in added
    assert "call finish() first" in in_flight
    assert "finish() without begin()" in never_begun
    assert "finish() without begin()" in not_last
    assert twice.startswith("InputError: "), "a network that runs backward twice is a mistake of its user"
    assert "received two gradients after one begin()" in twice
    assert "use_reentrant=False" in twice


def lose_a_rank(rank: int) -> str:
    model = network()
    arena, plan = build(model, lambda: model(batch(0, 0)).sum().backward(), "per_layer")
    sync = GradSync(arena, plan, GridComm(RankGrid(3, 1)))
    for step in range(10):
        sync.begin()
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        model(batch(rank, step)).sum().backward()
        message = message_of(sync.finish)
        if message != "no error":
            return message
    return "no error"


def test_a_dead_rank_raises_in_finish() -> None:
    results = run_ranks(3, lose_a_rank, collective_timeout_s=10, may_die=[1])
    assert results[1] is None
    for message in (results[0], results[2]):
        assert message != "no error"
