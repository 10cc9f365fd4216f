"""`hyperbatch plan` and `simulate`: predict a run on a cluster before you rent it."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from hyperbatch.cli.shared import AddVerb, Parser, add_sizes, numbers, positive, show
from hyperbatch.vocabulary import ALGORITHMS, STRATEGIES


def add(verb: AddVerb) -> None:
    parser = verb("plan", _plan, "Choose the grid, the gradient groups and the all-reduce for a cluster.")
    _add_workload(parser, grid="the fastest", algorithm="the fastest for each group")
    parser.add_argument("--gpus", type=positive, metavar="N", help="Number of GPUs. [default: the recipe's]")
    parser.add_argument("--output", metavar="FILE", help="Write the plan, for `hyperbatch train --plan FILE`.")
    parser.add_argument("--trace", metavar="FILE", help="Write the timeline of a step for Perfetto.")
    parser.add_argument("--plot", metavar="FILE", help="Draw the step and its alternatives as an SVG picture.")
    parser.add_argument("--strategy", choices=STRATEGIES, help="How to group the gradients. [default: optimal]")

    parser = verb("simulate", _simulate, "Predict the time and the cost of a run on a cluster.")
    _add_workload(parser, grid="nodes x GPUs per node", algorithm="the recipe's")
    help = "Numbers of GPUs to predict for, such as 512,1024,2048. [default: the recipe's]"
    parser.add_argument("--gpus", metavar="N,N,...", help=help)
    parser.add_argument("--plot", metavar="FILE", help="Draw time, speed, efficiency and cost as an SVG picture.")


def _add_workload(parser: Parser, *, grid: str, algorithm: str) -> None:
    help = "The recipe, or timm/NAME for a model without one. [default: fujitsu_resnet50]"
    parser.add_argument("recipe", nargs="?", default="fujitsu_resnet50", metavar="RECIPE", help=help)
    help = "Another model for the recipe: built-in, timm/NAME, or package.module:callable."
    parser.add_argument("--model", metavar="NAME", help=help)
    help = "Name of a built-in cluster, or a machine file (*.toml). [default: the recipe's cluster]"
    parser.add_argument("--cluster", default=None, metavar="NAME|FILE", help=help)
    help = f"Grid of the ranks; a row is one node. [default: the recipe's, or {grid}]"
    parser.add_argument("--grid", metavar="ROWSxCOLUMNS", help=help)
    parser.add_argument("--algorithm", choices=ALGORITHMS, help=f"The all-reduce. [default: {algorithm}]")
    add_sizes(parser)


def _plan(args: argparse.Namespace) -> int:
    from hyperbatch.plan.planner import format_plan, make_plan

    plan = make_plan(args.recipe, gpus=args.gpus, strategy=args.strategy, **_workload(args))
    values = plan.to_dict()
    steps = {
        f"{values['recipe']} on {values['gpus']} GPUs of {values['cluster']}, {values['strategy']}": plan.step.timing
    }
    if args.trace:
        from hyperbatch.record import write_trace

        write_trace(Path(args.trace), steps)
    if args.plot:
        from hyperbatch.report.picture import plan_picture, write_picture

        write_picture(Path(args.plot), plan_picture(plan))
    if args.output:
        from hyperbatch.plan.files import save_plan

        save_plan(values, Path(args.output))
    show(args, values, lambda: format_plan(plan, args.output))
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from hyperbatch.sim.sweep import format_simulation, simulate

    gpus = None if args.gpus is None else numbers(args.gpus, "--gpus")
    simulation = simulate(args.recipe, gpus=gpus, **_workload(args))
    values = simulation.to_dict()
    if args.plot:
        from hyperbatch.report.picture import charts_picture, sweep_charts, write_picture

        write_picture(Path(args.plot), charts_picture(*sweep_charts(values)))
    show(args, values, lambda: format_simulation(simulation))
    return 0


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments that `plan` and `simulate` share."""
    names = ("cluster", "model", "grid", "algorithm", "global_batch", "batch_per_rank")
    return {name: getattr(args, name) for name in names}
