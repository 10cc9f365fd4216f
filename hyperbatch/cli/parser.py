"""One parser for all verbs, and one-line errors with the nearest name for unknown words."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Mapping
from typing import Any

from hyperbatch import __version__
from hyperbatch.cli import data, machine, models, plan, runs, sweep, train
from hyperbatch.cli.flags import translated
from hyperbatch.cli.shared import Function, Parser
from hyperbatch.errors import InputError, nearest


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = build_parser()
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help"]
    _check_verb(arguments, parser.verbs)
    if arguments[:1] == ["train"]:
        arguments = translated(arguments)
    args, unknown = parser.parse_known_args(train.with_resume_value(arguments))
    if unknown:
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            raise InputError(
                f"{flag!r} is an unexpected argument; see `hyperbatch {args.verb or ''} --help`".replace("  ", " ")
            )
        subparser = parser.verbs.get(args.verb, parser)
        # Without the dashes, which would make any two flags look alike
        flags = {flag.lstrip("-"): flag for action in subparser._actions for flag in action.option_strings}
        close = difflib.get_close_matches(flag.lstrip("-"), flags, n=1)
        hint = f"did you mean {flags[close[0]]!r}?" if close else f"see `hyperbatch {args.verb or ''} --help`"
        raise InputError(f"unknown argument {flag!r}; {hint}".replace("  ", " "))
    if args.function is None:
        parser.print_help()
        raise SystemExit(0)
    return args


def _check_verb(arguments: list[str], verbs: Mapping[str, Any]) -> None:
    """Raises InputError if the first word is not a verb, and suggests the nearest one, or `train` for a recipe."""
    verb = arguments[0] if arguments else ""
    if not verb or verb.startswith("-") or verb in verbs:
        return
    from hyperbatch.recipes import all_recipes

    if verb in all_recipes():
        raise InputError(f"{verb} is a recipe; train it with `hyperbatch train {verb}`")
    raise InputError(f"unknown verb {verb!r}{nearest(verb, list(verbs))}")


def build_parser() -> Parser:
    parser = Parser(prog="hyperbatch", description="Train image classifiers to a target accuracy in the shortest time.")
    help = "Show the version and exit."
    parser.add_argument("--version", action="version", version=f"hyperbatch {__version__}", help=help)
    parser.set_defaults(function=None)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser)
    parser.verbs = verbs.choices

    def verb(name: str, function: Function, help: str, **more: Any) -> Parser:
        sub = verbs.add_parser(name, help=help, description=more.pop("description", help), **more)
        sub.set_defaults(function=function)
        sub.add_argument("--json", action="store_true", help="Print one JSON object and nothing else on stdout.")
        return sub

    for module in (train, sweep, models, runs, data, plan, machine):
        module.add(verb)
    return parser
