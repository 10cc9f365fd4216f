"""Chooses grid, algorithm, groups and wire precision for a run on a cluster, and predicts the time of a step.

`plan_step` predicts a step with given choices. `make_plan`, which `hyperbatch plan` calls, makes the remaining choices.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from hyperbatch.config import Config
from hyperbatch.plan.compute import LayerTime, slowest_of, slowest_quantile, update_time
from hyperbatch.plan.cost import Cost, all_reduce_cost, cost_function, reduce_scatter_cost
from hyperbatch.plan.machine import Cluster, Network
from hyperbatch.plan.strategies import group_options, plan_groups
from hyperbatch.plan.timeline import parameter_ready_s, step_timing
from hyperbatch.plan.types import GradGroup, GroupPlan, RankGrid, StepTiming, TensorSpec
from hyperbatch.plan.workload import (
    at_size,
    is_model,
    main_span,
    model_tensors,
    model_times,
    resolve,
    resolve_all,
    run_spans,
)
from hyperbatch.recipes import all_recipes
from hyperbatch.schedule import Phase
from hyperbatch.tables import text_table
from hyperbatch.vocabulary import ALGORITHMS, DTYPE_BYTES, PRECISION_DTYPE, STRATEGIES

# The algorithms among which the planner chooses for a group. `hybrid` is left out, as it selects among them by size.
CHOICES = tuple(name for name in ALGORITHMS if name != "hybrid")


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """One step on one cluster: the choices and the predicted times."""

    grid: RankGrid
    algorithm: str
    plan: GroupPlan
    timing: StepTiming
    slow_step_s: float  # the step time that one step in ten exceeds
    alone_s: float  # the same micro-steps on one device without communication: the baseline of efficiency

    def summary(self) -> dict[str, Any]:
        return {
            "step_s": self.timing.step_s,
            "exposed_comm_s": self.timing.exposed_comm_s,
            "groups": len(self.plan.groups),
            "grid": str(self.grid),
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The result of `hyperbatch plan`: the step with the choices made, and with every other grouping and all-reduce."""

    recipe: str  # or the model that was given instead
    model: str
    precision: str
    cluster: str
    gpus: int
    other_model: bool  # whether the model is not the recipe's own
    global_batch: int | None  # of the first step; None if it is the recipe's own
    phase: Phase
    wire_dtype: str | None
    step: StepPlan
    strategies: dict[str, StepPlan]
    algorithms: dict[str, StepPlan]
    notes: tuple[str, ...]

    @property
    def images_per_s(self) -> float:
        return self.phase.global_batch / self.step.timing.step_s

    def train_flags(self, file: str | None = None) -> list[str]:
        """The flags with which `hyperbatch train RECIPE` uses the plan. file: where the plan was written."""
        groups = (
            ["--plan", file] if file else ["--grouping", self.step.plan.strategy, "--algorithm", self.step.algorithm]
        )
        batch = [] if self.global_batch is None else ["--global-batch", str(self.global_batch)]
        model = ["--model", self.model] if self.other_model else []
        return [*model, *groups, "--grid", str(self.step.grid), *batch]

    def to_dict(self) -> dict[str, Any]:
        step, timing = self.step, self.step.timing
        return {
            "recipe": self.recipe,
            "model": self.model,
            "precision": self.precision,
            "cluster": self.cluster,
            "gpus": self.gpus,
            "global_batch": self.phase.global_batch,
            "batch_per_rank": self.phase.batch_per_rank,
            "accumulation": self.phase.accumulation,
            "grid": str(step.grid),
            "algorithm": step.algorithm,
            "strategy": step.plan.strategy,
            "wire_dtype": self.wire_dtype,
            "groups": [
                asdict(group) | asdict(times) for group, times in zip(step.plan.groups, timing.groups, strict=True)
            ],
            "step_s": timing.step_s,
            "exposed_comm_s": timing.exposed_comm_s,
            "forward_s": timing.forward_s,
            "backward_s": timing.backward_s,
            "update_s": timing.update_s,
            "images_per_s": self.images_per_s,
            "strategies": {name: step.summary() for name, step in self.strategies.items()},
            "algorithms": {name: step.summary() for name, step in self.algorithms.items()},
            "train_flags": self.train_flags(),
            "notes": list(self.notes),
        }


