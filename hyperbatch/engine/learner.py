"""Builds the parts of a training step, in the order in which they depend on each other.

model -> backward order -> arena -> groups -> exchange -> update rule
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.checkpoint import Checkpoint
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.comm.weights import broadcast_weights
from hyperbatch.config import Config
from hyperbatch.data.mix import mixes
from hyperbatch.engine.compiled import Compilation, CompiledRegions, choose_regions, prepare_compiler
from hyperbatch.engine.measure import choose_plan, fitting_batch, probe, probe_evaluation
from hyperbatch.engine.ranks import Ranks, errors_shared, host_grid, share
from hyperbatch.errors import InputError
from hyperbatch.models import Loss, create_from, pretrained_weights
from hyperbatch.models.initial import whitening_layer
from hyperbatch.models.layers import to_channels_last
from hyperbatch.models.norm import freeze, set_norm_group
from hyperbatch.optim.averaging import WeightAverage
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.clip import GradientClip
from hyperbatch.optim.muon import Muon
from hyperbatch.optim.precision import LossScaler, working_dtype
from hyperbatch.optim.sharded import ShardedUpdate
from hyperbatch.params import head_layer, owners
from hyperbatch.plan.files import fitted_groups
from hyperbatch.plan.types import RankGrid
from hyperbatch.schedule.layers import layer_factors
from hyperbatch.vocabulary import TIMM, TIMM_MODEL, is_foreign


class GraphMemory:
    """The stream and memory pool of graphs that run one after another, so that training and evaluation share memory.

    The stream belongs to it because torch keeps the memory of different streams apart.
    """

    stream: torch.cuda.Stream
    pool: Any

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.renew()

    def renew(self) -> None:
        """Starts a new pool for later captures; existing graphs keep theirs."""
        self.stream, self.pool = torch.cuda.Stream(self._device), torch.cuda.graph_pool_handle()


@dataclass(kw_only=True, slots=True)
class Learner:
    """One rank's model, its gradients and their exchange, and the rule that updates it."""

    device: torch.device
    dtype: torch.dtype  # of activations and working weights
    in_channels: int  # of the images
    loss: Loss
    mixed_labels: bool  # batches have labels of mixed images (data/mix.py)
    model: nn.Module
    arena: Arena
    sync: GradSync
    optimizer: LayerwiseOptimizer
    update: LayerwiseOptimizer | ShardedUpdate  # its `step` is called: the optimizer itself, or its sharded form
    scaler: LossScaler
    clip: GradientClip | None
    average: WeightAverage | None  # of the weights over steps
    max_batch_per_rank: int  # samples of a micro-step that fit into memory
    fused: bool  # forward and backward run through our kernels
    compiled: CompiledRegions | Compilation  # a Compilation if nothing will be compiled, with the reason
    capturable: bool  # whether it was built so that steps can be captured in CUDA graphs
    graph_memory: GraphMemory | None = None  # shared by all of its graphs, on a GPU
    notes: tuple[str, ...] = ()  # what the user should know about how it was built

    @property
    def comm(self) -> GridComm:
        return self.sync.comm

    @property
    def compilation(self) -> Compilation:
        return self.compiled.about if isinstance(self.compiled, CompiledRegions) else self.compiled


