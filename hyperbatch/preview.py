"""The output of `train --dry-run`: a run resolved for a world size, before anything starts and without torch."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from hyperbatch.config import Config, fields, format_epochs, format_value
from hyperbatch.data.source import DataCounts, check_data, has_data, open_data
from hyperbatch.engine.agent import count_gpus, cpu_has_bf16
from hyperbatch.errors import InputError
from hyperbatch.launch import check_input
from hyperbatch.memory import host_memory_bytes
from hyperbatch.plan import inventory
from hyperbatch.plan.clusters import load_cluster
from hyperbatch.plan.files import fitted_groups
from hyperbatch.plan.fit import StepMemory
from hyperbatch.plan.strategies import group_options, plan_groups
from hyperbatch.plan.types import GroupPlan, RankGrid, TensorSpec
from hyperbatch.plan.workload import model_tensors, resolve_all, step_memory
from hyperbatch.recipes import all_recipes, recipe_notes
from hyperbatch.schedule import FULL_SIZE, Phase, full_size_epochs, learning_rate, repeats_note, size_spans, total_steps
from hyperbatch.schedule.layers import GroupSummary, ParamRow
from hyperbatch.tables import text_table
from hyperbatch.vocabulary import HALF_DTYPES, PRECISION_DTYPE, is_foreign


class ScheduleRow(NamedTuple):
    epoch: float
    lr: float
    global_batch: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """A run with all values resolved: batch, steps, rate over time, groups, grid, bytes, memory."""

    config: Config
    counts: DataCounts
    world_size: int
    grid: RankGrid
    phases: tuple[Phase, ...]
    schedule: tuple[ScheduleRow, ...]
    specs: tuple[TensorSpec, ...]
    optimizer_groups: GroupSummary
    plan: GroupPlan
    memory: StepMemory | None  # of the largest micro-step; None if it is not known
    memory_bytes_available: int
    start_note: str | None = None  # the effect of --init-from on the head

    @property
    def note(self) -> str | None:
        repeats = repeats_note(self.config.schedule.batch_phases, self.counts.train_samples)
        return "; ".join(filter(None, (*recipe_notes(self.config), repeats))) or None

    @property
    def parameters(self) -> int:
        return sum(spec.numel for spec in self.specs)

    @property
    def steps(self) -> int:
        return total_steps(self.phases, self.counts.train_samples, self.config.schedule.epochs)

    def to_dict(self) -> dict[str, Any]:
        config, samples = self.config, self.counts.train_samples
        return {
            "recipe": config.recipe,
            "note": self.note,
            "start_note": self.start_note,
            "model": config.model.model,
            "parameters": self.parameters,
            "data": self.counts.to_dict(),
            "world_size": self.world_size,
            "grid": str(self.grid),
            "algorithm": config.comm.algorithm,
            "wire_dtype": config.comm.wire_dtype,
            "precision": config.optim.precision,
            "epochs": config.schedule.epochs,
            "steps": self.steps,
            "phases": [
                asdict(phase)
                | {"from_epoch": phase.from_position / samples, "steps_per_epoch": samples / phase.global_batch}
                for phase in self.phases
            ],
            "schedule": [row._asdict() for row in self.schedule],
            "groups": [
                {"index": g.index, "parameters": len(g.parameters), "bytes": g.bytes, "dtype": g.dtype}
                for g in self.plan.groups
            ],
            "gradient_bytes": self.plan.bytes,
            "optimizer_groups": self.optimizer_groups.to_dict(),
            "memory_bytes_per_rank": self.memory.to_dict() if self.memory else {},
            "memory_bytes_available": self.memory_bytes_available,
            "config": config.to_dict(),
        }


def preview(config: Config, world_size: int) -> Preview:
    # A run queries which 16-bit format its GPU supports. Here bf16 is assumed, which all recent GPUs support.
    on_gpu = config.run.device != "cpu" and count_gpus() > 0
    config = config.with_precision("bf16" if on_gpu or cpu_has_bf16() else "fp32", on_gpu=on_gpu)
    counts = data_counts(config)
    check_input(config, world_size, counts)
    channels, available = counts.channels, device_memory_bytes(on_gpu=on_gpu)
    at_hand = config.override(train_samples=counts.train_samples, classes=counts.classes)
    known = has_known_memory(at_hand, channels)
    phases = resolve_all(at_hand, available if known else None, world_size, channels)
    memory = step_memory(at_hand, max(phase.batch_per_rank for phase in phases), channels) if known else None
    specs, groups = tensors_and_groups(at_hand, channels)
    grid = RankGrid.parse(config.comm.grid) if config.comm.grid else default_grid(config, world_size)
    grid.check_world(world_size)
    return Preview(
        config=config,
        counts=counts,
        world_size=world_size,
        grid=grid,
        phases=phases,
        schedule=schedule_table(config, phases, counts.train_samples),
        specs=specs,
        optimizer_groups=groups,
        plan=preview_plan(config, specs),
        memory=memory,
        memory_bytes_available=available,
        start_note=None if config.model.init_from is None else start_note(at_hand, channels),
    )


def has_known_memory(config: Config, channels: int) -> bool:
    """Whether the memory of a step can be computed. False for a model of timm or the user that cannot be traced here,
    for example because it needs a GPU."""
    if not is_foreign(config.model.model):
        return True
    inventory.ask_for(config.model.model)
    with contextlib.suppress(InputError):
        step_memory(config, 1, channels)
        return True
    return False


def start_note(config: Config, channels: int) -> str | None:
    """Returns the note that the run would print about its head. Raises InputError if the weights do not fit."""
    from hyperbatch.engine.learner import fill_from
    from hyperbatch.models import create_from, without_values

    names = open_data(config.data)[0].classes if has_data(config.data) else None
    model = without_values(partial(create_from, config.model, classes=config.data.classes, in_channels=channels))
    return fill_from(config, model, in_channels=channels, class_names=names, fetch=False)


def data_counts(config: Config) -> DataCounts:
    """Returns the counts of the given data, or those that the recipe was written for if no data is given."""
    if has_data(config.data):
        return check_data(config.data)
    data = config.data
    return DataCounts(train_samples=data.train_samples, eval_samples=data.eval_samples, classes=data.classes)


def tensors_and_groups(config: Config, channels: int) -> tuple[tuple[TensorSpec, ...], GroupSummary]:
    """Returns the trainable tensors in backward order, and their optimizer groups. A model without a table, or with
    different rates by layer, is built without values."""
    optim = config.optim
    if config.model.model in inventory.model_names() and not optim.layer_rates and optim.layer_decay == 1.0:
        specs = model_tensors(config, channels)
        return specs, GroupSummary.of(
            ParamRow(s.name, s.numel, optim.weight_decay > 0 and (s.decayed or optim.decay_norm_bias), 1.0)
            for s in reversed(specs)
        )
    from hyperbatch.models import create_from, without_values
    from hyperbatch.models.norm import freeze
    from hyperbatch.optim.build import group_summary, rate_factors
    from hyperbatch.params import kind_of, owners

    model = without_values(partial(create_from, config.model, classes=config.data.classes, in_channels=channels))
    freeze(model, {name for name, factor in rate_factors(optim, model).items() if not factor})
    dtype = PRECISION_DTYPE[optim.precision]
    specs = []
    for name, (module, local) in owners(model).items():
        param = module.get_parameter(local)
        if param.requires_grad:
            kind = kind_of(module, param)
            wide = dtype if kind == "weight" or dtype not in HALF_DTYPES else "float32"
            specs.append(TensorSpec(name=name, shape=tuple(param.shape), kind=kind, dtype=wide))
    return tuple(reversed(specs)), group_summary(optim, model)


def preview_plan(config: Config, specs: tuple[TensorSpec, ...]) -> GroupPlan:
    if config.comm.plan is not None:
        return fitted_groups(Path(config.comm.plan), specs, config.model.model)
    options = group_options(config.comm)
    if config.comm.grouping == "optimal":
        # The run measures this at its start. Here, tensors are assumed to become ready one by one at a constant pace.
        pace = 1e-3
        options["ready_s"] = [pace * (i + 1) for i in range(len(specs))]
        options["cost"] = lambda nbytes: 1e-4 + nbytes / 10e9
    return plan_groups(specs, config.comm.grouping, **options)


def default_grid(config: Config, world_size: int) -> RankGrid:
    """Returns the grid with the ranks per host of the recipe's cluster, if that divides the world size. The run itself
    uses its actual hosts."""
    recipe = all_recipes().get(config.recipe)
    per_host = load_cluster(recipe.cluster).network.devices_per_node if recipe else 8
    return RankGrid.of_hosts(world_size, per_host)


def schedule_table(config: Config, phases: tuple[Phase, ...], samples: int) -> tuple[ScheduleRow, ...]:
    """Returns rate and batch at important moments: start, end of warm-up, phase changes, last step, and evenly
    between."""
    s = config.schedule
    moments = {0.0, s.warmup_epochs, *(s.epochs * k / 8 for k in range(8))}
    moments |= {phase.from_position / samples for phase in phases}
    moments |= {s.epochs - phases[-1].global_batch / samples}  # the last step
    rows = []
    for epoch in sorted(m for m in moments if 0 <= m < s.epochs):
        phase = next(p for p in reversed(phases) if p.from_position <= epoch * samples)
        rows.append(ScheduleRow(round(epoch, 3), learning_rate(s, epoch), phase.global_batch))
    return tuple(rows)


def device_memory_bytes(*, on_gpu: bool) -> int:
    """Returns the memory of one GPU here, or of the host, without loading torch."""
    if on_gpu and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.split()
        if answer and answer[0].isdigit():
            return int(answer[0]) << 20
    return host_memory_bytes()


def format_preview(preview: Preview) -> str:
    """Returns a preview as text for a terminal."""
    from rich.console import Console

    width = min(120, shutil.get_terminal_size((110, 40)).columns)
    console = Console(width=width, highlight=False, markup=False, emoji=False)  # names of files may contain brackets
    config, counts = preview.config, preview.counts
    samples = counts.train_samples
    with console.capture() as text:
        frozen = " to train" if any(not factor for _, factor in config.optim.layer_rates) else ""
        console.print(config.recipe, style="bold", end="")
        console.print(f"  {config.model.model}, {preview.parameters:,} parameters{frozen}")
        console.print(
            f"data      {samples:,} training and {counts.eval_samples:,} validation images, {counts.classes:,} classes"
        )
        console.print(
            f"ranks     {preview.world_size:,} in a grid of {preview.grid} (rows x columns), "
            f"{config.comm.algorithm} all-reduce in {config.comm.wire_dtype or 'the precision of the gradients'}, "
            f"training in {config.optim.precision}"
        )
        console.print(f"length    {format_epochs(config.schedule.epochs)}, {preview.steps:,} steps")
        first, *later = size_spans(config)
        if later:
            sizes = [f"{first.image_size} px", *(f"{s.image_size} from epoch {s.from_epoch:g}" for s in later)]
            cost = f"as many pixels as {full_size_epochs(config):.3g} epochs at {FULL_SIZE} px"
            console.print(f"images    {', '.join(sizes)}: {cost}")
        decayed, rest = preview.optimizer_groups.decayed, preview.optimizer_groups.undecayed
        console.print(
            f"decay     weight decay on {decayed.parameters:,} parameters ({decayed.tensors:,} tensors), none on "
            f"{rest.parameters:,} ({rest.tensors:,} tensors)"
        )
        for note in filter(None, (preview.note, preview.start_note)):
            console.print(f"note      {note}")
        if preview.memory:
            parts = ", ".join(f"{name} {size(n)}" for name, n in asdict(preview.memory).items() if n)
            needed, available = size(preview.memory.total), size(preview.memory_bytes_available)
            console.print(f"memory    each rank needs about {needed} of {available} available ({parts})")
    batches = [
        (
            f"{p.from_position / samples:g}",
            f"{p.global_batch:,}",
            f"{p.share_per_rank:,}",
            _micro_steps(p.share_per_rank, p.accumulation),
            f"{samples / p.global_batch:.1f}",
        )
        for p in preview.phases
    ]
    groups = [(g.index, len(g.parameters), f"{g.bytes / 1e3:,.1f}", g.dtype) for g in preview.plan.groups]
    rates = [(f"{row.epoch:g}", f"{row.lr:.5g}", f"{row.global_batch:,}") for row in preview.schedule]
    factors = [
        (f"{row.factor:.4g}", f"{row.count.tensors:,}", f"{row.count.parameters:,}", row.first)
        for row in preview.optimizer_groups.factors
    ]
    by_layer = text_table(("factor", "tensors", "parameters", "from"), factors, left=0) if factors else []
    values = [(spec.name, format_value(spec.of(config))) for spec in fields()]
    grouping = config.comm.grouping if config.comm.plan is None else f"of {config.comm.plan}"
    exchanged = f"gradient groups ({grouping}, {size(preview.plan.bytes)} per step)"
    return "\n".join(
        [
            text.get().rstrip(),
            *(
                "",
                "batch",
                *text_table(("from epoch", "global", "per rank", "micro-steps", "steps/epoch"), batches, left=0),
            ),
            *("", "learning rate", *text_table(("epoch", "rate", "global batch"), rates, left=0)),
            *(["", "learning rate by layer", *by_layer] if by_layer else []),
            *("", exchanged, *text_table(("group", "tensors", "kB", "dtype"), groups, left=0)),
            *("", "config", *text_table(("field", "value"), values, left=2)),
        ]
    )


def _micro_steps(share: int, accumulation: int) -> str:
    """Returns for example "3 of 171 to 172", or "1" without accumulation."""
    low, high = share // accumulation, -(-share // accumulation)
    return "1" if accumulation == 1 else f"{accumulation} of {low:,}" + (f" to {high:,}" if high > low else "")


def size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
