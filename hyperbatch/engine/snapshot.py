"""Takes a checkpoint of a run, finds the newest valid one, and restores a run from it.

engine/saver.py decides when a checkpoint is taken, and writes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.checkpoint import Checkpoint, Fixed
from hyperbatch.config import Config, ScheduleConfig, format_epochs
from hyperbatch.data.identity import sample_list
from hyperbatch.data.source import ArraySource
from hyperbatch.engine.folder import has_checkpoint
from hyperbatch.engine.learner import Learner, frozen
from hyperbatch.engine.ranks import Ranks, errors_shared, host_group, share
from hyperbatch.engine.run import Run
from hyperbatch.errors import Damaged
from hyperbatch.models.norm import merge_rows, persistent_buffers
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.optim.tensors import write_setting
from hyperbatch.schedule import learning_rate, position_of

STATISTICS = ("norm", "average_norm")  # tables of a checkpoint whose tensors have a row for each rank
_ALIGN_BYTES = 16  # alignment of the buffers in a message: the size of the largest element


class HostMemory:
    """Host memory that holds the tensors of a checkpoint until they are written. The next checkpoint reuses it.

    Tensors of an arena are views of a few flat buffers, so whole storages are copied, each once and at full bandwidth.
    With one copy per tensor, the overhead of the calls would exceed the time of the transfer.
    """

    def __init__(self, tables: Mapping[str, Mapping[str, Tensor]]) -> None:
        """tables: the tensors to copy; they must keep their addresses."""
        self.views: dict[str, dict[str, Tensor]] = {}  # the same tensors on the host
        self._pairs: dict[int, tuple[Tensor, Tensor]] = {}  # address of a storage -> its bytes there and on the host
        for table, tensors in tables.items():
            self.views[table] = {name: self._view(tensor) for name, tensor in tensors.items()}

    def _view(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._pairs:
            source = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
            self._pairs[storage.data_ptr()] = source, _place_for(source)
        place = self._pairs[storage.data_ptr()][1].untyped_storage()
        return torch.empty(0, dtype=tensor.dtype).set_(place, tensor.storage_offset(), tensor.shape, tensor.stride())

    def covers(self, tensor: Tensor) -> bool:
        """Whether `copy` copies the memory of this tensor."""
        return tensor.untyped_storage().data_ptr() in self._pairs

    def copy(self) -> dict[str, dict[str, Tensor]]:
        """Copies the tensors and returns the copies: views that are valid until the next call."""
        for source, place in self._pairs.values():
            place.copy_(source, non_blocking=True)
        for device in {source.device for source, _ in self._pairs.values() if source.is_cuda}:
            # Synchronises: later steps change the tensors, and the writing thread must not use the device.
            torch.cuda.current_stream(device).synchronize()
        return self.views


def _place_for(source: Tensor) -> Tensor:
    """Allocates the host memory for a copy. For a GPU it is pinned, unless the host allows no more pinned memory;
    copies then take longer."""
    try:
        return torch.empty(source.shape, dtype=source.dtype, pin_memory=source.is_cuda)
    except RuntimeError:
        return torch.empty(source.shape, dtype=source.dtype)


def snapshot(run: Run, memory: HostMemory | None) -> Checkpoint | None:
    """Returns a checkpoint of the run's current state. Every rank must call it, because statistics and shards are
    gathered; only rank 0 gets the checkpoint.

    memory: built from `tensors_of` on rank 0, None on the others. The checkpoint's tensors are views of it; `owned`
    prepares them for a file.
    """
    learner = run.learner
    if isinstance(learner.update, ShardedUpdate):
        learner.update.gather_state()
    norm = gather_rows(persistent_buffers(learner.model), run.ranks)
    average_norm = {} if learner.average is None else gather_rows(learner.average.statistics(), run.ranks)
    if memory is None:
        return None
    assert memory.covers(learner.arena.flat_weights()[-1]), "the model was moved after the run was built"
    copies = memory.copy()
    return Checkpoint(
        config=run.config,
        progress=replace(run.progress),
        fixed=Fixed(
            order=[slot.name for slot in learner.arena.slots],
            plan=learner.sync.plan,
            max_batch_per_rank=learner.max_batch_per_rank,
            decoder=run.loader.config.decoder,
            cpu_decode_share=run.loader.config.cpu_decode_share or 0.0,
            data={"train": sample_list(run.train_set).to_dict(), "val": sample_list(run.eval_set).to_dict()},
        ),
        clock=run.clock.state_dict(),
        data_wait_s=run.data_wait_s,
        model=copies["model"] | _frozen_in_full(learner.arena, copies["model"]),
        norm=norm,
        average=copies["average"],
        average_norm=average_norm,
        optimizer=copies["optimizer"] | group_state(learner.optimizer),
        scaler=learner.scaler.state_dict(),
        train_samples=len(run.train_set),
        classes=list(run.train_set.classes),
        channels=run.train_set.channels,
        mean=list(run.eval_set.mean),
        std=list(run.eval_set.std),
        whole=isinstance(run.eval_set, ArraySource),
    )


def tensors_of(learner: Learner) -> dict[str, dict[str, Tensor]]:
    """Returns the tensors of a checkpoint that are on the device."""
    average = {} if learner.average is None else learner.average.weights()
    state = param_state(learner.optimizer, learner.model)
    return {"model": _weights(learner.model, learner.arena), "optimizer": state, "average": average}


def owned(saved: Checkpoint) -> Checkpoint:
    """Returns the checkpoint with tensors that are contiguous and share no memory, so that each is written
    separately."""
    tables = {table: getattr(saved, table) for table in checkpoint.TABLES}
    return replace(
        saved,
        **{table: {name: _on_cpu(tensor) for name, tensor in tensors.items()} for table, tensors in tables.items()},
    )


def restore(run: Run, saved: Checkpoint) -> None:
    """Continues `saved` in a run that was built with it and therefore already has its weights."""
    _load_state(run, saved)
    run.clock.load_state_dict(saved.clock)
    run.progress = replace(saved.progress)
    run.waited_before_s = saved.data_wait_s
    run.warnings += saved.skipped
    if run.config.schedule.epochs != saved.config.schedule.epochs:
        run.warnings.append(longer_run(saved.config.schedule, run.config.schedule, run.epoch))


def longer_run(before: ScheduleConfig, now: ScheduleConfig, epoch: float) -> str:
    """Returns a note about the effect of a different number of epochs on the schedule of a run that is at `epoch`."""
    old, new = learning_rate(before, epoch), learning_rate(now, epoch)
    rate = f"stays {old:.4g}" if old == new else f"goes from {old:.4g} to {new:.4g}"
    return (
        f"--epochs {before.epochs:g} -> {now.epochs:g}: the schedule now runs to epoch {now.epochs:g}, and at epoch "
        f"{epoch:.4g} the learning rate {rate}; the result differs from a run started with {format_epochs(now.epochs)}"
    )


def put_back(run: Run, saved: Checkpoint) -> None:
    """Restores `saved` in a run that has trained since then; its clock continues. Values are written in place, because
    captured steps and tables of kernels contain their addresses."""
    learner = run.learner
    with torch.no_grad():
        for name, param in frozen(learner.model):
            param.copy_(saved.model[name])
    learner.arena.load_masters(saved.model)
    _load_state(run, saved)
    learner.arena.zero_grad()
    run.progress = replace(saved.progress)


def _load_state(run: Run, saved: Checkpoint) -> None:
    """Restores everything except the weights. saved: contains the statistics of one rank (`_on_every_rank`)."""
    learner = run.learner
    _load_buffers(learner.model, saved.norm)
    if learner.average is not None:
        learner.average.load(saved.average, {name: rows[0] for name, rows in saved.average_norm.items()})
    load_named_state(learner.optimizer, learner.model, saved.optimizer)
    learner.scaler.load_state_dict(saved.scaler)


def find_start(config: Config, ranks: Ranks, out: Path) -> tuple[Checkpoint | None, tuple[str, ...]]:
    """Returns the checkpoint to continue from, or None for a new run, and notes for the user, which only rank 0 gets.

    With --resume auto, a run whose checkpoints are all damaged starts again, because no user is present to decide.
    """
    resume, saved, told = config.run.resume, None, ()
    with errors_shared(ranks):
        if ranks.rank == 0 and (resume == "yes" or (resume == "auto" and has_checkpoint(out))):
            try:
                saved = _newest(config, out)
            except Damaged as error:
                if resume == "yes":
                    raise
                checkpoint.set_aside(out)
                told = (f"{error}; there is no other checkpoint, so the run starts again from the beginning",)
    return _on_every_rank(saved, ranks), told


def find_checkpoint(config: Config, ranks: Ranks, out: Path, *, before_step: int | None = None) -> Checkpoint:
    """Returns the newest readable checkpoint. before_step: only older ones are considered."""
    saved = None
    with errors_shared(ranks):
        if ranks.rank == 0:
            saved = _newest(config, out, before_step)
    saved = _on_every_rank(saved, ranks)
    assert saved is not None, "an error has been raised on every rank"
    return saved


def _newest(config: Config, out: Path, before_step: int | None = None) -> Checkpoint:
    saved = checkpoint.load(out, before_step=before_step)
    checkpoint.check_same_run(saved.config, config)
    return saved


def _on_every_rank(saved: Checkpoint | None, ranks: Ranks) -> Checkpoint | None:
    """Sends the checkpoint that rank 0 has read and checked to every rank, with the statistics of one rank: its own, or
    merged ones if the world size has changed.

    If each of thousands of ranks read the file instead, all would read the statistics of all ranks at once.
    """
    stacked = {}
    if saved is not None:
        stacked = {name: rows_for(getattr(saved, name), ranks.world_size) for name in STATISTICS}
        # These are copies, because a view would be sent with its whole storage.
        first = {name: {key: rows[:1].clone() for key, rows in table.items()} for name, table in stacked.items()}
        saved = replace(saved, **first)
    saved = share(saved, ranks)
    if saved is None:
        return None
    own = {name: scatter_rows(stacked.get(name, {}), getattr(saved, name), ranks) for name in STATISTICS}
    return replace(saved, **own)


def is_over(config: Config, saved: Checkpoint) -> bool:
    """Whether a resumed run has nothing left to do."""
    progress = saved.progress
    reached = progress.time_to_target_s is not None and config.run.stop_at_target
    stopped = 0 < config.run.max_steps <= progress.step or progress.is_stale(config.run.patience_evals)
    return reached or stopped or progress.position >= position_of(config.schedule.epochs, saved.train_samples)


def how_to_go_on(config: Config, saved: Checkpoint) -> str:
    """Returns why a resumed run has nothing left to do, and which option would continue it."""
    progress = saved.progress
    if progress.position >= position_of(config.schedule.epochs, saved.train_samples):
        return f"it has completed its {format_epochs(config.schedule.epochs)}; use a larger --epochs to continue"
    if progress.time_to_target_s is not None and config.run.stop_at_target:
        return "it has reached its target; use --no-stop-at-target to continue"
    if progress.is_stale(config.run.patience_evals):
        return f"it was stopped early by --patience-evals {config.run.patience_evals}; use a larger one to continue"
    return f"it was stopped by --max-steps {config.run.max_steps}; use a larger one, or 0 for none, to continue"


# Weights and optimizer state


def _weights(model: nn.Module, arena: Arena) -> dict[str, Tensor]:
    """Returns the parameters by name, as fp32 masters if the working weights have 16 bits."""
    masters = arena.named_masters()
    return {name: masters.get(name, param).detach() for name, param in model.named_parameters()}


def _frozen_in_full(arena: Arena, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns 16-bit frozen parameters with the values that they had before rounding. Parameters that were written
    since then, as whitening does, are omitted."""
    full = arena.frozen_in_full
    return {name: full[name] for name in full if full[name].to(weights[name].dtype).equal(weights[name])}