def make_plan(
    recipe: str | Config,
    *,
    cluster: str | Cluster | None = None,
    gpus: int | None = None,
    model: str | None = None,
    grid: str | RankGrid | None = None,
    algorithm: str | None = None,
    strategy: str | None = None,
    global_batch: int | None = None,
    batch_per_rank: int | None = None,
) -> Plan:
    """Returns the plan for a recipe on a cluster, each a name or a value.

    Arguments that are None are chosen so that the step is shortest.
    grid: a `RankGrid`, or ROWSxCOLUMNS such as "4x8".
    model: replaces the model of the recipe. `timm/NAME` may also be given instead of a recipe.
    """
    request = resolve(recipe, cluster, gpus, model=model, global_batch=global_batch, batch_per_rank=batch_per_rank)
    config, machine, ranks, notes = request.config, request.cluster, request.ranks, list(request.notes)
    main = main_span(run_spans(config, resolve_all(config, machine.device.memory_bytes, ranks)))
    phase, config = main.phase, at_size(config, main.image_size)

    wanted = strategy or "optimal"

    def timed(strategy: str, algorithm: str | None, config: Config = config) -> StepPlan:
        return plan_step(
            machine, config, ranks, phase, grid=grid, algorithm=algorithm, strategy=strategy, search_grid=True
        )

    chosen = timed(wanted, algorithm)
    strategies = {name: chosen if name == wanted else timed(name, algorithm) for name in STRATEGIES}
    algorithms = {name: timed(wanted, name) for name in ALGORITHMS}
    if config.comm.wire_dtype is None and config.optim.precision in ("fp32", "fp64"):
        half = timed(wanted, algorithm, config.override(wire_dtype="fp16"))
        saved = 1 - half.timing.step_s / chosen.timing.step_s
        if saved > 0.01:
            notes.append(f"--wire-dtype fp16 would shorten the step by {saved:.0%}")
    original, no_recipe = request.original, isinstance(recipe, str) and is_model(recipe)
    return Plan(
        recipe=recipe if isinstance(recipe, str) else config.recipe,
        model=config.model.model,
        precision=config.optim.precision,
        other_model=no_recipe or config.model.model != original.model.model,
        global_batch=None if config.global_batch == original.global_batch and not no_recipe else config.global_batch,
        cluster=machine.name,
        gpus=ranks,
        phase=phase,
        wire_dtype=config.comm.wire_dtype,
        step=chosen,
        strategies=strategies,
        algorithms=algorithms,
        notes=tuple(notes),
    )


