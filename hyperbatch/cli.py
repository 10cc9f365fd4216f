"""The hyperbatch command. One verb = one function here, which calls one function a library user can call too.

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 3 trained but missed its target, 75 preempted: run it again
with --resume auto.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import csv
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from hyperbatch import __version__
from hyperbatch.config import Config, fields, format_value, section_titles
from hyperbatch.errors import InputError, Preempted, RunFailed, nearest
from hyperbatch.flags import FullHelp, ShortHelp, translated
from hyperbatch.record import strict_json
from hyperbatch.vocabulary import ALGORITHMS, STRATEGIES, TTA

PREEMPTED = 75  # sysexits.h: EX_TEMPFAIL, "try again later"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    try:
        args = _parse(arguments)
        return args.function(args)
    except InputError as error:
        return _fail(error, 2)
    except Preempted as error:
        return _fail(error, PREEMPTED)
    except RunFailed as error:
        return _fail(error, 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 1)
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        sys.stderr.close()
        return 0


def command() -> NoReturn:
    """What the shell starts: `main`, then out."""
    code = main()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        # Everything is written and closed by now. Taking a CUDA context apart piece by piece would take a second more.
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    raise SystemExit(code)


def _fail(message: object, code: int) -> int:
    if _is_first_rank():  # what one rank finds wrong is told on all of them, see engine.ranks.together
        print(f"hyperbatch: {message}", file=sys.stderr)
    return code


def _is_first_rank() -> bool:
    from hyperbatch.engine.ranks import find_ranks

    try:
        ranks = find_ranks()
    except InputError:
        return True
    return ranks is None or ranks.rank == 0


def _print(args: argparse.Namespace, values: Any, text: str | Callable[[], str]) -> None:
    """With --json one object on stdout and nothing else there; otherwise the text for a person."""
    if args.json:
        print(strict_json(values))
    else:
        print(text if isinstance(text, str) else text())


# What each bench takes beside --json
BENCH_OPTIONS = {
    "comm": ("size_mb", "grid", "nproc", "rounds"),
    "step": ("model", "batch", "peers", "max_autotune", "rounds", "data", "steps"),
}


# Verbs


def _train(args: argparse.Namespace) -> int:
    from hyperbatch.engine.ranks import find_ranks

    if args.world_size and not args.dry_run:
        raise InputError("--world-size belongs to --dry-run; start N processes with --nproc N or a launcher")
    config = _config(args)
    if args.save_config:
        from hyperbatch.recipes.files import save_config

        save_config(config, args.save_config, recipe=args.recipe if ":" in (args.recipe or "") else None)
        hint = f"config: {args.save_config} (`hyperbatch train --config {args.save_config}` trains it)"
        _print(args, {"config": args.save_config}, hint)
        return 0
    if args.dry_run:
        from hyperbatch.preview import format_preview, preview

        answer = preview(config, _world_size(args, config.run.nproc, config.run.device))
        _print(args, answer.to_dict(), lambda: format_preview(answer))
        return 0
    from hyperbatch.launch import train

    record = train(config)
    if _is_first_rank():
        from hyperbatch.report.summary import summary

        _print(args, record.to_dict(), lambda: summary(record))
    missed = record.result.target_top1 is not None and not record.result.reached
    # Under somebody's launcher a rank that finished exits 0, or the agent would take the miss for a crash.
    return 3 if missed and find_ranks() is None else 0


def _sweep(args: argparse.Namespace) -> int:
    from hyperbatch.sweep import command

    plan_file, out = Path(args.plan), Path(args.out) if args.out else None

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if args.dry_run:
        from hyperbatch.sweep.plan import load_plan

        plan = load_plan(plan_file, data=args.data)
        command.check_runs(plan)
        _print(args, plan.to_dict(), lambda: command.format_plan_runs(plan))
    elif args.row is not None:
        row = command.rerun(plan_file, args.row, data=args.data)
        _print(args, row.to_dict(), lambda: command.progress_line(row))
    else:
        options = {"until_s": args.until, "retry_failed": args.retry_failed, "keep_runs": args.keep_runs}
        if args.side_by_side > 1:
            result = command.side_by_side(plan_file, out, args.side_by_side, data=args.data, **options)
        else:
            result = command.sweep(plan_file, out, data=args.data, part=args.part, say=say, **options)
        _print(args, result.to_dict(), lambda: command.format_sweep(result))
    return 0


def _recipes(args: argparse.Namespace) -> int:
    from hyperbatch.recipes.listing import format_recipes, list_recipes

    _print(args, {"recipes": list_recipes()}, format_recipes)
    return 0


def _eval(args: argparse.Namespace) -> int:
    from hyperbatch.engine.evaluate import evaluate_checkpoint

    values = evaluate_checkpoint(
        Path(args.checkpoint),
        data=args.data,
        device=args.device,
        tta=args.tta,
        averaged=args.weights == "averaged",
        trust_code=args.trust_code,
    )
    which = ", averaged weights" if values["weights"] == "averaged" else ""
    lines = [f"top-1 {values['top1']:.2%} of {values['samples']:,} images (step {values['step']}{which})"]
    if values["tta"] != "none":
        lines.append(f"  without test-time augmentation ({values['tta']}) {values['top1_plain']:.2%}")
    top5 = f"top-5 {values['top5']:.2%}, " if "top5" in values else ""
    lines.append(f"  {top5}loss {values['val_loss']:.4f}")
    names, by_class = values["classes"], values["by_class"]
    for label, answer, count in by_class.get("confusions", ())[:3]:
        lines.append(f"  {names[label]} taken for {names[answer]}: {count:,} of {by_class['samples'][label]:,}")
    if bad := values["warnings"]:
        lines.append(f"  warning  {len(bad):,} unreadable, shown black; the first: {bad[0]} (--json lists all)")
    _print(args, values, lambda: "\n".join(lines))
    return 0


def _predict(args: argparse.Namespace) -> int:
    from hyperbatch.predict import find_images, load_model

    if args.json and args.csv:
        raise InputError("--json and --csv exclude each other; give one")
    images = find_images(args.images)
    averaged = args.weights == "averaged"
    classifier = load_model(args.model, device=args.device, averaged=averaged, trust_code=args.trust_code)
    found = classifier.stream(images, top=args.top)
    failed = 0
    if args.json:
        answers = list(found)
        failed = sum(bool(answer.error) for answer in answers)
        print(strict_json({"model": args.model, "images": [answer.to_dict() for answer in answers]}))
        return 1 if failed else 0
    table = csv.writer(sys.stdout, lineterminator="\n")
    if args.csv:
        table.writerow(("image", "rank", "class", "probability"))
    for answer in found:
        if answer.error:
            failed += 1
            print(f"hyperbatch: {answer.error}", file=sys.stderr)
        elif args.csv:
            table.writerows((answer.image, rank, *best) for rank, best in enumerate(answer.top, start=1))
        else:
            print(f"{answer.image}  {', '.join(f'{name} {share:.1%}' for name, share in answer.top)}", flush=True)
    return 1 if failed else 0


def _plan(args: argparse.Namespace) -> int:
    from hyperbatch.plan.planner import format_plan, make_plan

    plan = make_plan(args.recipe, gpus=args.gpus, strategy=args.strategy, **_workload(args))
    values = plan.to_dict()
    steps = {f"{values['recipe']} on {values['gpus']} x {values['cluster']}, {values['strategy']}": plan.step.timing}
    if args.trace:
        from hyperbatch.record import write_trace

        write_trace(Path(args.trace), steps)
    if args.plot:
        from hyperbatch.report.picture import plan_picture, write_picture

        write_picture(Path(args.plot), plan_picture(plan))
    _print(args, values, lambda: format_plan(plan))
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from hyperbatch.sim.sweep import format_simulation, simulate

    simulation = simulate(args.recipe, gpus=_numbers(args.gpus, "--gpus"), **_workload(args))
    values = simulation.to_dict()
    if args.plot:
        from hyperbatch.report.picture import charts_picture, sweep_charts, write_picture

        write_picture(Path(args.plot), charts_picture(*sweep_charts(values)))
    _print(args, values, lambda: format_simulation(simulation))
    return 0


def _workload(args: argparse.Namespace) -> dict[str, Any]:
    """What `plan` and `simulate` both ask for."""
    names = ("cluster", "grid", "algorithm", "global_batch", "batch_per_rank")
    return {name: getattr(args, name) for name in names}


def _data(args: argparse.Namespace) -> int:
    from hyperbatch.data.pack import info, pack
    from hyperbatch.data.remote.store import is_address
    from hyperbatch.data.verify import verify

    given = args.source if args.action == "pack" else args.folder
    folder, remote = Path(given), is_address(given)
    if remote and args.action == "verify":
        raise InputError(f"{given}: data verify reads a folder; copy the set to this host first")
    if not remote and (not folder.exists() or (args.action == "verify" and not folder.is_dir())):
        raise InputError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    if args.action == "info":
        values = info(args.folder).to_dict()
        _print(args, values, lambda: json.dumps(values, indent=1))
        return 0
    with _progress(args.action) as show:
        if args.action == "pack":
            report = pack(
                args.source,
                args.target,
                shard_bytes=args.shard_mb << 20,
                split=args.split,
                append=args.append,
                skip_bad=args.skip_bad,
                max_side=args.max_side,
                quality=args.quality,
                decoded=args.decoded,
                workers=args.workers or 0,
                progress=show,
            )
        else:
            report = verify(args.folder, decode=args.decode, progress=show)
    values = report.to_dict()
    _print(args, values, lambda: _lines(values))
    return 0 if values.get("ok", True) else 1


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """A function that is told (samples done, samples in all) and shows the rate and the time left, on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:  # a log: a line now and then
        yield _ProgressLines(what, time.monotonic())
        return
    rate = TextColumn("{task.fields[rate]:,.0f} images/s")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, rate=0.0)
        yield lambda done, total: bar.update(task, completed=done, total=total, rate=bar.tasks[0].speed or 0.0)