def named_state(optimizer: LayerwiseOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Returns the optimizer's state as name -> tensor on the CPU. Names and shapes do not depend on the world size."""
    state = param_state(optimizer, model) | group_state(optimizer)
    return {name: _on_cpu(tensor) for name, tensor in state.items()}


def param_state(optimizer: LayerwiseOptimizer, model: nn.Module) -> dict[str, Tensor]:
    """Returns the optimizer's state of each parameter, without a copy: `momentum_buffer/layer1.0.conv1.weight`, and
    `master/...` of 16-bit weights."""
    names = {param: name for name, param in model.named_parameters()}
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return {
        f"{key}/{names[param]}": value.detach()
        for param in params
        for key, value in optimizer.init_state(param).items()
    }


def group_state(optimizer: LayerwiseOptimizer) -> dict[str, Tensor]:
    """Returns the optimizer's state of each parameter group, e.g. `group0/last_lr`, on the CPU."""
    return {
        f"group{index}/{key}": torch.as_tensor(group[key], dtype=torch.float64).cpu().clone()
        for index, group in enumerate(optimizer.param_groups)
        for key in optimizer.group_state_names
    }


def load_named_state(optimizer: LayerwiseOptimizer, model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `named_state`. Raises a KeyError with the name of a missing tensor."""
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
    """Gathers the buffers of all ranks: maps names to CPU tensors [world_size, ...] on rank 0. On other ranks, they
    have only that rank's row.

    A rank sends the bytes of all its buffers in one message, and the tensors are views of the received message: rank 0
    receives 436 MB for ResNet-50 and 2,048 ranks, so nothing is copied or converted.
    """
    own = _packed({name: buffer.detach()[None] for name, buffer in buffers.items()}).cpu()  # a single copy to the host
    table = own
    if ranks.world_size > 1 and buffers:
        if ranks.rank == 0:
            table = own.new_empty(ranks.world_size, own.shape[1])
        dist.gather(own[0], [*table] if ranks.rank == 0 else None, dst=0, group=host_group())
    return _unpacked(table, {name: buffer[None] for name, buffer in buffers.items()})


def scatter_rows(stacked: Mapping[str, Tensor], like: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Tensor]:
    """The inverse of `gather_rows`: each rank gets its row of rank 0's tensors, as [1, ...]. If these have only one
    row, every rank gets it. like: on every rank, tensors of the same names and shapes with one row."""
    if ranks.world_size == 1 or not like:
        return dict(like)
    own = _packed(like)
    rows = [*_packed(stacked).expand(ranks.world_size, -1)] if ranks.rank == 0 else None
    dist.scatter(own[0], rows, src=0, group=host_group())
    return _unpacked(own, like)


def rows_for(stacked: dict[str, Tensor], world_size: int) -> dict[str, Tensor]:
    """Returns the statistics for `world_size` ranks: those of each rank, or one merged row if they were saved by a
    different number of ranks."""
    if all(len(tensor) == world_size for tensor in stacked.values()):
        return stacked
    return {name: tensor[None] for name, tensor in merge_rows(stacked).items()}


def _packed(stacked: Mapping[str, Tensor]) -> Tensor:
    """Concatenates the bytes of all tensors, row by row."""
    if not stacked:
        return torch.empty(1, 0, dtype=torch.uint8)
    first = next(iter(stacked.values()))
    gap = torch.zeros(len(first), _ALIGN_BYTES, dtype=torch.uint8, device=first.device)
    parts = []
    for tensor in stacked.values():
        rows = tensor.reshape(len(tensor), tensor[0].numel())
        # This is a copy, because rows of one element may have any stride.
        parts.append(rows.clone(memory_format=torch.contiguous_format).view(torch.uint8))
        parts.append(gap[:, : -parts[-1].shape[1] % _ALIGN_BYTES])
    return torch.cat(parts, dim=1)


def _unpacked(table: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `_packed`: returns views of the rows as tensors [len(table), ...]. like: the tensors that were
    packed, with any number of rows."""
    found, start = {}, 0
    for name, tensor in like.items():
        size_bytes = tensor[0].nbytes
        flat = table[:, start : start + size_bytes].view(tensor.dtype)
        found[name] = flat.reshape(len(table), *tensor.shape[1:])
        start += size_bytes + -size_bytes % _ALIGN_BYTES
    return found


def _load_buffers(model: nn.Module, norm: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, buffer in persistent_buffers(model).items():
            buffer.copy_(norm[name][0])
