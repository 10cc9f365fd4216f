"""The simulator against an emulated cluster: measures its links, predicts steps from them, and then measures the steps.

    python -m benchmarks.reality predict    writes the links' machine file, then the predictions, into --folder
    python -m benchmarks.reality measure    runs the same steps, and writes one table of both

    links (all-reduces of other sizes)  ->  machine file  ->  cost, timeline, optimal  ->  predicted step
    replayed backward, GradSync on shaped links  --------------------------------------->  measured step

There is one step for each algorithm and grouping. All are steps of the same model, whose backward is a recording
(benchmarks/replay.py).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.cluster import emulated_cluster
from benchmarks.replay import ReplayModel
from hyperbatch.arena import Arena
from hyperbatch.bench.harness import Candidate, commit, interleave, versions
from hyperbatch.comm import GradSync, GridComm
from hyperbatch.engine.network import measure_network
from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import format_machine_file, load_cluster
from hyperbatch.plan.compute import LayerTime, layer_times
from hyperbatch.plan.cost import all_reduce_cost, cost_function
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.machine import Network
from hyperbatch.plan.planner import CHOICES
from hyperbatch.plan.strategies import plan_groups
from hyperbatch.plan.timeline import parameter_ready_s, step_timing
from hyperbatch.plan.types import GroupPlan, RankGrid, StepTiming, TensorSpec
from hyperbatch.vocabulary import ALGORITHMS, STRATEGIES

BEST = "best per group"  # optimal groups, each with the fastest algorithm for it


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    hosts: int = 4
    ranks_per_host: int = 2
    mbit: float = 200.0
    nic: str = "rank"
    model: str = "resnet18"
    backward_s: float = 1.0

    @property
    def grid(self) -> RankGrid:
        return RankGrid(self.hosts, self.ranks_per_host)

    @property
    def name(self) -> str:
        return f"sim_reality_{self.hosts}x{self.ranks_per_host}_{self.mbit:g}mbit_nic_per_{self.nic}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    algorithm: str
    strategy: str
    plan: GroupPlan
    timing: StepTiming

    @property
    def name(self) -> str:
        return f"{self.algorithm}, {self.strategy}"


# -- prediction --------------------------------------------------------------------------------------------------


def recording(settings: Settings) -> list[LayerTime]:
    """Returns how backward is distributed over the layers: as the compute model predicts, in settings.backward_s."""
    times = layer_times(load_cluster("abci"), settings.model, 64, "fp32")
    scale = settings.backward_s / sum(layer.backward_s for layer in times)
    return [replace(layer, forward_s=0.0, backward_s=layer.backward_s * scale) for layer in times]


def predict(network: Network, settings: Settings) -> list[Case]:
    """Predicts every algorithm with every grouping on the given links."""
    specs, times = tensors(settings.model), recording(settings)
    ready = parameter_ready_s(times)
    costs = {name: cost_function(network, settings.grid, name) for name in ALGORITHMS}

    def case(algorithm: str, strategy: str) -> Case:
        several = {name: costs[name] for name in CHOICES} if algorithm == BEST else None
        plan = plan_groups(
            specs, strategy, ready_s=[ready[spec.name] for spec in specs], cost=several or costs[algorithm]
        )
        if several is None:
            plan = plan.with_algorithms([algorithm] * len(plan.groups))
        timing = step_timing(
            times,
            plan,
            lambda group: all_reduce_cost(network, settings.grid, group.algorithm or "flat", group.bytes),
            update_s=0.0,
        )
        return Case(algorithm=algorithm, strategy=strategy, plan=plan, timing=timing)

    return [*(case(a, s) for a in ALGORITHMS for s in STRATEGIES), case(BEST, "optimal")]


def write_predictions(settings: Settings, folder: Path) -> Path:
    """Measures the links of the emulated cluster, and predicts its steps from them before any step is measured."""
    load = os.getloadavg()[0]
    with emulated_cluster(
        hosts=settings.hosts, ranks_per_host=settings.ranks_per_host, mbit=settings.mbit, nic=settings.nic
    ) as cluster:
        network = cluster.run(_links, settings.grid)[0]
    base = load_cluster("local")
    machine = replace(
        base,
        description=f"emulated: {settings.hosts} hosts of {settings.ranks_per_host} ranks, {settings.mbit:g} Mbit/s",
        devices=settings.grid.size,
        network=network,
        sources={"links": "measured by benchmarks.reality", "device": "not used: backward is replayed"},
    )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{settings.name}.toml").write_text(format_machine_file(machine))
    values = {
        "settings": asdict(settings),
        "load_before": load,
        "predicted_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "commit": commit(),
        "network": asdict(network),
        "cases": [
            {
                "algorithm": case.algorithm,
                "strategy": case.strategy,
                "step_s": case.timing.step_s,
                "exposed_comm_s": case.timing.exposed_comm_s,
                "plan": case.plan.to_dict(),
                "timing": case.timing.to_dict(),
            }
            for case in predict(network, settings)
        ],
    }
    path = folder / f"{settings.name}_predicted.json"
    path.write_text(json.dumps(values) + "\n")
    return path


def _links(rank: int, grid: RankGrid) -> Network:
    return measure_network(grid, torch.device("cpu"))


# -- measurement -------------------------------------------------------------------------------------------------


def measure(path: Path, rounds: int = 3) -> dict[str, Any]:
    """Runs the steps that a file of predictions names, and returns both side by side."""
    values = json.loads(path.read_text())
    settings = Settings(**values["settings"])
    load = os.getloadavg()[0]
    plans = {f"{c['algorithm']}, {c['strategy']}": c["plan"] for c in values["cases"]}
    with emulated_cluster(
        hosts=settings.hosts, ranks_per_host=settings.ranks_per_host, mbit=settings.mbit, nic=settings.nic
    ) as cluster:
        samples = cluster.run(_steps, settings, plans, rounds, timeout_s=3600)[0]
    rows = []
    for case in values["cases"]:
        name = f"{case['algorithm']}, {case['strategy']}"
        steps, exposed = samples[name]
        rows.append(
            {
                "algorithm": case["algorithm"],
                "strategy": case["strategy"],
                "groups": len(case["plan"]["groups"]),
                "predicted_step_s": case["step_s"],
                "step_s": statistics.median(steps),
                "step_error": case["step_s"] / statistics.median(steps) - 1,
                "predicted_exposed_s": case["exposed_comm_s"],
                "exposed_s": statistics.median(exposed),
                "step_samples_s": steps,
                "exposed_samples_s": exposed,
            }
        )
    return {
        "bench": "reality",
        "settings": values["settings"],
        "predicted_at": values["predicted_at"],
        "predicted_by_commit": values["commit"],
        "measured_at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit(),
        "versions": versions(),
        "device": f"{os.cpu_count()} cores",
        "load": {"before": load, "after": os.getloadavg()[0]},
        "rows": rows,
        "summary": summary(rows),
    }


def _steps(
    rank: int, settings: Settings, plans: dict[str, dict[str, Any]], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Runs on every rank. Returns plan -> (seconds of each step, exposed seconds of each), of the slowest rank."""
    times = recording(settings)
    ready, specs = parameter_ready_s(times), tensors(settings.model)
    fractions = [ready[spec.name] / settings.backward_s for spec in specs]
    model = ReplayModel(specs, fractions, settings.backward_s)
    arena = Arena(model, model.order())
    exposed: dict[str, list[float]] = {name: [] for name in plans}

    def step(name: str) -> float:
        # Steps of a run follow each other on warm connections, so the second of two consecutive steps is timed.
        start = after_backward = end = 0.0
        with closing(GradSync(arena, _replayed(plans[name], specs), comm)) as sync:
            for _ in range(2):
                arena.zero_grad()
                dist.barrier()
                start = time.perf_counter()
                sync.begin()
                model.replay()
                after_backward = time.perf_counter()
                sync.finish()
                end = time.perf_counter()
        slowest = torch.tensor([end - start, end - after_backward], dtype=torch.float64)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        exposed[name].append(float(slowest[1]))
        return float(slowest[0])

    with closing(GridComm(settings.grid)) as comm:
        candidates = [Candidate(name=name, run=lambda name=name: step(name)) for name in plans]
        step(next(iter(plans)))  # opens the connections
        for each in exposed.values():
            each.clear()
        samples = interleave(candidates, lambda run: run(), rounds=rounds, warmup=0)
    return {name: (samples[name], exposed[name]) for name in plans}