class _ProgressLines:
    """A line on stderr every ten seconds. What was done before the first call is not counted into the rate."""

    def __init__(self, what: str, now_s: float) -> None:
        self._what, self._start_s, self._said_s = what, now_s, now_s
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        self._before = done if self._before is None else self._before
        if now_s < self._said_s + 10 or done == self._before:
            return
        self._said_s, rate = now_s, (done - self._before) / (now_s - self._start_s)
        left_s = (total - done) / rate
        print(
            f"{self._what}: {done:,} of {total:,} images, {rate:,.0f} images/s, {left_s:,.0f} s left", file=sys.stderr
        )


def _report(args: argparse.Namespace) -> int:
    from hyperbatch.report import write_report

    path = write_report([Path(run) for run in args.runs], Path(args.output) if args.output else None)
    _print(args, {"report": str(path)}, f"report: {path}")
    return 0


def _watch(args: argparse.Namespace) -> int:
    from hyperbatch.report.watch import state, watch

    if args.json and not args.once:
        raise InputError("watch --json prints one object: give --once, too")
    if args.json:
        print(strict_json(state(Path(args.run))))
    else:
        watch(Path(args.run), once=args.once)
    return 0


def _export(args: argparse.Namespace) -> int:
    from hyperbatch.export import EXPORTS

    output = Path(args.output) if args.output else None
    trust = {"trust_code": args.trust_code} if args.format == "onnx" else {}  # the others build no model
    path = EXPORTS[args.format](Path(args.run), output, averaged=args.weights == "averaged", **trust)
    _print(args, {"weights": str(path)}, f"weights: {path}")
    return 0