def build_learner(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    *,
    classes: int,
    in_channels: int,
    cache_bytes: int = 0,
    class_names: Sequence[str] | None = None,
    saved: Checkpoint | None = None,
) -> Learner:
    """Builds the learner of a config. Every rank must call it.

    class_names: of the data, if known: pretrained weights of other classes get a new head.
    cache_bytes: size of the images that the loader may cache on the GPU.
    saved: the run that is continued. Its weights and measurements are used here; `snapshot.restore` does the rest.
    """
    if config.model.compile == "on" or (config.model.compile == "auto" and device.type == "cuda"):
        prepare_compiler(ranks.local_size)
    capturable = wants_graph(config, device)
    dtype = working_dtype(config.optim.precision)
    notes: list[str] = []
    model = initial_model(
        config, ranks, classes=classes, in_channels=in_channels, class_names=class_names, saved=saved, notes=notes
    )
    to_channels_last(model.to(device))

    comm = GridComm(choose_grid(config, ranks))
    if config.model.bn_group_ranks > 1:
        set_norm_group(model, _norm_group(config.model.bn_group_ranks, ranks))

    def blank(size: int) -> torch.Tensor:
        return torch.zeros(2, size, size, in_channels, device=device).permute(0, 3, 1, 2)

    sample = blank(config.data.largest_image_size)  # a batch that fits at this size fits in every step
    if saved is None:
        order, sample_bytes = probe(model, sample, classes)
        if is_foreign(config.model.model):  # such a model may accept images of some sizes only
            for size in config.data.image_sizes[:-1]:
                probe(model, blank(size), classes)
            probe_evaluation(model, blank(config.data.eval_size), classes)
        order = share(order, ranks)
    else:
        order, sample_bytes = saved.fixed.order, 0
    # Gradients stay where autograd allocated them until their group is sent: one multi-tensor copy moves each group.
    arena = Arena(model, order, dtype=dtype, copy_on_ready=False)
    if ranks.rank > 0:
        arena.frozen_in_full.clear()  # rank 0 writes the checkpoints
    fused = use_fused(config, model, dtype, device)
    if saved is None:
        # Ranks that start from different weights would never become equal.
        broadcast_weights(arena, comm)
        if ranks.world_size > 1:
            _broadcast_frozen(model)
        max_batch = fitting_batch(config.optim, model, arena, sample, sample_bytes, cache_bytes, ranks)
        if config.comm.plan is None:
            plan = share(choose_plan(config.comm, arena, model, sample, comm), ranks)
        else:
            with errors_shared(ranks):
                plan = fitted_groups(Path(config.comm.plan), arena.specs, config.model.model)
    else:
        max_batch, plan = saved.fixed.max_batch_per_rank, saved.fixed.plan

    wire = config.comm.wire_dtype
    sync = GradSync(
        arena,
        plan,
        comm,
        wire_dtype=None if wire is None else working_dtype(wire),
        algorithm=config.comm.algorithm,
        hybrid_switch_bytes=config.comm.hybrid_switch_bytes,
        sharded=config.scatters_gradients,
    )
    # On a GPU, rates are device tensors in plain steps, too. Plain and captured steps thus read the same fp32 numbers
    # and give the same bits.
    on_gpu = device.type == "cuda"
    optimizer = build_optimizer(config.optim, model, arena, lr=config.schedule.lr, capturable=capturable or on_gpu)
    if config.comm.sharded_update and isinstance(optimizer, Muon):
        optimizer.share(comm)
    scaler = LossScaler(config.optim.precision, optimizer, device=device)
    limit = config.optim.clip_norm
    compiled = choose_regions(config, model, dtype, device, fused=fused)
    if config.model.compile == "on" and isinstance(compiled, Compilation):
        notes.append(f"--compile on has no effect: {compiled.reason}")
    return Learner(
        device=device,
        dtype=dtype,
        in_channels=in_channels,
        loss=Loss(name=config.optim.loss, smoothing=config.optim.label_smoothing, threshold=config.optim.bce_threshold),
        mixed_labels=mixes(config.data),
        model=model,
        arena=arena,
        sync=sync,
        optimizer=optimizer,
        update=ShardedUpdate(optimizer, arena, sync) if sync.sharded else optimizer,
        scaler=scaler,
        clip=GradientClip(limit, arena, sync, optimizer) if limit else None,
        average=None if config.optim.averaging == "none" else WeightAverage(config.optim, model, arena, optimizer),
        max_batch_per_rank=max_batch,
        fused=fused,
        compiled=compiled,
        capturable=capturable,
        graph_memory=GraphMemory(device) if capturable and on_gpu else None,
        notes=tuple(notes),
    )


