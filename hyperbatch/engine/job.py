"""A run, built: everything the loop uses, made in the order in which the parts need each other.

ranks -> data -> model -> backward order -> arena -> groups -> exchange -> update rule -> (resume)
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.config import Config
from hyperbatch.data.decoders import measured_decoder
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import Source, open_data
from hyperbatch.engine import state
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.measure import choose_plan, fitting_batch, probe
from hyperbatch.engine.ranks import Ranks, host_grid, share, together
from hyperbatch.errors import InputError
from hyperbatch.models import create_model
from hyperbatch.models.norm import set_norm_group
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.build import build_optimizer, load_named_state, named_state
from hyperbatch.optim.precision import LossScaler, working_dtype
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.plan.types import GroupPlan, RankGrid
from hyperbatch.recipes import batch_note
from hyperbatch.schedule import Phase, resolve_phases


@dataclass(slots=True)
class Progress:
    """How far the run is. With it and the tensors a run can be continued."""

    step: int = 0  # steps done
    position: int = 0  # samples consumed
    top1: float | None = None
    time_to_target_s: float | None = None


@dataclass(kw_only=True, slots=True)
class Job:
    """What one rank trains with."""

    config: Config
    ranks: Ranks
    device: torch.device
    dtype: torch.dtype  # of activations and working weights
    train_set: Source
    eval_set: Source
    model: nn.Module
    comm: GridComm
    arena: Arena
    plan: GroupPlan
    sync: GradSync
    optimizer: LayerwiseOptimizer
    update: LayerwiseOptimizer | ShardedUpdate  # what steps: the optimizer itself, or its sharded form
    scaler: LossScaler
    loader: TrainLoader
    phases: tuple[Phase, ...]
    fixed: dict[str, Any]  # measured once, kept with the run: order, groups, the batch that fits
    progress: Progress
    warnings: list[str]
    fused: bool  # forward and backward run through our kernels
    graph: bool  # steps are to be captured in CUDA graphs; False again once that has failed
    waited_before_s: float = 0.0

    @property
    def epoch(self) -> float:
        """Passes over the training set so far."""
        return self.progress.position / len(self.train_set)

    @property
    def data_wait_s(self) -> float:
        """Seconds this rank has waited for batches, in the runs this one continues, too."""
        return self.waited_before_s + self.loader.wait_s

    @property
    def reached(self) -> bool:
        return self.progress.time_to_target_s is not None

    def save(self, folder: Path, clock: Clock) -> None:
        """Every rank takes part (batch-norm statistics and shards are gathered); rank 0 writes."""
        if isinstance(self.update, ShardedUpdate):
            self.update.gather_state()
        norm = state.gather_buffers(self.model, self.ranks)
        if self.ranks.rank != 0:
            return
        snapshot = {
            "config": self.config.to_dict(),
            "progress": asdict(self.progress),
            "fixed": self.fixed,
            "clock": clock.state_dict(),
            "data_wait_s": self.data_wait_s,
            "model": state.weights(self.model, self.arena),
            "norm": norm,
            "optimizer": named_state(self.optimizer, self.model),
            "scaler": self.scaler.state_dict(),
            "train_samples": len(self.train_set),
            "classes": list(self.train_set.classes),
            "channels": self.train_set.channels,
        }
        checkpoint.save(folder / "checkpoints", self.progress.step, snapshot, keep=self.config.run.keep_checkpoints)

    def close(self) -> None:
        self.sync.close()
        self.loader.close()


def build_job(config: Config, ranks: Ranks, device: torch.device, saved: dict[str, Any] | None, clock: Clock) -> Job:
    """Builds the run, or rebuilds it as the checkpoint `saved` left it."""
    progress, warnings = Progress(), notes(config, device)
    graph = wants_graph(config, device, warnings)
    with together(ranks):
        train_set, eval_set = open_data(config.data)

    # The same seed gives every rank the same weights; rank 0's are sent round all the same, below.
    dtype = working_dtype(config.optim.precision)
    torch.manual_seed(config.run.seed)
    with together(ranks):
        model = create_model(
            config.model.model,
            classes=len(train_set.classes),
            in_channels=train_set.channels,
            zero_init_last_gamma=config.model.zero_init_last_gamma,
            bn_momentum=config.model.bn_momentum,
        )
        if config.model.init_from is not None and saved is None:
            path = Path(config.model.init_from)
            state.load_weights(model, checkpoint.load_weights(path), where=str(path))
    model.to(device).to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if dtype == torch.float64:
        model.double()

    comm = GridComm(choose_grid(config, ranks))
    if config.model.bn_group_ranks > 1:
        set_norm_group(model, _norm_group(config.model.bn_group_ranks, ranks))

    size = config.data.image_size
    sample = torch.zeros(2, size, size, train_set.channels, device=device).permute(0, 3, 1, 2)
    if saved is None:
        order, sample_bytes = probe(model, sample)
        fixed = {
            "order": share(order, ranks),
            "max_batch_per_rank": fitting_batch(model, sample_bytes, dtype, config.optim.optimizer, device, ranks),
            "decoder": share(measured_decoder(train_set, config.data, device, ranks_per_host=ranks.local_size), ranks),
        }
    else:
        fixed = saved["fixed"]
    # Gradients stay where autograd put them until their group leaves: one multi-tensor copy per group.
    arena = Arena(model, fixed["order"], dtype=dtype, copy_on_ready=False)
    fused = use_fused(config, model, dtype, device)
    if saved is None:
        state.broadcast_model(model, arena, ranks)
        fixed["plan"] = share(choose_plan(config.comm, arena, model, sample, comm).to_dict(), ranks)
    else:
        state.load_weights(model, saved["model"], where="the checkpoint", arena=arena)
    plan = GroupPlan.from_dict(fixed["plan"])
    phases = resolve_phases(
        config.schedule.batch_phases,
        len(train_set),
        ranks.world_size,
        accumulate=config.run.accumulate,
        max_batch_per_rank=fixed["max_batch_per_rank"],
    )

    wire = config.comm.wire_dtype
    sync = GradSync(
        arena,
        plan,
        comm,
        wire_dtype=None if wire is None else working_dtype(wire),
        algorithm=config.comm.algorithm,
        hybrid_switch_bytes=config.comm.hybrid_switch_bytes,
        sharded=config.comm.sharded_update,
    )
    optimizer = build_optimizer(config.optim, model, arena, lr=config.schedule.lr, capturable=graph)
    update = ShardedUpdate(optimizer, arena, sync) if config.comm.sharded_update else optimizer
    scaler = LossScaler(config.optim.precision, optimizer, device=device)
    loader = TrainLoader(
        train_set,
        replace(config.data, decoder=fixed.get("decoder", config.data.decoder)),
        seed=config.run.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device,
        dtype=dtype,
        ranks_per_host=ranks.local_size,
    )
    if saved is not None:
        state.load_buffers(model, saved["norm"], ranks)
        load_named_state(optimizer, model, saved["optimizer"])
        scaler.load_state_dict(saved["scaler"])
        clock.load_state_dict(saved["clock"])
        progress = Progress(**saved["progress"])
        warnings += saved["skipped"]
    return Job(
        config=config,
        ranks=ranks,
        device=device,
        dtype=dtype,
        train_set=train_set,
        eval_set=eval_set,
        model=model,
        comm=comm,
        arena=arena,
        plan=plan,
        sync=sync,
        optimizer=optimizer,
        update=update,
        scaler=scaler,
        loader=loader,
        phases=phases,
        fixed=fixed,
        progress=progress,
        warnings=warnings,
        fused=fused,
        graph=graph,
        waited_before_s=0.0 if saved is None else saved["data_wait_s"],
    )


def notes(config: Config, device: torch.device) -> list[str]:
    """What the user should know about this run before it starts."""
    found = [batch_note(config)]
    if device.type == "cpu" and config.optim.precision in ("fp16", "bf16"):
        found.append(f"{config.optim.precision} is many times slower than fp32 on a CPU; use --precision fp32 here")
    return [note for note in found if note]


def wants_graph(config: Config, device: torch.device, warnings: list[str]) -> bool:
    """Whether to capture steps; what is known to forbid it is an error where it was asked for, else a warning."""
    if config.run.graph == "off":
        return False
    reason = None
    if device.type != "cuda":
        reason = f"CUDA graphs need a GPU, and this run is on the {device.type.upper()}"
    if reason is None:
        return True
    if config.run.graph == "on":
        raise InputError(f"--graph on: {reason}; use --graph auto")
    if device.type == "cuda":  # nobody expects them elsewhere
        warnings.append(f"steps run without a CUDA graph: {reason}")
    return False


def use_fused(config: Config, model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Switches the model to the fused kernels where they can run; where they cannot, asking for them is an error."""
    if config.model.fused == "off" or (config.model.fused == "auto" and device.type != "cuda"):
        return False
    from hyperbatch.models import fused  # imports Triton

    reason = fused.why_not_fused(model, dtype, device)
    if reason is None:
        fused.fuse(model)
    elif config.model.fused == "on":
        raise InputError(f"--fused on: {reason}; use --fused auto")
    return reason is None


def choose_grid(config: Config, ranks: Ranks) -> RankGrid:
    """The config's grid, or hosts x ranks per host. Every rank calls it."""
    if config.comm.grid is None:
        return host_grid(ranks)
    grid = RankGrid.parse(config.comm.grid)
    grid.check_world(ranks.world_size)
    return grid


def _norm_group(size: int, ranks: Ranks) -> dist.ProcessGroup | None:
    """The neighbours this rank shares batch-norm statistics with; every rank makes every group, as torch requires."""
    if ranks.world_size % size:
        raise InputError(f"--bn-group-ranks {size} does not divide the {ranks.world_size} ranks")
    mine: Any = None
    for first in range(0, ranks.world_size, size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= ranks.rank < first + size:
            mine = group
    return mine