def _bench(args: argparse.Namespace) -> int:
    import importlib

    names = dict.fromkeys(name for takes in BENCH_OPTIONS.values() for name in takes)
    options = {name: value for name in names if (value := getattr(args, name)) is not None}
    for name in options:
        homes = [f"`bench {what}`" for what, takes in BENCH_OPTIONS.items() if name in takes]
        if f"`bench {args.what}`" not in homes:
            flag = f"--{name.replace('_', '-')}"
            raise InputError(f"{flag} belongs to {' and '.join(homes)}, not to `bench {args.what}`")
    if "batch" in options:
        options["batch"] = _numbers(options["batch"], "--batch")
    if "peers" in options:
        options["peers"] = [name for name in options["peers"].split(",") if name]
    module = importlib.import_module(f"hyperbatch.bench.{args.what}")
    values = getattr(module, f"bench_{args.what}")(**options)
    from hyperbatch.bench.harness import format_table

    if _is_first_rank():
        _print(args, values, lambda: getattr(module, "format_result", format_table)(values))
    return 0


def _profile(args: argparse.Namespace) -> int:
    from hyperbatch.engine.profile import format_profile, profile

    answer = profile(
        args.model,
        device=args.device,
        output=Path(args.output),
        batches=_numbers(args.batches, "--batches") if args.batches else None,
        image_size=args.image_size,
    )
    if _is_first_rank():
        _print(args, answer.to_dict(), lambda: format_profile(answer))
    return 0


