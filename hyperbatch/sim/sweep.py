"""`hyperbatch simulate`: a recipe on a cluster at several sizes, from step time to time, energy and cost to target."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hyperbatch.config import Config
from hyperbatch.plan.compute import peak_flops
from hyperbatch.plan.inventory import training_flops
from hyperbatch.plan.machine import Cluster
from hyperbatch.plan.planner import StepPlan, plan_step
from hyperbatch.plan.workload import image_channels, main_phase, model_times, resolve, resolve_all, step_memory
from hyperbatch.schedule import Phase
from hyperbatch.sim.convergence import Interval, epochs_to_target, evaluations, failure_overhead

STEP_ERROR = 0.15  # nine in ten published runs are predicted within it, see docs/simulator_validation.md
YEAR_S = 365 * 24 * 3600


def simulate(
    recipe: str | Config,
    *,
    cluster: str | Cluster | None = None,
    gpus: Sequence[int],
    algorithm: str | None = None,
    grid: str | None = None,
    strategy: str | None = None,
    global_batch: int | None = None,
    batch_per_rank: int | None = None,
) -> dict[str, Any]:
    """Predicts the run that `train` would make on each number of GPUs; what is None is the recipe's own.

    A grid neither asked for nor stated by the recipe is `train`'s default, hosts x devices per host. `hyperbatch plan`
    looks for better ones.
    """
    points = [
        _point(
            recipe,
            cluster,
            count,
            algorithm=algorithm,
            grid=grid,
            strategy=strategy,
            global_batch=global_batch,
            batch_per_rank=batch_per_rank,
        )
        for count in gpus
    ]
    job = resolve(recipe, cluster, 1)
    config, machine = job.config, job.cluster
    return {
        "recipe": config.recipe,
        "cluster": machine.name,
        "device": machine.device.name,
        "model": config.model.model,
        "precision": config.optim.precision,
        "target_top1": config.run.target_top1,
        "points": points,
    }


@dataclass(frozen=True, slots=True)
class _PhaseRun:
    """One batch phase: its step, and how many samples it takes."""

    phase: Phase
    step: StepPlan
    samples: float

    @property
    def seconds(self) -> float:
        return self.samples / self.phase.global_batch * self.step.timing.step_s


def _point(
    recipe: str | Config,
    cluster: str | Cluster | None,
    gpus: int,
    *,
    algorithm: str | None,
    grid: str | None,
    strategy: str | None,
    global_batch: int | None,
    batch_per_rank: int | None,
) -> dict[str, Any]:
    job = resolve(recipe, cluster, gpus, global_batch=global_batch, batch_per_rank=batch_per_rank)
    config, machine, ranks = job.config, job.cluster, job.ranks
    phases = resolve_all(config, machine, ranks)
    name = algorithm or config.comm.algorithm
    steps = [plan_step(machine, config, ranks, phase, grid=grid, algorithm=name, strategy=strategy) for phase in phases]
    epochs = epochs_to_target(config, job.written_for, max(phase.global_batch for phase in phases))
    times = {key: _run(config, machine, ranks, phases, steps, value) for key, value in epochs.to_dict().items()}
    total = Interval(
        times["low"]["total_s"] * (1 - STEP_ERROR), times["mid"]["total_s"], times["high"]["total_s"] * (1 + STEP_ERROR)
    )
    main = main_phase(config)
    step, phase = steps[main], phases[main]
    images_per_s = phase.global_batch / step.timing.step_s
    nodes = machine.network.nodes(ranks)
    hours = total.mid / 3600
    price = machine.price_usd_per_device_hour
    return {
        "gpus": ranks,
        "nodes": nodes,
        "grid": str(step.grid),
        "algorithm": name,
        "strategy": step.plan.strategy,
        "groups": len(step.plan.groups),
        "global_batch": phase.global_batch,
        "batch_per_rank": phase.batch_per_rank,
        "accumulation": phase.accumulation,
        "step_s": step.timing.step_s,
        "slow_step_s": step.slow_step_s,
        "forward_s": step.timing.forward_s,
        "backward_s": step.timing.backward_s,
        "exposed_comm_s": step.timing.exposed_comm_s,
        "update_s": step.timing.update_s,
        "images_per_s": images_per_s,
        "images_per_s_per_gpu": images_per_s / ranks,
        "efficiency": step.alone_s / step.timing.step_s,
        "epochs": epochs.mid,
        "epochs_interval": epochs.to_dict(),
        "time_to_target_s": total.to_dict(),
        "run": times["mid"],
        "lower_bound_s": lower_bound(machine, config, ranks, epochs.mid),
        "memory_bytes": step_memory(config, phase.batch_per_rank)["total"],
        "energy_kwh": nodes * machine.node_power_w / 1e3 * hours,
        "cost_usd": None if price is None else ranks * price * hours,
        "timing": step.timing.to_dict(),
        "notes": list(job.notes),
    }


def lower_bound(cluster: Cluster, config: Config, ranks: int, epochs: float) -> float:
    """Seconds if every device did nothing but the network's arithmetic at its peak: no run can be shorter."""
    data = config.data
    work = training_flops(
        config.model.model, classes=data.classes, image_size=data.image_size, in_channels=image_channels(config)
    )
    images = epochs * data.train_samples
    return images * work / (ranks * peak_flops(cluster.device, config.optim.precision))


