"""The sharded update against the plain one: grids, precisions, rules; skipped steps; state that is whole again."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.engine.snapshot import load_named_state, named_state
from hyperbatch.errors import InputError
from hyperbatch.optim import base
from hyperbatch.optim.build import set_rate
from hyperbatch.optim.lamb import LAMB
from hyperbatch.optim.lars import LARS
from hyperbatch.optim.muon import Muon
from hyperbatch.optim.precision import LossScaler
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.params import param_groups
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import RankGrid

STEPS = 6


class Layers(nn.Module):
    """Gradients are small integers on every rank, so that sums are exact in any order and any precision."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 5, 3, bias=False).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(5)
        self.idle = nn.Parameter(torch.ones(9))
        self.fc = nn.Linear(17, 7)

    def loss(self, rank: int, step: int) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for i, (name, param) in enumerate(self.named_parameters()):
            if name != "idle":
                values = (torch.arange(param.numel()) * 5 + i + 3 * rank + step) % 9 - 4
                total = total + (param.double() * values.view(param.shape)).sum()
        return total


class Trainer:
    def __init__(
        self, comm: GridComm, dtype: torch.dtype, *, sharded: bool, algorithm: str = "flat", **options
    ) -> None:
        self.model = Layers()
        order = [name for name, _ in self.model.named_parameters()][::-1]
        self.arena = Arena(self.model, order, dtype=dtype)
        plan = plan_groups(self.arena.specs, "cubic", base=1)
        self.sync = GradSync(self.arena, plan, comm, algorithm=algorithm, sharded=sharded)
        groups = param_groups(self.model, 0.01)
        kind = options.pop("kind", LARS)
        if options.pop("plain", False):
            groups = [{**group, "adapt": False} for group in groups]
        trust = {"trust_coefficient": 0.1} if kind is LARS else {}
        self.optimizer = kind(groups, lr=0.5, arena=self.arena, **trust, **options)
        precision = {torch.float16: "fp16", torch.bfloat16: "bf16"}.get(dtype, "fp32")
        self.scaler = LossScaler(precision, self.optimizer, initial_scale=8.0)
        self.update = ShardedUpdate(self.optimizer, self.arena, self.sync) if sharded else self.optimizer

    def step(self, rank: int, step: int, *, spoil: bool = False) -> None:
        set_rate(self.optimizer, 0.5 / (1 + step))
        self.arena.zero_grad()
        self.sync.begin()
        (self.scaler.scale(self.model.loss(rank, step)) * (torch.inf if spoil else 1.0)).backward()
        self.sync.finish()
        self.update.step()
        self.scaler.update()

    def state(self) -> dict[str, Tensor]:
        if isinstance(self.update, ShardedUpdate):
            self.update.gather_state()
        masters = self.arena.named_masters()
        weights = {f"weight/{name}": masters.get(name, p).detach().clone() for name, p in self.model.named_parameters()}
        return {**weights, **named_state(self.optimizer, self.model)}

    def close(self) -> None:
        self.sync.close()


