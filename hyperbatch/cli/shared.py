"""What the verbs share: the parser class, types of values, groups of flags, and printing of results."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from hyperbatch.durable import FULL
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.record import strict_json

if TYPE_CHECKING:
    from hyperbatch.engine.ranks import Ranks

DEVICES = ("auto", "cpu", "cuda")

# A verb's function: it gets the parsed arguments and returns the exit code.
Function = Callable[[argparse.Namespace], int]
AddVerb = Callable[..., "Parser"]  # (name, function, help, **more of argparse) -> the parser to add flags to


class Parser(argparse.ArgumentParser):
    """Reports a mistake in one line, as elsewhere; argparse would also print the usage."""

    verbs: Mapping[str, argparse.ArgumentParser]

    def __init__(self, *, add_help: bool = True, **more: Any) -> None:
        super().__init__(add_help=False, allow_abbrev=False, **more)
        if add_help:
            self.add_argument("-h", "--help", action="help", help="Show this help and exit.")

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "it takes no value, but was given")
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
    """Prints one JSON object with --json, and nothing else to stdout; otherwise prints the text."""
    line = strict_json(values) if args.json else text if isinstance(text, str) else text()
    with written():
        print(line)


@contextlib.contextmanager
def written() -> Iterator[None]:
    """Flushes what was printed inside it, and reports a full disk in one line."""
    try:
        yield
        sys.stdout.flush()
    except OSError as error:
        if error.errno not in FULL:
            raise
        discard_output()
        raise RunFailed(f"the output cannot be written: {error.strerror}; write it to a disk with free space") from None


def discard_output() -> None:
    """Discards all further output. Python would otherwise fail once more when it flushes the closed stream at exit."""
    null = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            os.dup2(null, stream.fileno())


def open_streams() -> None:
    """Opens stdin, stdout and stderr if the caller has closed them (`>&-`), and accepts every text.

    Otherwise the next opened files would get these descriptors, and receive whatever is printed.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        if getattr(sys, name) is None:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest free number is `descriptor`
            setattr(sys, name, os.fdopen(descriptor, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files or classes may not fit the encoding
        is_utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
        sys.stdout.reconfigure(errors="surrogateescape" if is_utf8 else "backslashreplace")


def place_of_rank() -> Ranks | None:
    """Returns the ranks as set by a launcher. None if there is none, or if its variables are wrong, which the verb
    reports."""
    from hyperbatch.engine.ranks import find_ranks

    with contextlib.suppress(InputError):
        return find_ranks()
    return None


def is_first_rank() -> bool:
    ranks = place_of_rank()
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
