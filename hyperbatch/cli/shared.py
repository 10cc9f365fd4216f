"""What the verbs share: the parser's class, types of values, groups of flags, and how an answer is printed."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from hyperbatch.durable import FULL
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.record import strict_json

DEVICES = ("auto", "cpu", "cuda")

# What a verb runs: it gets the parsed arguments and returns the exit code.
Function = Callable[[argparse.Namespace], int]
AddVerb = Callable[..., "Parser"]  # (name, function, help, **more of argparse) -> the parser to add flags to


class Parser(argparse.ArgumentParser):
    """One line for a mistake, as everywhere else, where argparse would print the usage, too."""

    verbs: Mapping[str, argparse.ArgumentParser]

    def __init__(self, *, add_help: bool = True, **more: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **more)
        if add_help:
            self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def error(self, message: str) -> NoReturn:
        raise InputError(f"{message}; see `{self.prog} --help`")


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive whole number")
    return int(text)


def numbers(text: str, flag: str) -> list[int]:
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise InputError(f"{flag} {text!r} is not a list of positive numbers, e.g. 512,1024,2048")
    return [int(part) for part in parts]


def show(args: argparse.Namespace, values: Any, text: str | Callable[[], str]) -> None:
    """With --json one object on stdout and nothing else there; otherwise the text for a person."""
    line = strict_json(values) if args.json else text if isinstance(text, str) else text()
    with written():
        print(line)


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Around what prints an answer: it is flushed, and a disk that has no room for it is told in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise
        discard_output()
        raise RunFailed(f"the output cannot be written: {error.strerror}; write it to a disk with free space") from None


def discard_output() -> None:
    """From here on nobody takes what is written, on which Python would fail once more when it ends."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())


def open_streams() -> None:
    """Whoever started this command may have closed its stdin, stdout or stderr (`>&-`). The next files that it opens
    would get their numbers, and whatever is printed. And no text may be too foreign to be printed."""
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number, which is this one
            setattr(sys, name, os.fdopen(descriptor, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # a file or class may have a name that is not in its encoding
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def is_first_rank() -> bool:
    from hyperbatch.engine.ranks import find_ranks

    try:
        ranks = find_ranks()
    except InputError:
        return True
    return ranks is None or ranks.rank == 0


def add_device(parser: Parser) -> None:
    parser.add_argument("--device", default="auto", choices=DEVICES, help="Where to run. [default: auto]")


def add_sizes(parser: Parser) -> None:
    parser.add_argument("--global-batch", type=positive, metavar="N", help="Samples per step over all ranks.")
    parser.add_argument("--batch-per-rank", type=positive, metavar="N", help="Samples per step on each rank.")


def add_weights(parser: Parser) -> None:
    help = "For a run with --averaging ema: use the averaged weights or the trained ones. [default: averaged]"
    parser.add_argument("--weights", default="averaged", choices=("averaged", "trained"), help=help)


def add_trust(parser: Parser) -> None:
    help = "Allow importing the Python code of a custom model or data set that the file names."
    parser.add_argument("--trust-code", action="store_true", help=help)
