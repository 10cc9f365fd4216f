"""What `train --dry-run` prints: a run resolved for a world size before anything starts, torch included."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import asdict
from typing import Any

from hyperbatch.config import Config, fields, format_value
from hyperbatch.data.source import DataCounts, check_data
from hyperbatch.launch import check_input
from hyperbatch.plan import inventory
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.types import DTYPE_BYTES, GroupPlan, RankGrid, TensorSpec
from hyperbatch.recipes import all_recipes, batch_note
from hyperbatch.schedule import learning_rate, resolve_phases, total_steps
from hyperbatch.sim.clusters import load_cluster


def preview(config: Config, world_size: int) -> dict[str, Any]:
    """Everything resolved: batch, steps, rate over time, groups, grid, bytes, memory."""
    counts = data_counts(config)
    samples, classes, channels = counts.train_samples, counts.classes, counts.channels
    check_input(config, world_size, counts)
    size = config.data.image_size
    available = device_memory_bytes()

    def memory_of(batch_per_rank: int) -> dict[str, int]:
        model, precision = config.model.model, config.optim.precision
        return inventory.memory_bytes(model, batch_per_rank, precision, size, classes, in_channels=channels)

    largest, memory = None, {}
    if config.model.model in inventory.model_names():
        fixed, one = memory_of(0)["total"], memory_of(1)["total"]
        largest = max(1, int((0.8 * available - fixed) / (1.5 * (one - fixed))))
    phases = resolve_phases(
        config.schedule.batch_phases,
        samples,
        world_size,
        accumulate=config.run.accumulate,
        max_batch_per_rank=largest,
    )
    if largest is not None:
        memory = memory_of(max(phase.batch_per_rank for phase in phases))
    specs = tensor_table(config, classes, channels)
    plan = preview_plan(config, specs)
    grid = RankGrid.parse(config.comm.grid) if config.comm.grid else default_grid(config, world_size)
    grid.check_world(world_size)
    epochs = config.schedule.epochs
    return {
        "recipe": config.recipe,
        "note": batch_note(config),
        "model": config.model.model,
        "parameters": sum(spec.numel for spec in specs),
        "data": counts.to_dict(),
        "world_size": world_size,
        "grid": str(grid),
        "algorithm": config.comm.algorithm,
        "wire_dtype": config.comm.wire_dtype,
        "precision": config.optim.precision,
        "epochs": epochs,
        "steps": total_steps(phases, samples, epochs),
        "phases": [
            asdict(phase)
            | {"from_epoch": phase.from_position / samples, "steps_per_epoch": samples / phase.global_batch}
            for phase in phases
        ],
        "schedule": schedule_table(config, phases, samples),
        "groups": [
            {"index": g.index, "parameters": len(g.parameters), "bytes": g.bytes, "dtype": g.dtype} for g in plan.groups
        ],
        "gradient_bytes": plan.bytes,
        "memory_bytes_per_rank": memory,
        "memory_bytes_available": available,
        "config": config.to_dict(),
    }


def data_counts(config: Config) -> DataCounts:
    """Counts of the data at hand, or those the recipe was written for when none is given."""
    if config.data.data is not None or config.data.dataset not in ("images", "cifar10"):
        return check_data(config.data)
    data = config.data
    return DataCounts(train_samples=data.train_samples, eval_samples=data.eval_samples, classes=data.classes)


def tensor_table(config: Config, classes: int, channels: int) -> tuple[TensorSpec, ...]:
    """In backward order; a model without a table is built on torch's meta device, which allocates nothing."""
    dtype = inventory.PRECISION_DTYPE[config.optim.precision]
    if config.model.model in inventory.model_names():
        return inventory.tensors(
            config.model.model, classes=classes, image_size=config.data.image_size, in_channels=channels, dtype=dtype
        )
    import torch

    from hyperbatch.models import create_model
    from hyperbatch.optim.params import kind_of

    with torch.device("meta"):
        model = create_model(config.model.model, classes=classes, in_channels=channels)
    specs = []
    for prefix, module in model.named_modules():
        for name, param in module.named_parameters(recurse=False):
            kind = kind_of(module, name, param)
            wide = dtype if kind == "weight" or DTYPE_BYTES[dtype] >= 4 else "float32"
            full = f"{prefix}.{name}" if prefix else name
            specs.append(TensorSpec(name=full, shape=tuple(param.shape), kind=kind, dtype=wide))
    return tuple(reversed(specs))