def relative(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """The largest difference, against the largest value of its tensor."""
    assert a.keys() == b.keys()
    return max(((a[k].double() - b[k].double()).abs().max() / (b[k].abs().max() + 1e-30)).item() for k in a)


def compare(rank: int, grid: str, algorithm: str, dtype: torch.dtype, options: dict) -> list[float]:
    comm = GridComm(RankGrid.parse(grid))
    plain = Trainer(comm, dtype, sharded=False, **options)
    sharded = Trainer(comm, dtype, sharded=True, algorithm=algorithm, **options)
    for step in range(STEPS):
        for trainer in (plain, sharded):
            trainer.step(rank, step)
    whole = sharded.arena.weights[dtype]
    everywhere = [torch.empty_like(whole) for _ in range(comm.size)] if comm.size > 1 else [whole]
    if comm.size > 1:
        dist.all_gather(everywhere, whole)
    assert all(torch.equal(whole, other) for other in everywhere), "ranks hold the same weights"
    assert torch.equal(sharded.model.idle, torch.ones(9).to(dtype)), "an unused parameter stays"
    norms, expected = sharded.optimizer.layer_norms(), plain.optimizer.layer_norms()
    assert norms.keys() == expected.keys()
    for name, values in norms.items():
        assert torch.tensor(values).allclose(torch.tensor(expected[name]), rtol=1e-5, equal_nan=True), name
    return [relative(sharded.state(), plain.state())]


RULES = (
    {},
    {"momentum_rule": "rescaled", "nesterov": True},
    {"momentum_rule": "unscaled", "decoupled_weight_decay": True, "foreach": True},
    {"kind": LAMB},
    {"kind": LAMB, "betas": (0.8, 0.9), "trust_clip": True, "capturable": True},
    {"kind": LAMB, "plain": True},
)


@pytest.mark.parametrize(
    ("grid", "algorithm", "dtype", "options"),
    [
        ("1x1", "flat", torch.float32, RULES[0]),
        ("2x1", "flat", torch.float32, RULES[0]),
        ("2x1", "flat", torch.float64, RULES[1]),
        ("1x3", "torus", torch.float32, RULES[1]),
        ("4x1", "torus", torch.bfloat16, RULES[1]),
        ("2x2", "torus", torch.float16, RULES[0]),
        ("2x2", "hybrid", torch.float64, RULES[2]),
        ("2x3", "torus", torch.float64, RULES[0]),
        ("5x1", "hierarchical", torch.float64, RULES[2]),
        ("1x1", "flat", torch.float32, RULES[3]),
        ("2x2", "torus", torch.float64, RULES[3]),
        ("2x1", "flat", torch.float16, RULES[4]),
        ("2x1", "flat", torch.float64, RULES[5]),
        ("4x1", "flat", torch.bfloat16, RULES[5]),
    ],
)
def test_sharded_equals_plain(grid: str, algorithm: str, dtype: torch.dtype, options: dict) -> None:
    """16-bit gradients are exact on 2 and 4 ranks; norms add up in another order, in fp64: only rounding is left."""
    limit = {torch.float64: 1e-13}.get(dtype, 1e-5)
    for (difference,) in run_ranks(RankGrid.parse(grid).size, compare, grid, algorithm, dtype, options):
        assert difference <= limit


def skip_a_step(rank: int) -> None:
    trainer = Trainer(GridComm(RankGrid(2, 2)), torch.float16, sharded=True, algorithm="torus")
    trainer.step(rank, 0)
    before = trainer.state()
    trainer.step(rank, 1, spoil=rank == 2)  # one rank's inf reaches one shard only, and must stop all
    assert trainer.scaler.skipped.item() == 1
    after = trainer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.step(rank, 2)
    assert trainer.scaler.skipped.item() == 1
    assert not torch.equal(after["weight/fc.weight"], trainer.state()["weight/fc.weight"])


def test_an_inf_on_one_rank_skips_the_step_on_all() -> None:
    run_ranks(4, skip_a_step)


def told_on_one_rank(rank: int) -> None:
    """torch's GradScaler hands `found_inf` over; its gradients here are all finite."""
    trainer = Trainer(GridComm(RankGrid(2, 1)), torch.float32, sharded=True)
    trainer.step(rank, 0)
    before = trainer.state()
    trainer.optimizer.found_inf = torch.tensor([1.0 if rank == 1 else 0.0])
    trainer.step(rank, 1)
    del trainer.optimizer.found_inf
    assert trainer.scaler.skipped.item() == 1
    after = trainer.state()
    assert all(torch.equal(before[name], after[name]) for name in before)
    trainer.step(rank, 2)
    assert not torch.equal(after["weight/fc.weight"], trainer.state()["weight/fc.weight"])


def test_an_inf_that_one_rank_was_told_of_skips_the_step_on_all() -> None:
    run_ranks(2, told_on_one_rank)


def edit_and_stop(rank: int) -> None:
    """Decoupled decay does nothing at rate 0, and 16-bit weights that somebody edits through `.data` stay edited."""
    options = {"momentum_rule": "lr_outside", "decoupled_weight_decay": True}
    trainer = Trainer(GridComm(RankGrid(2, 1)), torch.bfloat16, sharded=True, **options)
    trainer.step(rank, 0)
    before = trainer.state()
    for param in trainer.model.parameters():
        param.data.clamp_(-0.1, 0.05)
    edited = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    for group in trainer.optimizer.param_groups:
        group["lr"] = 0.0
    trainer.update.step()
    after = trainer.state()
    for name, param in trainer.model.named_parameters():
        assert torch.equal(param, edited[name]), name
        old = before[f"weight/{name}"]
        if name != "idle":
            expected = torch.where(old.to(param.dtype) == edited[name], old, edited[name].to(old.dtype))
            assert torch.equal(after[f"weight/{name}"], expected), name


def test_edited_weights_stay_and_rate_0_decays_nothing() -> None:
    run_ranks(2, edit_and_stop)


class Operations(TorchDispatchMode):
    """Names of the operations of this thread."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.add(str(function.overloadpacket).removeprefix("aten."))
        return function(*args, **(kwargs or {}))


def second_step(rank: int, options: dict) -> list[str]:
    """As on a GPU, where the host must not read whether a step is bad."""
    trainer = Trainer(GridComm(RankGrid(2, 1)), torch.float16, sharded=True, capturable=True, **options)
    base.read_is_free = lambda device: False
    trainer.step(rank, 0)
    trainer.arena.zero_grad()
    trainer.sync.begin()
    trainer.scaler.backward(trainer.model.loss(rank, 1).float())
    trainer.sync.finish()
    before = trainer.arena.weights[torch.float16].clone()
    with Operations() as operations:
        trainer.update.step()
        trainer.scaler.update()
    assert not torch.equal(before, trainer.arena.weights[torch.float16])
    return sorted(operations.names)


@pytest.mark.parametrize(
    "options", [{}, {"momentum_rule": "rescaled", "nesterov": True, "trust_clip": True}, {"kind": LAMB}], ids=str
)
def test_a_step_takes_nothing_from_the_host_and_tells_it_nothing(options: dict) -> None:
    """So that a CUDA graph can capture it: values of the host (lift_fresh: torch.tensor) would be those of the capture,
    and whoever reads a value (_local_scalar_dense: item) waits for the device."""
    for names in run_ranks(2, second_step, options):
        assert "_foreach_copy_" in names, "the comparison can fail"
        assert not {"lift_fresh", "_local_scalar_dense", "nonzero"} & set(names)


def scheduled(rank: int) -> float:
    trainer = Trainer(GridComm(RankGrid.parse("1x2")), torch.float32, sharded=True)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(trainer.optimizer, 0.5)
    trainer.step(rank, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler.step()
    return trainer.optimizer.param_groups[0]["lr"]


def test_torchs_schedulers_follow_a_sharded_step() -> None:
    assert run_ranks(2, scheduled) == [0.25, 0.25]


def save(rank: int, grid: str, start: dict | None, first: int, last: int) -> dict[str, Tensor]:
    comm = GridComm(RankGrid.parse(grid))
    trainer = Trainer(comm, torch.bfloat16, sharded=True, momentum_rule="rescaled")
    if start is not None:
        trainer.arena.load_masters({k.removeprefix("weight/"): v for k, v in start.items() if k.startswith("weight/")})
        load_named_state(trainer.optimizer, trainer.model, start)
    for step in range(first, last):
        trainer.step(0, step)  # every rank the same gradients: their mean does not depend on how many there are
    return trainer.state()


def test_state_is_by_name_and_free_of_the_world_size() -> None:
    through = run_ranks(2, save, "2x1", None, 0, 4)[0]
    half_way = run_ranks(2, save, "2x1", None, 0, 2)
    assert all(torch.equal(half_way[0][name], half_way[1][name]) for name in half_way[0])
    resumed = run_ranks(3, save, "1x3", half_way[0], 2, 4)
    assert relative(resumed[2], through) < 1e-5
    assert relative(half_way[0], through) > 1e-3, "the comparison can fail"


def refuse(rank: int) -> None:
    comm = GridComm(RankGrid(2, 1))
    model = Layers()
    arena = Arena(model, [name for name, _ in model.named_parameters()])
    plan = plan_groups(arena.specs, "single")
    muon = Muon([model.fc.weight], lr=0.1, arena=arena)
    with pytest.raises(InputError, match=r"supports sgd, lars, lamb and adamw, not muon; call optimizer.share\(comm\)"):
        ShardedUpdate(muon, arena, GradSync(arena, plan, comm, sharded=True))
    lars = LARS(model.parameters(), lr=0.1, arena=arena)
    sync = GradSync(arena, plan, comm, sharded=True)
    with pytest.raises(RuntimeError, match=r"that of ShardedUpdate\(optimizer, arena, sync\)"):
        lars.step()  # would give every rank other weights
    sync.close()
    lars.step()
    with pytest.raises(InputError, match="sharded=True"):
        ShardedUpdate(lars, arena, GradSync(arena, plan, comm))
    with pytest.raises(InputError, match=r"in the arena; give arena=\.\.\. to LARS"):
        ShardedUpdate(LARS(model.parameters(), lr=0.1), arena, sync)
    with pytest.raises(InputError, match="optimizer is a value of type SGD; give one of hyperbatch"):
        ShardedUpdate(torch.optim.SGD(model.parameters()), arena, sync)
    with pytest.raises(InputError, match="sharded True"):
        GradSync(arena, plan, comm, sharded=rank == 0)


def test_what_does_not_fit_is_named() -> None:
    run_ranks(2, refuse)