def _run(
    config: Config, cluster: Cluster, ranks: int, phases: Sequence[Phase], steps: Sequence[StepPlan], epochs: float
) -> dict[str, float]:
    """Seconds of one run to its target, by what they are spent on."""
    count, last_epoch = evaluations(config, epochs)
    end = last_epoch * config.data.train_samples
    starts = [phase.from_position for phase in phases] + [float("inf")]
    runs = [
        _PhaseRun(phase, step, max(0.0, min(end, starts[i + 1]) - starts[i]))
        for i, (phase, step) in enumerate(zip(phases, steps, strict=True))
    ]
    train = sum(run.seconds for run in runs)

    batch = max(1, min(phases[-1].batch_per_rank, -(-config.data.eval_samples // ranks)))
    forward = sum(layer.forward_s for layer in model_times(cluster, config, batch))
    rounds = -(-config.data.eval_samples // (batch * ranks))
    evaluation = count * (rounds * forward + cluster.eval_overhead_s)

    saves = int(last_epoch // config.run.checkpoint_every_epochs) if config.run.checkpoint_every_epochs else 0
    state = step_memory(config, 1)
    stored = state["weights"] + state["masters"] + state["momentum"]
    save_s = stored / cluster.storage_bytes_per_s if cluster.storage_bytes_per_s else 0.0
    interval = train / saves if saves else train
    busy = train + evaluation + saves * save_s
    failures = failure_overhead(
        busy, cluster.network.nodes(ranks), cluster.node_mtbf_s, interval, cluster.init_s + save_s
    )
    return {
        "total_s": busy + failures,
        "train_s": train,
        "eval_s": evaluation,
        "checkpoint_s": saves * save_s,
        "failures_s": failures,
        "init_s": cluster.init_s,
        "epochs": last_epoch,
        "evaluations": count,
    }


def format_simulation(values: dict[str, Any]) -> str:
    """`simulate`'s answer as text."""
    points = values["points"]
    priced = all(point["cost_usd"] is not None for point in points)
    titles = ["GPUs", "grid", "all-reduce", "batch", "/GPU", "step ms", "exposed", "images/s", "eff.", "epochs"]
    titles += ["time to target", "bound", "kWh", *(["USD"] if priced else [])]
    rows = []
    for point in points:
        time = point["time_to_target_s"]
        row = [
            f"{point['gpus']:,}",
            point["grid"],
            point["algorithm"],
            f"{point['global_batch']:,}",
            str(point["batch_per_rank"]) + (f"x{point['accumulation']}" if point["accumulation"] > 1 else ""),
            f"{point['step_s'] * 1e3:.2f}",
            f"{point['exposed_comm_s'] * 1e3:.2f}",
            f"{point['images_per_s']:,.0f}",
            f"{point['efficiency']:.1%}",
            f"{point['epochs']:.1f}",
            f"{_clock(time['mid'])} ({_clock(time['low'])}-{_clock(time['high'])})",
            _clock(point["lower_bound_s"]),
            f"{point['energy_kwh']:,.1f}",
        ]
        rows.append([*row, f"{point['cost_usd']:,.0f}"] if priced else row)
    widths = [max(len(row[i]) for row in [titles, *rows]) for i in range(len(titles))]
    target = "" if values["target_top1"] is None else f", to {values['target_top1']:.1%}"
    lines = [f"{values['recipe']} ({values['model']}, {values['precision']}{target}) on {values['cluster']}", ""]
    lines += ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in [titles, *rows]]
    notes = [f"note ({point['gpus']:,} GPUs): {note}" for point in points for note in point["notes"]]
    return "\n".join([*lines, *notes])


def _clock(seconds: float) -> str:
    if seconds < 300:
        return f"{seconds:.1f}s"
    if seconds >= YEAR_S:  # the interval of a batch nobody has tried
        return "years"
    return f"{seconds / 60:.1f}m" if seconds < 3 * 3600 else f"{seconds / 3600:.1f}h"
