"""`hyperbatch sweep`: trains many runs of a plan and compares them."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from hyperbatch.cli.shared import AddVerb, positive, show
from hyperbatch.errors import InputError


def add(verb: AddVerb) -> None:
    parser = verb(
        "sweep",
        _sweep,
        "Train many runs of a plan in one process and compare them.",
        description="Train the runs of a plan (arms, grids and seeds, see docs/sweep.md), write a row of results after "
        "each, and compare the arms in a table and a report. Runs that already have a row in DIR are not repeated. "
        "With `confirm` in the plan, the best point of each search is trained again with fresh seeds.",
    )
    parser.add_argument("plan", metavar="PLAN.toml", help="The plan of the sweep.")
    parser.add_argument("--out", metavar="DIR", help="Folder of the rows and the report. [default: sweeps/NAME]")
    parser.add_argument("--data", metavar="DIR", help="Folder of the data set.")
    help = "Start no new run after this many seconds."
    parser.add_argument("--until", type=_seconds, metavar="SECONDS", help=help)
    help = "Train only the K-th of N parts of the plan; N such commands can run at the same time."
    parser.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help=help)
    help = "Start N processes that share the runs. [default: 1]"
    parser.add_argument("--side-by-side", type=positive, default=1, metavar="N", help=help)
    parser.add_argument("--retry-failed", action="store_true", help="Repeat runs that failed or diverged.")
    parser.add_argument("--keep-runs", action="store_true", help="Keep the metrics of each run in DIR/runs.")
    parser.add_argument("--row", type=positive, metavar="N", help="Repeat run N of the plan and print its row.")
    parser.add_argument("--dry-run", action="store_true", help="List the runs with their commands and exit.")


def _sweep(args: argparse.Namespace) -> int:
    from hyperbatch.sweep import command

    plan_file, out = Path(args.plan), Path(os.path.expanduser(args.out)) if args.out else None
    _check_flags(args)
    if args.dry_run:
        from hyperbatch.sweep.plan import load_plan

        plan = load_plan(plan_file, data=args.data)
        command.check_runs(plan)
        show(args, plan.to_dict(), lambda: command.format_plan_runs(plan))
    elif args.row is not None:
        row = command.rerun(plan_file, args.row, data=args.data)
        show(args, row.to_dict(), lambda: command.progress_line(row))
        return 0 if row.error is None else 1
    else:
        from hyperbatch.engine.logfile import let_log_fill

        let_log_fill()
        options = {"until_s": args.until, "retry_failed": args.retry_failed, "keep_runs": args.keep_runs}
        if args.side_by_side > 1:
            result = command.side_by_side(plan_file, out, args.side_by_side, data=args.data, **options)
        else:
            result = command.sweep(plan_file, out, data=args.data, part=args.part, say=_say, **options)
        show(args, result.to_dict(), lambda: command.format_sweep(result))
        return 1 if result.all_failed and args.part[1] == 1 else 0  # other parts may succeed
    return 0


def _say(line: str) -> None:
    """Writes the line in one call, since several parts may write at a time; `print` writes the newline separately."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()


def _check_flags(args: argparse.Namespace) -> None:
    """Raises InputError for a flag that has no effect with another one, and for an address as the folder."""
    from hyperbatch.data.remote.store import is_address

    given = {
        "--side-by-side": args.side_by_side > 1,
        "--part": args.part[1] > 1,
        "--out": args.out is not None,
        "--until": args.until is not None,
        "--retry-failed": args.retry_failed,
        "--keep-runs": args.keep_runs,
    }
    if is_address(args.out):
        raise InputError(f"--out {args.out} is an address; give a folder of this machine, and copy the results")
    if args.row is not None and not args.dry_run and any(given.values()):
        odd = next(flag for flag in given if given[flag])
        raise InputError(f"--row trains one run, prints its row and writes nothing; leave out {odd}")
    if given["--side-by-side"] and given["--part"]:
        raise InputError("--side-by-side starts all parts itself; leave out --part")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds")
    return value


def _part(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    if not (first.isdecimal() and second.isdecimal() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, e.g. 1/2 and 2/2 for two commands side by side")
    return int(first), int(second)