def plan_step(
    cluster: Cluster,
    config: Config,
    ranks: int,
    phase: Phase,
    *,
    grid: str | RankGrid | None = None,
    algorithm: str | None = None,
    strategy: str | None = None,
    search_grid: bool = False,
) -> StepPlan:
    """Predicts the step of one batch phase.

    strategy: None takes the config's. algorithm: None takes the fastest for each group.
    grid: None takes the config's if it fits the ranks; else the one that `train` would use, or the best with
    search_grid.
    """
    specs = model_tensors(config)
    times = model_times(cluster, config, phase.batch_per_rank)
    nbytes = sum(_wire_bytes(config, spec.dtype, spec.nbytes) for spec in specs)
    chosen_grid = _stated_grid(config, ranks, grid)
    if chosen_grid is None:
        network, sharded = cluster.network, config.scatters_gradients
        chosen_grid = RankGrid.of_hosts(ranks, network.devices_per_node)
        if search_grid and algorithm in (None, "torus", "hierarchical", "hybrid"):
            chosen_grid = best_grid(network, ranks, nbytes, algorithm or "torus", sharded=sharded)
    plan = _group_plan(cluster, config, specs, times, chosen_grid, algorithm, strategy or config.comm.grouping)

    def group_cost(group: GradGroup) -> Cost:
        name = group.algorithm or "flat"
        sent, switch = _wire_bytes(config, group.dtype, group.bytes), config.comm.hybrid_switch_bytes
        if config.scatters_gradients:
            cost = reduce_scatter_cost(cluster.network, chosen_grid, name)
        else:
            cost = all_reduce_cost(cluster.network, chosen_grid, name, sent, hybrid_switch_bytes=switch)
        return Cost(cost.fixed_s, cost.s_per_byte * sent / group.bytes)

    shards = ranks if config.comm.sharded_update else 1
    update = update_time(cluster.device, sum(spec.numel for spec in specs), shards)

    def timing(slowdown: float) -> StepTiming:
        accumulation = phase.accumulation
        step = step_timing(times, plan, group_cost, update_s=update, accumulation=accumulation, slowdown=slowdown)
        if not config.comm.sharded_update:
            return step
        # The new weights are gathered after the update, in the working precision (for Muon, directions of that size).
        gather = reduce_scatter_cost(cluster.network, chosen_grid, plan.groups[0].algorithm or "flat")
        seconds = gather.seconds(sum(spec.nbytes for spec in specs))
        return replace(step, step_s=step.step_s + seconds, exposed_comm_s=step.exposed_comm_s + seconds)

    alone = phase.accumulation * sum(t.forward_s + t.backward_s for t in times)
    return StepPlan(
        grid=chosen_grid,
        algorithm=_main_algorithm(plan),
        plan=plan,
        timing=timing(slowest_of(ranks, cluster.jitter)),
        slow_step_s=timing(slowest_quantile(ranks, cluster.jitter, 0.9)).step_s,
        alone_s=alone + update_time(cluster.device, sum(spec.numel for spec in specs)),
    )


def _wire_bytes(config: Config, dtype: str, nbytes: int) -> float:
    """Returns how many bytes the gradients take on the wire."""
    wire = config.comm.wire_dtype
    return nbytes if wire is None else nbytes * DTYPE_BYTES[PRECISION_DTYPE[wire]] / DTYPE_BYTES[dtype]


def _group_plan(
    cluster: Cluster,
    config: Config,
    specs: tuple[TensorSpec, ...],
    times: list[LayerTime],
    grid: RankGrid,
    algorithm: str | None,
    strategy: str,
) -> GroupPlan:
    names = (algorithm,) if algorithm else CHOICES
    switch = config.comm.hybrid_switch_bytes
    by_name = {name: cost_function(cluster.network, grid, name, hybrid_switch_bytes=switch) for name in names}
    working = specs[0].dtype if len({spec.dtype for spec in specs}) == 1 else PRECISION_DTYPE[config.optim.precision]
    scale = _wire_bytes(config, working, 1)
    slowdown = slowest_of(grid.size, cluster.jitter)
    ready = parameter_ready_s(times, slowdown=slowdown)
    costs = by_name
    if scale != 1:
        costs = {name: (lambda nbytes, cost=cost: cost(nbytes * scale)) for name, cost in by_name.items()}
    options = group_options(config.comm)
    if strategy == "optimal":
        options |= {"ready_s": [ready[spec.name] for spec in specs], "cost": costs}
    plan = plan_groups(specs, strategy, **options)
    best = [
        min(by_name, key=lambda name, g=g: by_name[name](_wire_bytes(config, g.dtype, g.bytes))) for g in plan.groups
    ]
    return plan.with_algorithms(best)


def _main_algorithm(plan: GroupPlan) -> str:
    """The algorithm that sends most of the bytes."""
    carried: dict[str, int] = {}
    for group in plan.groups:
        carried[group.algorithm or "flat"] = carried.get(group.algorithm or "flat", 0) + group.bytes
    return max(carried, key=lambda name: carried[name])


