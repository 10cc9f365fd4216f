"""`hyperbatch simulate`: predicts a recipe's step time, and time, energy and cost to target, at several sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from hyperbatch.config import Config
from hyperbatch.plan.compute import peak_flops
from hyperbatch.plan.inventory import training_flops
from hyperbatch.plan.machine import Cluster
from hyperbatch.plan.planner import StepPlan, plan_step
from hyperbatch.plan.types import RankGrid
from hyperbatch.plan.workload import (
    Request,
    RunSpan,
    at_size,
    image_channels,
    main_span,
    model_times,
    resolve,
    resolve_all,
    run_spans,
    step_memory,
)
from hyperbatch.schedule import Phase, size_spans
from hyperbatch.sim.convergence import Interval, epochs_to_target, evaluations, failure_overhead
from hyperbatch.tables import text_table

STEP_ERROR = 0.15  # nine in ten published runs are predicted within it; see docs/simulator_validation.md
YEAR_S = 365 * 24 * 3600

StepOf = Callable[[Phase, int], StepPlan]  # (batch phase, image size) -> step


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSeconds:
    """The time of one run to its target, by what it is spent on. The total does not include start-up."""

    total_s: float
    train_s: float
    eval_s: float
    checkpoint_s: float
    failures_s: float
    init_s: float
    epochs: float
    evaluations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class SpanSpeed:
    """The speed of a part of a run in which neither the batch nor the image size changes."""

    epochs: float
    image_size: int
    global_batch: int
    step_s: float
    exposed_comm_s: float
    images_per_s: float
    train_s: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The run on one number of GPUs. `phase`, `image_size` and `step` are those of the part with most pixels."""

    gpus: int
    nodes: int
    algorithm: str  # the requested algorithm; the groups of a step may use others
    phase: Phase
    image_size: int
    step: StepPlan
    spans: tuple[SpanSpeed, ...]
    epochs: Interval
    time_to_target_s: Interval
    run: RunSeconds
    lower_bound_s: float
    memory_bytes: int
    energy_kwh: float
    cost_usd: float | None
    notes: tuple[str, ...]

    @property
    def images_per_s(self) -> float:
        return self.phase.global_batch / self.step.timing.step_s

    @property
    def efficiency(self) -> float:
        return self.step.alone_s / self.step.timing.step_s

    def to_dict(self) -> dict[str, Any]:
        timing = self.step.timing
        return {
            "gpus": self.gpus,
            "nodes": self.nodes,
            "grid": str(self.step.grid),
            "algorithm": self.algorithm,
            "strategy": self.step.plan.strategy,
            "groups": len(self.step.plan.groups),
            "global_batch": self.phase.global_batch,
            "batch_per_rank": self.phase.batch_per_rank,
            "accumulation": self.phase.accumulation,
            "image_size": self.image_size,
            "step_s": timing.step_s,
            "slow_step_s": self.step.slow_step_s,
            "forward_s": timing.forward_s,
            "backward_s": timing.backward_s,
            "exposed_comm_s": timing.exposed_comm_s,
            "update_s": timing.update_s,
            "images_per_s": self.images_per_s,
            "images_per_s_per_gpu": self.images_per_s / self.gpus,
            "efficiency": self.efficiency,
            "epochs": self.epochs.mid,
            "epochs_interval": asdict(self.epochs),
            "time_to_target_s": asdict(self.time_to_target_s),
            "run": asdict(self.run),
            "spans": [asdict(span) for span in self.spans],
            "lower_bound_s": self.lower_bound_s,
            "memory_bytes": self.memory_bytes,
            "energy_kwh": self.energy_kwh,
            "cost_usd": self.cost_usd,
            "timing": timing.to_dict(),
            "notes": list(self.notes),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The result of `hyperbatch simulate`: one prediction for each number of GPUs."""

    recipe: str
    cluster: str
    device: str
    model: str
    precision: str
    target_top1: float | None
    points: tuple[Prediction, ...]

    def to_dict(self) -> dict[str, Any]:
        return asdict(replace(self, points=())) | {"points": [point.to_dict() for point in self.points]}


def simulate(
    recipe: str | Config,
    *,
    cluster: str | Cluster | None = None,
    gpus: int | Sequence[int] | None = None,
    model: str | None = None,
    algorithm: str | None = None,
    grid: str | RankGrid | None = None,
    strategy: str | None = None,
    global_batch: int | None = None,
    batch_per_rank: int | None = None,
) -> Simulation:
    """Predicts the run that `train` would make on each number of GPUs. Arguments left at None come from the recipe.

    `format_simulation` formats the result as a table, and `to_dict()["points"]` is a list that pandas.DataFrame
    accepts.

    model: replaces the model of the recipe. `timm/NAME` may also be given instead of a recipe.
    grid: a `RankGrid`, or ROWSxCOLUMNS such as "4x8". Without a grid in the call or in the recipe, it is the default of
    `train`, hosts x devices per host. `hyperbatch plan` searches for better grids.
    """
    counts = (list(gpus) or [None]) if isinstance(gpus, Iterable) else [gpus]
    choices = {"algorithm": algorithm, "grid": grid, "strategy": strategy}
    requests = [
        resolve(recipe, cluster, count, model=model, global_batch=global_batch, batch_per_rank=batch_per_rank)
        for count in counts
    ]
    first = requests[0]
    return Simulation(
        recipe=recipe if isinstance(recipe, str) else first.config.recipe,
        cluster=first.cluster.name,
        device=first.cluster.device.name,
        model=first.config.model.model,
        precision=first.config.optim.precision,
        target_top1=first.config.run.target_top1,
        points=tuple(_predict(request, **choices) for request in requests),
    )


def _predict(
    request: Request, *, algorithm: str | None, grid: str | RankGrid | None, strategy: str | None
) -> Prediction:
    config, machine, ranks = request.config, request.cluster, request.ranks
    phases = resolve_all(config, machine.device.memory_bytes, ranks)
    name = algorithm or config.comm.algorithm

    @cache
    def step_of(phase: Phase, image_size: int) -> StepPlan:
        sized = at_size(config, image_size)
        return plan_step(machine, sized, ranks, phase, grid=grid, algorithm=name, strategy=strategy)

    epochs = epochs_to_target(config, request.written_for, max(phase.global_batch for phase in phases))
    low, run, high = (
        _run(config, machine, ranks, phases, step_of, count) for count in (epochs.low, epochs.mid, epochs.high)
    )
    total = Interval(low.total_s * (1 - STEP_ERROR), run.total_s, high.total_s * (1 + STEP_ERROR))
    main = main_span(run_spans(config, phases))
    spans = [(span, step_of(span.phase, span.image_size)) for span in run_spans(config, phases, run.epochs)]
    nodes = machine.network.nodes(ranks)
    hours = total.mid / 3600
    price = machine.price_usd_per_device_hour
    return Prediction(
        gpus=ranks,
        nodes=nodes,
        algorithm=name,
        phase=main.phase,
        image_size=main.image_size,
        step=step_of(main.phase, main.image_size),
        spans=tuple(_speed(config, span, step) for span, step in spans),
        epochs=epochs,
        time_to_target_s=total,
        run=run,
        lower_bound_s=lower_bound(machine, config, ranks, epochs.mid),
        memory_bytes=step_memory(config, main.phase.batch_per_rank).total,
        energy_kwh=nodes * machine.node_power_w / 1e3 * hours,
        cost_usd=None if price is None else ranks * price * hours,
        notes=request.notes,
    )


def lower_bound(cluster: Cluster, config: Config, ranks: int, epochs: float) -> float:
    """The time in seconds if every device only computed the network's arithmetic at its peak. No run can be shorter."""
    data = config.data
    work = {
        size: training_flops(
            config.model.model, classes=data.classes, image_size=size, in_channels=image_channels(config)
        )
        for size in {span.image_size for span in size_spans(config)}
    }
    planned = sum(span.epochs * work[span.image_size] for span in size_spans(config))
    images = epochs / config.schedule.epochs * data.train_samples
    return images * planned / (ranks * peak_flops(cluster.device, config.optim.precision))


def _speed(config: Config, span: RunSpan, step: StepPlan) -> SpanSpeed:
    timing = step.timing
    return SpanSpeed(
        epochs=(span.to_position - span.from_position) / config.data.train_samples,
        image_size=span.image_size,
        global_batch=span.phase.global_batch,
        step_s=timing.step_s,
        exposed_comm_s=timing.exposed_comm_s,
        images_per_s=span.phase.global_batch / timing.step_s,
        train_s=span.steps * timing.step_s,
    )


def _run(
    config: Config, cluster: Cluster, ranks: int, phases: Sequence[Phase], step_of: StepOf, epochs: float
) -> RunSeconds:
    count, last_epoch = evaluations(config, epochs)
    spans = run_spans(config, phases, last_epoch)
    train = sum(span.steps * step_of(span.phase, span.image_size).timing.step_s for span in spans)

    batch = max(1, min(phases[-1].batch_per_rank, -(-config.data.eval_samples // ranks)))
    evaluated = at_size(config, config.data.eval_size)
    forward = sum(layer.forward_s for layer in model_times(cluster, evaluated, batch))
    rounds = -(-config.data.eval_samples // (batch * ranks))
    evaluation = count * (rounds * forward + cluster.eval_overhead_s)

    saves = int(last_epoch // config.run.checkpoint_every_epochs) if config.run.checkpoint_every_epochs else 0
    save_s = step_memory(config, 1).stored / cluster.storage_bytes_per_s if cluster.storage_bytes_per_s else 0.0
    interval = train / saves if saves else train
    busy = train + evaluation + saves * save_s
    failures = failure_overhead(
        busy, cluster.network.nodes(ranks), cluster.node_mtbf_s, interval, cluster.init_s + save_s
    )
    return RunSeconds(
        total_s=busy + failures,
        train_s=train,
        eval_s=evaluation,
        checkpoint_s=saves * save_s,
        failures_s=failures,
        init_s=cluster.init_s,
        epochs=last_epoch,
        evaluations=count,
    )


def format_simulation(simulation: Simulation) -> str:
    """Formats the result of `simulate` as text."""
    points = simulation.points
    priced = all(point.cost_usd is not None for point in points)
    goal = "to the end" if simulation.target_top1 is None else "to target"
    accumulates = any(point.phase.accumulation > 1 for point in points)
    titles = ["GPUs", "grid", "all-reduce", "batch", "per GPU", *(["micro-steps"] if accumulates else []), "step ms"]
    titles += ["exposed ms", "images/s", "efficiency %", "epochs", goal, "low", "high", "at best", "kWh"]
    titles += ["USD"] if priced else []
    rows = []
    for point in points:
        time, phase, timing = point.time_to_target_s, point.phase, point.step.timing
        row = [
            f"{point.gpus:,}",
            str(point.step.grid),
            point.algorithm,
            f"{phase.global_batch:,}",
            f"{phase.batch_per_rank:,}",
            *([f"{phase.accumulation:,}"] if accumulates else []),
            f"{timing.step_s * 1e3:,.2f}",
            f"{timing.exposed_comm_s * 1e3:,.2f}",
            f"{point.images_per_s:,.0f}",
            f"{100 * point.efficiency:.1f}",
            f"{point.epochs.mid:.1f}",
            *(_duration(seconds) for seconds in (time.mid, time.low, time.high, point.lower_bound_s)),
            f"{point.energy_kwh:,.1f}" if point.energy_kwh >= 0.05 else "<0.1",
        ]
        rows.append([*row, f"{point.cost_usd:,.0f}"] if priced else row)
    target = "" if simulation.target_top1 is None else f", to {simulation.target_top1:.1%}"
    lines = [f"{simulation.recipe} ({simulation.model}, {simulation.precision}{target}) on {simulation.cluster}", ""]
    lines += text_table(titles, rows, left=0)
    lines += [
        "",
        "exposed: communication that does not overlap with backward    low, high: the interval of the prediction",
        "at best: the time if all GPUs computed at their peak throughout",
    ]
    if any(len(point.spans) > 1 for point in points):
        lines += ["", *_format_spans(points)]
    notes = [f"note ({point.gpus:,} GPUs): {note}" for point in points for note in point.notes]
    return "\n".join([*lines, *notes])


def _format_spans(points: Sequence[Prediction]) -> list[str]:
    """Formats the parts of a run that changes its batch or image size. The table before it shows only the main part."""
    titles = ("GPUs", "epochs", "px", "batch", "step ms", "exposed ms", "images/s", "training")
    rows = [
        (
            f"{point.gpus:,}",
            f"{span.epochs:.1f}",
            span.image_size,
            f"{span.global_batch:,}",
            f"{span.step_s * 1e3:,.2f}",
            f"{span.exposed_comm_s * 1e3:,.2f}",
            f"{span.images_per_s:,.0f}",
            _duration(span.train_s),
        )
        for point in points
        for span in point.spans
    ]
    title = "The run changes its batch or image size; the table above shows the step of the part with most pixels."
    return [title, "", *text_table(titles, rows, left=0)]


def _duration(seconds: float) -> str:
    """Formats a time in its own unit and not the column's, since one GPU takes hours where a cluster takes seconds."""
    if seconds >= YEAR_S:
        return "years"  # the interval of a batch that nobody has tried
    units = (("h", 3600.0, 3 * 3600.0), ("min", 60.0, 300.0), ("s", 1.0, 1.0))
    unit, unit_s = next(((unit, unit_s) for unit, unit_s, from_s in units if seconds >= from_s), ("ms", 1e-3))
    return f"{seconds / unit_s:,.1f} {unit}"