def preview_plan(config: Config, specs: tuple[TensorSpec, ...]) -> GroupPlan:
    comm = config.comm
    strategy = comm.grouping
    if strategy == "optimal":
        # Measured when the run starts; here tensors are taken to be ready one after the other at an even pace.
        pace = 1e-3
        return plan_groups(
            specs,
            strategy,
            ready_s=[pace * (i + 1) for i in range(len(specs))],
            cost=lambda nbytes: 1e-4 + nbytes / 10e9,
        )
    return plan_groups(
        specs, strategy, count=comm.group_count, threshold_bytes=comm.group_threshold_bytes, base=comm.group_base
    )


def default_grid(config: Config, world_size: int) -> RankGrid:
    """Hosts as the recipe's cluster has them, where that divides; the run itself takes the hosts it finds."""
    recipe = all_recipes().get(config.recipe)
    per_host = load_cluster(recipe.cluster).network.devices_per_node if recipe else 8
    whole = world_size > per_host and world_size % per_host == 0
    return RankGrid(world_size // per_host, per_host) if whole else RankGrid(1, world_size)


def schedule_table(config: Config, phases: Any, samples: int) -> list[dict[str, float]]:
    """Rate and batch at the moments that matter: start, end of warm-up, phase changes, and evenly between."""
    s = config.schedule
    moments = {0.0, s.warmup_epochs, *(s.epochs * k / 8 for k in range(8))}
    moments |= {phase.from_position / samples for phase in phases}
    moments |= {s.epochs - phases[-1].global_batch / samples}  # the last step
    rows = []
    for epoch in sorted(m for m in moments if 0 <= m < s.epochs):
        phase = next(p for p in reversed(phases) if p.from_position <= epoch * samples)
        rate = learning_rate(s, epoch, phase.global_batch)
        rows.append({"epoch": round(epoch, 3), "lr": rate, "global_batch": phase.global_batch})
    return rows


def device_memory_bytes() -> int:
    """Memory of one GPU here, or of the host where there is none; asked without loading torch."""
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=False).stdout.split()
        if answer and answer[0].isdigit():
            return int(answer[0]) << 20
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def format_preview(values: dict[str, Any], config: Config) -> str:
    """The same for a terminal."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=min(120, shutil.get_terminal_size((110, 40)).columns), highlight=False)
    counts = values["data"]
    with console.capture() as text:
        console.print(f"[bold]{values['recipe']}[/]  {values['model']}, {values['parameters']:,} parameters")
        console.print(
            f"data      {counts['train_samples']:,} training and {counts['eval_samples']:,} validation images, "
            f"{counts['classes']:,} classes"
        )
        console.print(
            f"ranks     {values['world_size']:,} as {values['grid']} (rows x columns), "
            f"{values['algorithm']} all-reduce, wire {values['wire_dtype'] or 'as gradients'}, {values['precision']}"
        )
        console.print(f"length    {values['epochs']:g} epochs, {values['steps']:,} steps")
        if values["note"]:
            console.print(f"note      {values['note']}")
        memory = values["memory_bytes_per_rank"]
        if memory:
            parts = ", ".join(f"{name} {size(n)}" for name, n in memory.items() if name != "total")
            console.print(
                f"memory    about {size(memory['total'])} a rank of {size(values['memory_bytes_available'])} ({parts})"
            )
        table = Table("from epoch", "global batch", "per rank", "micro-steps", "steps/epoch", title="batch", box=None)
        for p in values["phases"]:
            table.add_row(
                f"{p['from_epoch']:g}",
                f"{p['global_batch']:,}",
                f"{p['batch_per_rank']:,}",
                str(p["accumulation"]),
                f"{p['steps_per_epoch']:.1f}",
            )
        console.print(table)
        table = Table("epoch", "learning rate", "global batch", title="over time", box=None)
        for row in values["schedule"]:
            table.add_row(f"{row['epoch']:g}", f"{row['lr']:.5g}", f"{row['global_batch']:,}")
        console.print(table)
        title = f"gradient groups ({config.comm.grouping}, {size(values['gradient_bytes'])} a step)"
        table = Table("group", "tensors", "bytes", "dtype", title=title, box=None)
        for g in values["groups"]:
            table.add_row(str(g["index"]), str(g["parameters"]), size(g["bytes"]), g["dtype"])
        console.print(table)
        table = Table("field", "value", title="config", box=None)
        for spec in fields():
            table.add_row(spec.name, format_value(getattr(getattr(config, spec.section), spec.name)))
        console.print(table)
    return text.get().rstrip()


def size(nbytes: int) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("KB", 1e3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} B"
