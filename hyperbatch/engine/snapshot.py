"""A run's checkpoints: taken of a run, written by rank 0, found again, and put into a run that continues it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.checkpoint import Checkpoint, Fixed, per_rank
from hyperbatch.config import Config
from hyperbatch.data.identity import sample_list
from hyperbatch.engine.ranks import Ranks, errors_shared, host_group, share
from hyperbatch.engine.run import Run
from hyperbatch.models.norm import merge_norm_statistics
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.optim.tensors import write_setting
from hyperbatch.schedule import position_of


def save(run: Run, out: Path) -> None:
    """Every rank calls it; rank 0 writes."""
    saved = snapshot(run)
    if saved is not None:
        checkpoint.save(out / "checkpoints", saved, keep=run.config.run.keep_checkpoints)


def snapshot(run: Run) -> Checkpoint | None:
    """The run as it stands. Every rank takes part, since statistics and shards are gathered; only rank 0 gets it."""
    learner = run.learner
    if isinstance(learner.update, ShardedUpdate):
        learner.update.gather_state()
    norm = gather_rows(dict(learner.model.named_buffers()), run.ranks)
    average_norm = {} if learner.average is None else gather_rows(learner.average.statistics(), run.ranks)
    if run.ranks.rank != 0:
        return None
    return Checkpoint(
        config=run.config,
        progress=replace(run.progress),
        fixed=Fixed(
            order=[slot.name for slot in learner.arena.slots],
            plan=learner.sync.plan,
            max_batch_per_rank=learner.max_batch_per_rank,
            decoder=run.loader.config.decoder,
            data={"train": sample_list(run.train_set).to_dict(), "val": sample_list(run.eval_set).to_dict()},
        ),
        clock=run.clock.state_dict(),
        data_wait_s=run.data_wait_s,
        model=_weights(learner.model, learner.arena),
        norm=norm,
        average={name: _on_cpu(tensor) for name, tensor in learner.average.weights().items()}
        if learner.average
        else {},
        average_norm=average_norm,
        optimizer=named_state(learner.optimizer, learner.model),
        scaler=learner.scaler.state_dict(),
        train_samples=len(run.train_set),
        classes=list(run.train_set.classes),
        channels=run.train_set.channels,
    )


def restore(run: Run, saved: Checkpoint) -> None:
    """Continues `saved` in a run that was built with it, and so has its weights already."""
    learner = run.learner
    _load_buffers(learner.model, saved.norm, run.ranks)
    if learner.average is not None:
        learner.average.load(saved.average, row_of(saved.average_norm, run.ranks))
    load_named_state(learner.optimizer, learner.model, saved.optimizer)
    learner.scaler.load_state_dict(saved.scaler)
    run.clock.load_state_dict(saved.clock)
    run.progress = replace(saved.progress)
    run.waited_before_s = saved.data_wait_s
    run.warnings += saved.skipped


def find_checkpoint(config: Config, ranks: Ranks, out: Path) -> Checkpoint:
    """The newest readable checkpoint, chosen and checked by rank 0: ranks must not go on from different steps."""
    saved = None
    with errors_shared(ranks):
        if ranks.rank == 0:
            saved = checkpoint.load(out)
            checkpoint.check_same_run(saved.config, config)
    path, skipped = share(None if saved is None else (saved.path, saved.skipped), ranks)
    with errors_shared(ranks):
        if saved is None:
            saved = replace(checkpoint.load(Path(path)), skipped=skipped)
    assert saved is not None, "an error has been raised on every rank"
    return saved


def is_over(config: Config, saved: Checkpoint) -> bool:
    """Whether a resumed run has nothing left to do."""
    progress = saved.progress
    reached = progress.time_to_target_s is not None and config.run.stop_at_target
    stopped = 0 < config.run.max_steps <= progress.step
    return reached or stopped or progress.position >= position_of(config.schedule.epochs, saved.train_samples)


# Weights and optimizer state


def _weights(model: nn.Module, arena: Arena) -> dict[str, Tensor]:
    """Parameters by name; fp32 masters where the working weights have 16 bits."""
    masters = arena.named_masters()
    return {name: _on_cpu(masters.get(name, param)) for name, param in model.named_parameters()}


def named_state(optimizer: LayerwiseOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """The optimizer's state as name -> tensor on the CPU, e.g. `momentum_buffer/layer1.0.conv1.weight`.

    Also `master/...` of 16-bit weights, and `group0/last_lr`. Names and shapes do not depend on the world size.
    """
    names = {param: name for name, param in model.named_parameters()}
    tensors: dict[str, Tensor] = {}
    for index, group in enumerate(optimizer.param_groups):
        for param in group["params"]:
            for key, value in optimizer.init_state(param).items():
                tensors[f"{key}/{names[param]}"] = _on_cpu(value)
        for key in optimizer.group_state_names:
            tensors[f"group{index}/{key}"] = torch.as_tensor(group[key], dtype=torch.float64).cpu().clone()
    return tensors


def load_named_state(optimizer: LayerwiseOptimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `named_state`. A KeyError names what is missing."""
    names = {param: name for name, param in model.named_parameters()}
    with torch.no_grad():
        for index, group in enumerate(optimizer.param_groups):
            for param in group["params"]:
                for key, value in optimizer.init_state(param).items():
                    value.copy_(tensors[f"{key}/{names[param]}"])
                    if key == "master":
                        param.copy_(value)
            for key in optimizer.group_state_names:
                write_setting(group, key, tensors[f"group{index}/{key}"].item())
    optimizer.refresh()


def _on_cpu(value: Tensor) -> Tensor:
    return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


# Batch-norm statistics, which differ between ranks


def gather_rows(buffers: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """name -> tensor[world_size, ...] on the CPU of rank 0; the others' tables hold their own rank only.

    All buffers travel as one flat tensor, so a large world gathers one message per rank.
    """
    own = {name: _on_cpu(buffer) for name, buffer in buffers.items()}
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


def row_of(stacked: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """Each rank its own statistics again; merged ones when the world size has changed."""
    rows = per_rank(stacked)
    return rows[ranks.rank] if len(rows) == ranks.world_size else merge_norm_statistics(rows)


def _load_buffers(model: nn.Module, stacked: Mapping[str, Tensor], ranks: Ranks) -> None:
    row = row_of(stacked, ranks)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            buffer.copy_(row[name])
