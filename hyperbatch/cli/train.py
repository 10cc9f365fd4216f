"""`hyperbatch train` and `recipes`: combine recipe, config file and flags into one config, and train it."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperbatch.cli.flags import FullHelp, ShortHelp
from hyperbatch.cli.shared import AddVerb, add_sizes, is_first_rank, positive, show
from hyperbatch.config import Config, FieldSpec, fields, format_value, section_titles, without_effect
from hyperbatch.errors import InputError, RunFailed


def add(verb: AddVerb) -> None:
    from hyperbatch.recipes import DEFAULT

    parser = verb(
        "train",
        _train,
        "Train a recipe until it reaches its target accuracy.",
        description="Train a recipe until it reaches its target accuracy. RECIPE is a name that `hyperbatch recipes` "
        "lists, or package.module:function for a recipe of your own. A default in brackets applies if the recipe "
        "sets no value. --flag turns a switch on, and --no-flag turns it off.",
        usage="hyperbatch train [RECIPE] [--data DIR] [--nproc N] [--out DIR] [--resume [auto]] [--dry-run] "
        "[--FIELD VALUE]",
        add_help=False,
    )
    parser.add_argument("-h", "--help", action=ShortHelp, help="Show the most common flags and exit.")
    parser.add_argument("--help-all", action=FullHelp, help="Show all flags by section and exit.")
    help = f"The recipe to train. [default: the config file's recipe, or {DEFAULT}]"
    parser.add_argument("recipe", nargs="?", metavar="RECIPE", help=help)
    help = "TOML file of config fields, or the folder of a run. It overrides the recipe, and flags override it."
    parser.add_argument("--config", metavar="FILE", help=help)
    help = "Write the resolved config to a TOML file and exit."
    parser.add_argument("--save-config", metavar="FILE", help=help)
    help = "Print the resolved batch, schedule, memory and config, and exit."
    parser.add_argument("--dry-run", action="store_true", help=help)
    parser.add_argument("--world-size", type=positive, metavar="N", help="Number of ranks that a --dry-run assumes.")
    add_sizes(parser)
    groups = {name: parser.add_argument_group(title) for name, title in section_titles().items()}
    for spec in fields():
        group = groups[spec.section]
        if spec.type is bool:
            group.add_argument(spec.flag, dest=spec.name, action="store_const", const="true", help=_help(spec))
            off = spec.flag.replace("--", "--no-", 1)
            group.add_argument(off, dest=spec.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            metavar = {int: "N", float: "X"}.get(spec.type, "VALUE")
            group.add_argument(spec.flag, dest=spec.name, metavar=metavar, help=_help(spec))
    parser.add_argument("--no-resume", dest="resume", action="store_const", const="no", help=argparse.SUPPRESS)

    parser = verb(
        "recipes",
        _recipes,
        "List the recipes, or show some of them in full.",
        description="List the recipes with their claims: measured here, published by others, or neither yet. With "
        "NAME, show a recipe in full: its claim and source, what it trains, and its commands.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="Recipes to show in full.")


def _help(spec: FieldSpec) -> str:
    choices = f" One of {', '.join(spec.choices)}." if spec.choices else ""
    is_said = spec.default is not None and spec.default is not False and spec.default != ()
    default = f" [default: {format_value(spec.default)}]" if is_said else ""
    return f"{spec.help}{choices}{default}".replace("%", "%%")


def with_resume_value(arguments: list[str]) -> list[str]:
    """Replaces `--resume` without a value by `--resume=yes`; argparse would take a following recipe for its value."""
    values = next(spec.choices for spec in fields() if spec.name == "resume")
    following = [*arguments[1:], ""]  # the last word is followed by ""; one longer than `arguments` if they are empty
    pairs = zip(arguments, following)
    return ["--resume=yes" if word == "--resume" and after not in values else word for word, after in pairs]


def _train(args: argparse.Namespace) -> int:
    from hyperbatch.engine.ranks import find_ranks

    if args.world_size and not args.dry_run:
        raise InputError("--world-size needs --dry-run; to start N processes, use --nproc N or a launcher")
    config = config_of(args)
    if is_first_rank():
        for line in without_effect(config, [spec.name for spec in fields() if getattr(args, spec.name) is not None]):
            print(f"note: {line}", file=sys.stderr)
    if (args.save_config or args.dry_run) and not is_first_rank():
        return 0  # rank 0 answers for all
    if args.save_config:
        from hyperbatch.recipes.files import save_config

        save_config(config, args.save_config, recipe=args.recipe if ":" in (args.recipe or "") else None)
        hint = f"config: {args.save_config} (`hyperbatch train --config {shlex.quote(args.save_config)}` trains it)"
        show(args, {"config": args.save_config}, hint)
        return 0
    if args.dry_run:
        from hyperbatch.preview import format_preview, preview

        answer = preview(config, _world_size(args, config.run.nproc, config.run.device))
        show(args, answer.to_dict(), lambda: format_preview(answer))
        return 0
    from hyperbatch.engine.logfile import let_log_fill
    from hyperbatch.launch import train

    let_log_fill()
    try:
        record = train(config)
    except BrokenPipeError as error:  # a result may be cut off, as by `| head`, but a run must not end without an error
        raise RunFailed("the run has ended, because the pipe that reads its output was closed") from error
    if is_first_rank():
        from hyperbatch.report.summary import summary

        show(args, record.to_dict(), lambda: summary(record))
    missed = record.result.target_top1 is not None and not record.result.reached
    # Under an external launcher a rank that has finished exits with 0, or the agent would take the miss for a crash.
    return 3 if missed and find_ranks() is None else 0


def _recipes(args: argparse.Namespace) -> int:
    from hyperbatch.recipes.listing import format_recipes, list_recipes

    show(args, {"recipes": list_recipes(args.names)}, lambda: format_recipes(args.names))
    return 0


def config_of(args: argparse.Namespace) -> Config:
    """Combines the recipe, or the run to continue, with the config file and the flags (one per config field)."""
    from hyperbatch.recipes import all_recipes
    from hyperbatch.recipes.files import layered, read_config

    if args.recipe and args.recipe not in all_recipes() and os.path.exists(args.recipe):  # False for an impossible path
        raise InputError(
            f"{args.recipe!r} is a path and not a recipe; give data with --data, a config with --config, weights with "
            "--init-from, and a run to continue with --resume --out"
        )
    file = read_config(Path(args.config)) if args.config else None
    given = {spec.name: spec.parse(text) for spec in fields() if (text := getattr(args, spec.name)) is not None}
    global_batch = args.global_batch
    if args.batch_per_rank is not None:
        if global_batch is not None:
            raise InputError("--batch-per-rank and --global-batch cannot be combined; give only one of them")
        global_batch = args.batch_per_rank * _world_size(args, given.get("nproc", 0), given.get("device", "auto"))
    if global_batch is not None and "batch_phases" in given:
        raise InputError("--batch-phases sets the batch of every phase; leave out --global-batch and --batch-per-rank")
    resumes = given.get("resume") not in (None, False, "no")
    if resumes and (saved := _saved_config(given.get("out"), is_named=bool(args.recipe or args.config))) is not None:
        return _resumed(saved, args.recipe, file.values if file is not None else {}, given, global_batch)
    return layered(args.recipe, file, given, global_batch=global_batch)


def _saved_config(out: str | None, *, is_named: bool) -> Config | None:
    """Returns the config of the run in that folder. None: there is no run to continue, which `train` reports.

    is_named: the command names what to train. Otherwise a run that ended before its first checkpoint starts again with
    its own config, and not with the default recipe.
    """
    from hyperbatch.engine.folder import has_checkpoint
    from hyperbatch.recipes.files import run_config

    if out is None or (is_named and not has_checkpoint(Path(out))):
        return None
    config = run_config(Path(out))
    if config is None and has_checkpoint(Path(out)):  # a run of an older version
        from hyperbatch.checkpoint import load

        config = load(Path(out)).config
    return config


def _resumed(
    saved: Config, recipe: str | None, file: Mapping[str, Any], given: dict[str, Any], global_batch: int | None
) -> Config:
    """The saved config with the new values of the command line; `train` rejects those that may not change."""
    from hyperbatch.recipes import find_recipe

    if recipe is not None and find_recipe(recipe).config().recipe != saved.recipe:  # a custom recipe has a label
        raise InputError(
            f"--resume: the run in {given['out']} is of recipe {saved.recipe}, not {recipe}; leave the recipe out"
        )
    values = {**file, **given}
    if global_batch is not None:
        values["global_batch"] = global_batch
    return saved.override(**values)


def _world_size(args: argparse.Namespace, nproc: int, device: str) -> int:
    """The number of ranks that this command has or would start."""
    from hyperbatch.engine.agent import default_nproc
    from hyperbatch.engine.ranks import find_ranks

    ranks = find_ranks()
    return args.world_size or (ranks.world_size if ranks is not None else nproc or default_nproc(device))