def frozen(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the frozen parameters, which are not in the arena."""
    return [(name, param) for name, param in model.named_parameters() if not param.requires_grad]


@torch.no_grad()
def _broadcast_frozen(model: nn.Module) -> None:
    """Sends rank 0's buffers and frozen parameters, which are not in the arena, to all ranks."""
    for tensor in (*model.buffers(), *(param for _, param in frozen(model))):
        sent = tensor.contiguous()
        dist.broadcast(sent, src=0)
        tensor.copy_(sent)


def initial_model(
    config: Config,
    ranks: Ranks,
    *,
    classes: int,
    in_channels: int,
    class_names: Sequence[str] | None = None,
    saved: Checkpoint | None = None,
    notes: list[str] | None = None,
) -> nn.Module:
    """Returns the model on the CPU, with the initial weights of a run of this config and with its frozen layers frozen.

    class_names: of the data, if known. notes: receives a line if the head is initialised again.
    """
    # The same seed gives every rank the same weights; rank 0's are broadcast nevertheless.
    torch.manual_seed(config.run.seed)
    with errors_shared(ranks):
        model = create_from(config.model, classes=classes, in_channels=in_channels)
        if config.model.whiten_samples:
            # `engine.whiten` sets the layer's filters when training begins. A layer that does not fit is an error here.
            _, layer = whitening_layer(model)
            if layer.bias is not None and config.optim.whiten_bias_epochs == 0:
                layer.bias.requires_grad_(False)
        if working_dtype(config.optim.precision) == torch.float64:
            model.double()
        if saved is not None:
            checkpoint.fill_model(model, saved.model, where=saved.path)
        elif config.model.init_from is not None and ranks.rank == 0:  # rank 0 sends them to the others
            note = fill_from(config, model, in_channels=in_channels, class_names=class_names)
            if note is not None and notes is not None:
                notes.append(note)
        names = list(owners(model))
        factors = layer_factors(config.optim.layer_rates, names, head_layer(model))
        freeze(model, {name for name in names if not factors[name]})
    return model


def fill_from(
    config: Config, model: nn.Module, *, in_channels: int, class_names: Sequence[str] | None, fetch: bool = True
) -> str | None:
    """Loads the weights of `--init-from` into the model. Returns a note if the head keeps its own initial weights.
    fetch: False checks only the shapes of timm's weights."""
    source = config.model.init_from
    assert source is not None
    if source != TIMM:
        weights = checkpoint.load_weights(Path(source))
    else:
        source = f"timm's {config.model.model.removeprefix(TIMM_MODEL)}"
        tensors = pretrained_weights(config.model.model, in_channels=in_channels, fetch=fetch)
        weights = checkpoint.Weights(tensors, None)
    return checkpoint.start_from(model, weights, classes=class_names, where=source)


def wants_graph(config: Config, device: torch.device) -> bool:
    """Whether to capture steps in CUDA graphs: on GPUs, unless the config forbids it."""
    if config.run.graph == "on" and device.type != "cuda":
        raise InputError(
            f"--graph on: CUDA graphs need a GPU, and this run is on the {device.type.upper()}; use --graph auto"
        )
    return config.run.graph != "off" and device.type == "cuda"


def use_fused(config: Config, model: nn.Module, dtype: torch.dtype, device: torch.device) -> bool:
    """Switches the model to the fused kernels if they can run, and returns whether it did. If they cannot run,
    `--fused on` is an error."""
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
    """Returns the config's grid, or hosts x ranks per host. Every rank must call it."""
    if config.comm.grid is None:
        return host_grid(ranks)
    grid = RankGrid.parse(config.comm.grid)
    grid.check_world(ranks.world_size)
    return grid


def _norm_group(size: int, ranks: Ranks) -> dist.ProcessGroup | None:
    """Returns the group of ranks with which this rank shares batch-norm statistics. Every rank creates every group, as
    torch requires."""
    if ranks.world_size % size:
        raise InputError(
            f"--bn-group-ranks {size} does not divide the number of ranks, {ranks.world_size}; use a divisor of it"
        )
    mine: Any = None
    for first in range(0, ranks.world_size, size):
        group = dist.new_group(list(range(first, first + size)))
        if first <= ranks.rank < first + size:
            mine = group
    return mine