def _doctor(args: argparse.Namespace) -> int:
    from hyperbatch.engine.doctor import doctor, format_doctor

    diagnosis = doctor(collectives=args.collectives, nproc=args.nproc)
    if _is_first_rank():
        _print(args, diagnosis.to_dict(), lambda: format_doctor(diagnosis))
    return 0 if diagnosis.ok else 1


def _lines(values: dict[str, Any]) -> str:
    return "\n".join(f"{name:20} {value}" for name, value in values.items())


def _numbers(text: str, flag: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise InputError(f"{flag} {text!r} is not a list of positive numbers, e.g. 512,1024,2048")
    return [int(part) for part in parts]


# From arguments to a config


def _config(args: argparse.Namespace) -> Config:
    """Recipe or the run to continue, then the config file, then flags: every config field is one."""
    from hyperbatch.recipes.files import layered, read_config

    file = read_config(Path(args.config)) if args.config else None
    given = {spec.name: spec.parse(text) for spec in fields() if (text := getattr(args, spec.name)) is not None}
    global_batch = args.global_batch
    if args.batch_per_rank is not None:
        if global_batch is not None:
            raise InputError("--batch-per-rank and --global-batch exclude each other; give one")
        global_batch = args.batch_per_rank * _world_size(args, given.get("nproc", 0), given.get("device", "auto"))
    if global_batch is not None and "batch_phases" in given:
        raise InputError("--batch-phases sets the batch of every phase; leave out --global-batch and --batch-per-rank")
    resumes = given.get("resume") not in (None, False, "no")
    if resumes and (saved := _saved_config(given.get("out"))) is not None:
        return _resumed(saved, args.recipe, file.values if file is not None else {}, given, global_batch)
    return layered(args.recipe, file, given, global_batch=global_batch)


def _saved_config(out: str | None) -> Config | None:
    """Of the run in that folder; None: there is none to continue, which `train` will say."""
    from hyperbatch.engine.folder import has_checkpoint
    from hyperbatch.recipes.files import run_config

    if out is None or not has_checkpoint(Path(out)):
        return None
    config = run_config(Path(out))
    if config is None:  # of an older version
        from hyperbatch.checkpoint import load

        config = load(Path(out)).config
    return config


def _resumed(
    saved: Config, recipe: str | None, file: Mapping[str, Any], given: dict[str, Any], global_batch: int | None
) -> Config:
    """The saved config, and what the command line says anew; `train` refuses what may not change."""
    from hyperbatch.recipes import find_recipe

    if recipe is not None and find_recipe(recipe).config().recipe != saved.recipe:  # a recipe of one's own has a label
        raise InputError(
            f"--resume: the run in {given['out']} is of recipe {saved.recipe}, not {recipe}; leave the recipe out"
        )
    values = {**file, **given}
    if global_batch is not None:
        values["global_batch"] = global_batch
    return saved.override(**values)


def _world_size(args: argparse.Namespace, nproc: int, device: str) -> int:
    """How many ranks this command has or would start."""
    from hyperbatch.engine.agent import default_nproc
    from hyperbatch.engine.ranks import find_ranks

    ranks = find_ranks()
    return args.world_size or (ranks.world_size if ranks is not None else nproc or default_nproc(device))


class _Parser(argparse.ArgumentParser):
    """One line for a mistake, as everywhere else; argparse would print the usage, too."""

    verbs: Mapping[str, argparse.ArgumentParser]

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


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
    if not (first.isdigit() and second.isdigit() and 1 <= int(first) <= int(second)):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N, e.g. 1/2 and 2/2 for two commands side by side")
    return int(first), int(second)


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = _build_parser()
    _check_verb(arguments, parser.verbs)
    if arguments[:1] == ["train"]:
        arguments = translated(arguments)
    args, unknown = parser.parse_known_args(_with_resume_value(arguments))
    if unknown:
        flag = unknown[0].split("=")[0]
        if not flag.startswith("-"):
            raise InputError(
                f"{flag!r} is one argument too many; see `hyperbatch {args.verb or ''} --help`".replace("  ", " ")
            )
        subparser = parser.verbs.get(args.verb, parser)
        flags = [option for action in subparser._actions for option in action.option_strings]
        raise InputError(f"unknown argument {flag!r}{nearest(flag, flags)}")
    if args.function is None:
        parser.print_help()
        raise SystemExit(0)
    return args


def _with_resume_value(arguments: list[str]) -> list[str]:
    """`--resume` alone means yes. argparse would take the recipe that may follow it for its value."""
    values = next(spec.choices for spec in fields() if spec.name == "resume")
    pairs = zip(arguments, [*arguments[1:], ""], strict=True)
    return ["--resume=yes" if word == "--resume" and after not in values else word for word, after in pairs]


def _check_verb(arguments: list[str], verbs: Mapping[str, Any]) -> None:
    """InputError for a first word that is no verb: the nearest one, or what to do with a recipe's name."""
    verb = arguments[0] if arguments else ""
    if not verb or verb.startswith("-") or verb in verbs:
        return
    from hyperbatch.recipes import all_recipes

    if verb in all_recipes():
        raise InputError(f"{verb} is a recipe; train it with `hyperbatch train {verb}`")
    raise InputError(f"unknown verb {verb!r}{nearest(verb, list(verbs))}")


def _build_parser() -> _Parser:
    parser = _Parser(
        prog="hyperbatch",
        description="Train image classifiers to a target accuracy in the shortest time.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hyperbatch {__version__}")
    parser.set_defaults(function=None)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=_Parser)
    parser.verbs = verbs.choices

    def verb(name: str, function: Callable[[argparse.Namespace], int], help: str, **more: Any) -> _Parser:
        sub = verbs.add_parser(name, help=help, description=more.pop("description", help), allow_abbrev=False, **more)
        sub.set_defaults(function=function)
        sub.add_argument("--json", action="store_true", help="print one JSON object on stdout and nothing else there")
        return sub

    def sizes(sub: _Parser) -> None:
        sub.add_argument("--global-batch", type=_positive, metavar="N", help="samples a step over all ranks")
        sub.add_argument("--batch-per-rank", type=_positive, metavar="N", help="samples a step per rank")

    def weights(sub: _Parser) -> None:
        help = "of a run with --averaging ema: its average, or the weights as they were trained [averaged]"
        sub.add_argument("--weights", default="averaged", choices=("averaged", "trained"), help=help)

    def trust(sub: _Parser) -> None:
        help = "import the model or data set that the file names, where it is code of somebody's own"
        sub.add_argument("--trust-code", action="store_true", help=help)

    from hyperbatch.recipes import DEFAULT

    sub = verb(
        "train",
        _train,
        "train a recipe to its target",
        description="Train a recipe (or package.module:function) to its target. A value in brackets is used where "
        "the recipe sets none; a yes-or-no field is set by --field and unset by --no-field.",
        usage="hyperbatch train [RECIPE] [--data DIR] [--nproc N] [--out DIR] [--resume [auto]] [--dry-run] "
        "[--FIELD VALUE]",
        add_help=False,
    )
    sub.add_argument("-h", "--help", action=ShortHelp, help="show the most common flags and exit")
    sub.add_argument("--help-all", action=FullHelp, help="show all flags by section and exit")
    sub.add_argument(
        "recipe", nargs="?", metavar="RECIPE", help=f"see `hyperbatch recipes` [{DEFAULT}, or the config file's]"
    )
    sub.add_argument("--config", metavar="FILE", help="TOML file of config fields: between the recipe and the flags")
    sub.add_argument("--save-config", metavar="FILE", help="write such a file of this run and start nothing")
    sub.add_argument("--dry-run", action="store_true", help="print everything resolved and start nothing")
    sub.add_argument("--world-size", type=_positive, metavar="N", help="ranks to resolve a --dry-run for")
    sizes(sub)
    groups = {name: sub.add_argument_group(title) for name, title in section_titles().items()}
    for spec in fields():
        choices = f" ({', '.join(spec.choices)})" if spec.choices else ""
        help = f"{spec.help}{choices} [{format_value(spec.default)}]".replace("%", "%%")
        group = groups[spec.section]
        if spec.type is bool:
            group.add_argument(spec.flag, dest=spec.name, action="store_const", const="true", help=help)
            off = spec.flag.replace("--", "--no-", 1)
            group.add_argument(off, dest=spec.name, action="store_const", const="false", help=argparse.SUPPRESS)
        else:
            group.add_argument(spec.flag, dest=spec.name, metavar="VALUE", help=help)
    sub.add_argument("--no-resume", dest="resume", action="store_const", const="no", help=argparse.SUPPRESS)

    sub = verb(
        "sweep",
        _sweep,
        "train the runs of a plan, many in one process, and compare them",
        description="Train every run of a plan (arms, grids, seeds; see docs/sweep.md) that the folder has no row of "
        "yet, write a row as each ends, and compare the arms in a table and a report.",
    )
    sub.add_argument("plan", metavar="PLAN.toml", help="what to run")
    sub.add_argument("--out", metavar="DIR", help="folder of rows and report [sweeps/NAME]")
    sub.add_argument("--data", metavar="DIR", help="folder of the data set")
    sub.add_argument("--until", type=_seconds, metavar="SECONDS", help="begin no run later than this")
    sub.add_argument("--part", type=_part, default=(1, 1), metavar="K/N", help="the K-th of N commands side by side")
    sub.add_argument(
        "--side-by-side", type=_positive, default=1, metavar="N", help="start N processes that share the runs"
    )
    sub.add_argument("--retry-failed", action="store_true", help="make runs again that failed or diverged")
    sub.add_argument("--keep-runs", action="store_true", help="keep a folder of each run's metrics, under DIR/runs")
    sub.add_argument("--row", type=_positive, metavar="N", help="make run N of the plan again and print its row")
    sub.add_argument("--dry-run", action="store_true", help="list the runs with their commands and start nothing")

    verb("recipes", _recipes, "list the recipes with their claims and sources")

    sub = verb("eval", _eval, "evaluate a run, a checkpoint or an exported model")
    sub.add_argument("checkpoint", metavar="RUN|MODEL", help="a run's folder, a checkpoint, or a .safetensors export")
    sub.add_argument("--data", metavar="DIR", help="folder of the data set [the run's]")
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    sub.add_argument("--tta", choices=TTA, help="test-time augmentation [as the run evaluated]")
    weights(sub)
    trust(sub)

    sub = verb("predict", _predict, "name the most probable classes of images")
    sub.add_argument("model", metavar="RUN|MODEL", help="a run's folder, a checkpoint, or a .safetensors export")
    sub.add_argument("images", nargs="+", metavar="IMAGE", help="image files, or folders that hold some at any depth")
    sub.add_argument("--top", type=_positive, default=5, metavar="K", help="classes per image [5]")
    sub.add_argument("--csv", action="store_true", help="print a table: image, rank, class, probability")
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    weights(sub)
    trust(sub)

    for name, function, help in (
        ("plan", _plan, "choose grid, groups and algorithm for a cluster"),
        ("simulate", _simulate, "predict a run on a cluster you do not have yet"),
    ):
        sub = verb(name, function, help)
        sub.add_argument("recipe", nargs="?", default="fujitsu_resnet50", metavar="RECIPE")
        sub.add_argument(
            "--cluster", default=None, metavar="NAME|FILE", help="cluster name or machine file [the recipe's]"
        )
        sub.add_argument("--grid", metavar="ROWSxCOLUMNS")
        sub.add_argument("--algorithm", choices=ALGORITHMS)
        sizes(sub)
        if name == "plan":
            sub.add_argument("--gpus", type=_positive, metavar="N", help="GPUs [the recipe's]")
            sub.add_argument("--trace", metavar="FILE", help="write the step's time line for Perfetto")
            sub.add_argument("--plot", metavar="FILE", help="draw the step and its alternatives as an SVG picture")
            sub.add_argument("--strategy", choices=STRATEGIES, help="grouping")
        else:
            sub.add_argument(
                "--gpus", required=True, metavar="N,N,...", help="GPU counts to predict, e.g. 512,1024,2048"
            )
            sub.add_argument("--plot", metavar="FILE", help="draw time, speed, efficiency and cost as an SVG picture")

    sub = verb("profile", _profile, "measure this machine and write a machine file for `simulate`")
    sub.add_argument("--model", default="resnet50")
    sub.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    sub.add_argument("--output", default="machine.toml", metavar="FILE")
    sub.add_argument("--batches", metavar="N,N,...", help="samples per step to measure [32,128,256; on a CPU 2,8]")
    sub.add_argument("--image-size", type=_positive, metavar="N", help="pixels [the model's usual]")

    sub = verb("bench", _bench, "measure one part against its peers")
    sub.add_argument("what", choices=("lars", "muon", "step", "comm", "data"))
    sub.add_argument("--rounds", type=_positive, help="interleaved rounds of comm [5] and step [10; on a CPU 3]")
    step = sub.add_argument_group(
        "step", "the whole training step against torch's, on synthetic data on the device; on a CPU a small smoke run"
    )
    step.add_argument("--model", metavar="NAME", help="a built-in model [resnet50; on a CPU resnet20]")
    step.add_argument("--batch", metavar="N,N,...", help="samples a step, one after the other [16,42,256,400; 32]")
    step.add_argument(
        "--peers", metavar="NAME,...", help="of eager, graph, masters and compile, which takes a minute a batch [all]"
    )
    step.add_argument(
        "--max-autotune", action="store_true", default=None, help="torch.compile's max-autotune, too: takes minutes"
    )
    step.add_argument(
        "--data", metavar="DIR", help='train through the engine on these images instead; "generated": JPEGs made for it'
    )
    step.add_argument("--steps", type=_positive, metavar="N", help="steps of --data [200; on a CPU 20]")
    comm = sub.add_argument_group(
        "comm", "every all-reduce against the backend's own: under torchrun, srun or mpirun, or on this host alone"
    )
    comm.add_argument("--size-mb", type=_positive, metavar="N", help="megabytes of the all-reduced message [25]")
    comm.add_argument("--grid", metavar="ROWSxCOLUMNS", help="grid of the ranks [hosts x ranks per host]")
    comm.add_argument("--nproc", type=_positive, metavar="N", help="ranks to start on this host [one per GPU]")

    sub = verb("data", _data, "pack, verify or describe a data set")
    actions = sub.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=_Parser)
    action = actions.add_parser("pack", help="write tar shards with an index from a folder or tars")
    action.add_argument("source", metavar="SRC")
    action.add_argument("target", metavar="DST")
    action.add_argument("--workers", type=_positive, default=None, metavar="N", help="threads [one per core]")
    action.add_argument("--shard-mb", type=_positive, default=512, metavar="N", help="size of a shard in MiB [512]")
    action.add_argument("--split", choices=("train", "val"), help="pack this split alone [both]")
    action.add_argument(
        "--append", action="store_true", help="add classes that DST does not hold yet, after those it has"
    )
    action.add_argument(
        "--skip-bad", action="store_true", help="leave out images that cannot be decoded, and list them in skipped.txt"
    )
    action.add_argument("--max-side", type=_positive, metavar="PIXELS", help="shrink images with a longer side")
    action.add_argument("--quality", type=_positive, metavar="1-100", help="compress again as JPEG of this quality")
    action.add_argument("--decoded", action="store_true", help="store plain pixels: large, but nothing to decode")
    action = actions.add_parser("verify", help="check every sample, label and checksum of a packed set")
    action.add_argument("folder", metavar="DIR")
    action.add_argument("--decode", action="store_true", help="decode every image, too")
    actions.add_parser("info", help="describe a data set").add_argument("folder", metavar="DIR")
    for action in actions.choices.values():  # the flag may stand after the action, too
        action.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)

    sub = verb("report", _report, "draw report.html from one run, or compare several")
    sub.add_argument("runs", nargs="+", metavar="RUN")
    sub.add_argument("--output", metavar="FILE")

    sub = verb("watch", _watch, "follow a run in the terminal")
    sub.add_argument("run", metavar="RUN")
    sub.add_argument("--once", action="store_true", help="print the present state and leave")

    sub = verb("export", _export, "write a run's model as safetensors or ONNX, or for torch.distributed.checkpoint")
    sub.add_argument("run", metavar="RUN", help="a run's folder, a checkpoint, or a .safetensors export")
    sub.add_argument(
        "--output", metavar="FILE", help="file, or folder of dcp [model.safetensors, model.onnx, model.dcp of the run]"
    )
    help = (
        "safetensors: weights, class names and preprocessing; onnx: the same as a program of its own; "
        "dcp: a folder of torch.distributed.checkpoint, with the optimizer's state [safetensors]"
    )
    sub.add_argument("--format", default="safetensors", choices=("safetensors", "onnx", "dcp"), help=help)
    weights(sub)
    trust(sub)

    sub = verb("doctor", _doctor, "check this machine; --collectives verifies every all-reduce on its GPUs")
    sub.add_argument(
        "--collectives", action="store_true", help="on this host, or under torchrun, srun or mpirun on all of theirs"
    )
    sub.add_argument("--nproc", type=_positive, default=None, metavar="N", help="processes for --collectives")
    return parser
