"""`hyperbatch report` and `watch`: show the files of a run as a page or in the terminal."""

from __future__ import annotations

import argparse
from pathlib import Path

from hyperbatch.cli.shared import AddVerb, show
from hyperbatch.errors import InputError
from hyperbatch.record import strict_json


def add(verb: AddVerb) -> None:
    parser = verb("report", _report, "Write the HTML report of a run, or compare several runs.")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="Folder of a run.")
    help = "HTML file to write. [default: report.html in the run's folder, or in the current folder for several runs]"
    parser.add_argument("--output", metavar="FILE", help=help)

    parser = verb("watch", _watch, "Follow a run in the terminal.")
    parser.add_argument("run", metavar="RUN", help="Folder of the run.")
    parser.add_argument("--once", action="store_true", help="Print the current state of the run and exit.")


def _report(args: argparse.Namespace) -> int:
    from hyperbatch.report import write_report

    path = write_report([Path(run) for run in args.runs], Path(args.output) if args.output else None)
    show(args, {"report": str(path)}, f"report: {path}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    from hyperbatch.report.watch import state, watch

    if args.json and not args.once:
        raise InputError("watch --json needs --once, because it prints one object; add --once")
    if args.json:
        print(strict_json(state(Path(args.run))))
    else:
        watch(Path(args.run), once=args.once)
    return 0
