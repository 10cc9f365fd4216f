"""The flags of `hyperbatch train` in its help (common ones, or all by section), and their names in other trainers."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from hyperbatch.config import section_titles
from hyperbatch.errors import InputError

# The flags that `train --help` shows, in this order. `--help-all` shows all flags.
COMMON = (
    *("recipe", "data", "model", "init_from", "epochs", "global_batch", "lr", "precision", "target_top1"),
    *("nproc", "out", "resume", "config", "dry_run", "json", "help", "help_all"),
)

# Flags of other trainers -> our flags. A flag keeps the value that follows it.
SYNONYMS: dict[str, tuple[str, ...]] = {
    "--learning-rate": ("--lr",),
    "--wd": ("--weight-decay",),
    "--opt": ("--optimizer",),
    "--smoothing": ("--label-smoothing",),
    "--workers": ("--data-threads",),
    "--num-workers": ("--data-threads",),
    "--data-dir": ("--data",),
    "--data-path": ("--data",),
    "--input-size": ("--image-size",),
    "--img-size": ("--image-size",),
    "--arch": ("--model",),
    "--max-epochs": ("--epochs",),
    "--num-epochs": ("--epochs",),
    "--gpus": ("--nproc",),
    "--num-gpus": ("--nproc",),
    "--output": ("--out",),
    "--output-dir": ("--out",),
    "--grad-accum": ("--accumulate",),
    "--gradient-accumulation-steps": ("--accumulate",),
    "--log-interval": ("--log-every-steps",),
    "--amp": ("--precision", "auto"),
    "--fp16": ("--precision", "fp16"),
    "--bf16": ("--precision", "bf16"),
    "--mixup-alpha": ("--mixup",),
    "--cutmix-alpha": ("--cutmix",),
    "--clip-grad": ("--clip-norm",),
    "--grad-clip-norm": ("--clip-norm",),
    "--ema": ("--averaging", "ema"),
    "--ema-decay": ("--averaging-decay",),
}
_BATCH = "use --global-batch N for the samples per step over all ranks, or --batch-per-rank N for each rank"
# Flags that could mean several things -> what to use instead.
UNCLEAR = {
    "--batch-size": _BATCH,
    "--bs": _BATCH,
    "--batch": _BATCH,
    "-b": _BATCH,
    "--pretrained": "use --init-from FILE for the initial weights",
    "--checkpoint": "use --init-from FILE to start from its weights, or --resume --out RUN to continue its run",
    "--warmup-steps": "use --warmup-epochs, which may be a fraction",
    "--recipe": "write the name of the recipe without a flag, as in `hyperbatch train digits`",
}


def translated(arguments: Sequence[str]) -> list[str]:
    """Replaces flags of other trainers by ours, and underscores in flags by dashes. InputError names the alternatives
    if a flag is ambiguous."""
    words: list[str] = []
    for word in arguments:
        flag, equals, value = word.partition("=")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")  # as in --batch_size
        if flag in UNCLEAR:
            raise InputError(f"{flag}: {UNCLEAR[flag]}")
        meant = SYNONYMS.get(flag)
        if meant is None:
            words.append(f"{flag}{equals}{value}")
        elif not equals:
            words += meant
        elif len(meant) == 1:
            words.append(f"{meant[0]}={value}")
        else:
            raise InputError(f"{flag} takes no value; it stands for {' '.join(meant)}")
    return words


class Help(argparse.Action):
    """A flag without a value that prints a help text and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **more: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **more)


class ShortHelp(Help):
    """-h, --help: prints the flags of COMMON and says how to list the rest."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        shown = {action.dest: action for action in reversed(parser._actions) if action.help != argparse.SUPPRESS}
        more = f"Every field of the config is a flag: `{parser.prog} --help-all` lists them by section"
        short = argparse.ArgumentParser(
            prog=parser.prog,
            usage=parser.usage,
            description=parser.description,
            epilog=f"{more}: {'; '.join(section_titles().values())}.",
            add_help=False,
        )
        for name in COMMON:
            short._add_action(shown[name])
        short.print_help()
        parser.exit()


class FullHelp(Help):
    """--help-all: prints every flag."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        parser.print_help()
        parser.exit()