def _replayed(plan: dict[str, Any], specs: tuple[TensorSpec, ...]) -> GroupPlan:
    """Returns the plan with the names of the replayed model, which have no dots."""
    found = GroupPlan.from_dict(plan)
    rename = {spec.name: spec.name.replace(".", "/") for spec in specs}
    groups = (replace(group, parameters=tuple(rename[name] for name in group.parameters)) for group in found.groups)
    return replace(found, groups=tuple(groups))


# -- comparison --------------------------------------------------------------------------------------------------


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the errors, the pairs of steps that are ordered as predicted, and how well `optimal` was predicted."""
    errors = sorted(abs(row["step_error"]) for row in rows)
    clear = [  # pairs whose predictions differ clearly
        (a, b)
        for a, b in combinations(rows, 2)
        if abs(a["predicted_step_s"] - b["predicted_step_s"]) > 0.05 * min(a["predicted_step_s"], b["predicted_step_s"])
    ]
    alike = sum((a["predicted_step_s"] < b["predicted_step_s"]) == (a["step_s"] < b["step_s"]) for a, b in clear)
    optimal = {}
    for row in rows:
        if row["strategy"] != "optimal":
            continue
        others = [o["exposed_s"] for o in rows if o["algorithm"] == row["algorithm"] and o is not row]
        optimal[row["algorithm"]] = {
            "predicted_s": row["predicted_exposed_s"],
            "measured_s": row["exposed_s"],
            "error": row["predicted_exposed_s"] / row["exposed_s"] - 1,
            "best_other_s": min(others, default=None),
        }
    return {
        "median_error": statistics.median(errors),
        "worst_error": errors[-1],
        "within_15_percent": sum(error <= 0.15 for error in errors),
        "steps": len(rows),
        "pairs": len(clear),
        "pairs_ordered_as_predicted": alike,
        "optimal_exposed": optimal,
    }


def format_reality(values: dict[str, Any]) -> str:
    lines = [f"{'step':30} {'groups':>6} {'predicted s':>12} {'measured s':>11} {'error':>7} {'exposed s':>18}"]
    for row in sorted(values["rows"], key=lambda row: row["predicted_step_s"]):
        lines.append(
            f"{row['algorithm'] + ', ' + row['strategy']:30} {row['groups']:>6} {row['predicted_step_s']:>12.3f} "
            f"{row['step_s']:>11.3f} {row['step_error']:>+7.1%} "
            f"{row['predicted_exposed_s']:>8.3f} / {row['exposed_s']:>7.3f}"
        )
    found = values["summary"]
    lines.append(
        f"median error {found['median_error']:.1%}, worst {found['worst_error']:.1%}; within 15 %: "
        f"{found['within_15_percent']} of {found['steps']}; ordered as predicted: "
        f"{found['pairs_ordered_as_predicted']} of {found['pairs']} pairs that differ by more than 5 %"
    )
    for name, row in found["optimal_exposed"].items():
        best = "" if row["best_other_s"] is None else f"; best other grouping {row['best_other_s']:.3f}"
        lines.append(
            f"optimal, {name}: exposed {row['measured_s']:.3f} s, predicted {row['predicted_s']:.3f} "
            f"({row['error']:+.1%}){best}"
        )
    load = values["load"]
    lines.append(f"load of the machine before {load['before']:.2f}, after {load['after']:.2f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.reality", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("action", choices=("predict", "measure"))
    parser.add_argument("--folder", type=Path, default=Path("benchmarks"))
    parser.add_argument("--rounds", type=int, default=3)
    for name, value in asdict(Settings()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value, help=f"[{value}]")
    args = parser.parse_args()
    settings = Settings(**{name: getattr(args, name) for name in asdict(Settings())})
    if args.action == "predict":
        print(f"{write_predictions(settings, args.folder)} written")
        return
    path = args.folder / f"{settings.name}_predicted.json"
    if not path.exists():
        raise InputError(f"{path}: not there; predict first")
    values = measure(path, args.rounds)
    (args.folder / f"{settings.name}.json").write_text(json.dumps(values, indent=1) + "\n")
    print(format_reality(values))


if __name__ == "__main__":
    main()