def grids(ranks: int) -> Iterator[RankGrid]:
    """Yields every rows x columns grid of this many ranks, in order of increasing columns. A prime number has two."""
    small = [n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0]
    for columns in sorted({*small, *(ranks // n for n in small)}):
        yield RankGrid(ranks // columns, columns)


def best_grid(
    network: Network, ranks: int, nbytes: float, algorithm: str = "torus", *, sharded: bool = False
) -> RankGrid:
    """Returns the grid with the fastest exchange of this many bytes. Ties go to the rows closest to a node's size."""

    def order(grid: RankGrid) -> tuple[float, int]:
        if sharded:
            cost = reduce_scatter_cost(network, grid, algorithm)
        else:
            cost = all_reduce_cost(network, grid, algorithm, nbytes)
        return cost.seconds(nbytes), abs(grid.columns - network.devices_per_node)

    return min(grids(ranks), key=order)


def _stated_grid(config: Config, ranks: int, asked: str | RankGrid | None) -> RankGrid | None:
    """Returns the requested grid, which must fit the ranks, or else the recipe's if it fits."""
    if asked is not None:
        grid = RankGrid.parse(str(asked))
        grid.check_world(ranks)
        return grid
    grid = RankGrid.parse(config.comm.grid) if config.comm.grid else None
    return grid if grid is not None and grid.size == ranks else None


def format_plan(plan: Plan, file: str | None = None) -> str:
    """Returns the result of `make_plan` as text. file: where the plan was written."""
    ms = 1e3
    phase, timing = plan.phase, plan.step.timing
    gpus = "1 GPU" if plan.gpus == 1 else f"{plan.gpus:,} GPUs"
    with_model = f" with {plan.model}" if plan.other_model and plan.model != plan.recipe else ""
    lines = [
        f"{plan.recipe}{with_model} on {gpus} of {plan.cluster}: grid {plan.step.grid}, "
        f"global batch {phase.global_batch:,} ({phase.batch_per_rank} per rank"
        + (f" x {phase.accumulation} micro-steps)" if phase.accumulation > 1 else ")"),
        f"step {timing.step_s * ms:.2f} ms = forward {timing.forward_s * ms:.2f} + backward "
        f"{timing.backward_s * ms:.2f} + exposed communication {timing.exposed_comm_s * ms:.2f} + update "
        f"{timing.update_s * ms:.2f}; {plan.images_per_s:,.0f} images/s",
        "",
    ]
    groups = [
        (
            group.index,
            len(group.parameters),
            f"{group.bytes / 1e6:.3f}",
            times.algorithm,
            *(f"{seconds * ms:.2f}" for seconds in (times.ready_s, times.start_s, times.end_s)),
        )
        for group, times in zip(plan.step.plan.groups, timing.groups, strict=True)
    ]
    titles = ("group", "tensors", "MB", "all-reduce", "ready ms", "start ms", "end ms")
    lines += text_table(titles, groups, left=0)
    for title, table in (("grouping", plan.strategies), ("all-reduce", plan.algorithms)):
        rows = [
            (
                name,
                len(step.plan.groups),
                step.grid,
                f"{step.timing.exposed_comm_s * ms:.2f}",
                f"{step.timing.step_s * ms:.2f}",
            )
            for name, step in sorted(table.items(), key=lambda item: item[1].timing.step_s)
        ]
        lines += ["", *text_table((title, "groups", "grid", "exposed ms", "step ms"), rows)]
    lines += [f"note: {note}" for note in plan.notes]
    built_in = all_recipes().get(plan.recipe)
    command = f"hyperbatch train {'RECIPE' if is_model(plan.recipe) else plan.recipe}"
    command = command if built_in is None else built_in.command
    lines += ["", f"train with it: {command} {shlex.join(plan.train_flags(file))}"]
    if file is None:
        lines.append("  (--output FILE writes these groups, with the all-reduce of each, for `train --plan FILE`)")
    return "\n".join(lines)
