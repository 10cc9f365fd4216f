"""`hyperbatch data pack`, `verify` and `info`."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hyperbatch.cli.shared import AddVerb, Parser, positive, show
from hyperbatch.errors import InputError


def add(verb: AddVerb) -> None:
    parser = verb("data", _data, "Pack, verify or describe a data set.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", parser_class=Parser)

    def action(name: str, help: str) -> Parser:
        return actions.add_parser(name, help=help, description=help)

    pack = action("pack", "Write a data set as tar shards with an index.")
    pack.add_argument("source", metavar="SRC", help="Folder, archive or table of the data set (see docs/data.md).")
    pack.add_argument("target", metavar="DST", help="Folder to write the shards to.")
    pack.add_argument(
        "--workers", type=positive, default=None, metavar="N", help="Number of threads. [default: one per core]"
    )
    pack.add_argument("--shard-mb", type=positive, default=512, metavar="N", help="Shard size in MiB. [default: 512]")
    pack.add_argument("--split", choices=("train", "val"), help="Pack only this split. [default: both]")
    pack.add_argument("--append", action="store_true", help="Add new classes after those that DST already holds.")
    help = "Leave out images that cannot be decoded and list them in skipped.txt."
    pack.add_argument("--skip-bad", action="store_true", help=help)
    help = "Shrink larger images so that their shorter side has this length."
    pack.add_argument("--short-side", type=positive, metavar="PIXELS", help=help)
    pack.add_argument("--quality", type=positive, metavar="1-100", help="Re-encode images as JPEG of this quality.")
    help = "Store decoded pixels, which take more space but need no decoding."
    pack.add_argument("--decoded", action="store_true", help=help)
    verify = action("verify", "Check every sample, label and checksum of a packed data set.")
    verify.add_argument("folder", metavar="DIR", help="Folder or address of the packed data set.")
    verify.add_argument("--decode", action="store_true", help="Decode every image as well.")
    help = "Folder, archive, table or address of the data set."
    action("info", "Describe a data set.").add_argument("folder", metavar="DIR", help=help)
    for sub in actions.choices.values():  # the flag may also follow the action
        sub.add_argument("--json", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)


def _data(args: argparse.Namespace) -> int:
    from hyperbatch.data.pack import info, pack
    from hyperbatch.data.remote.store import is_address
    from hyperbatch.data.source import is_there
    from hyperbatch.data.texts import format_info, format_pack, format_verify
    from hyperbatch.data.verify import verify

    given = args.source if args.action == "pack" else args.folder
    folder, remote = Path(given), is_address(given)
    if not remote and (not is_there(folder) or (args.action == "verify" and not folder.is_dir())):
        raise InputError(f"{folder} is not a folder" if folder.exists() else f"{folder} does not exist")
    if args.action == "info":
        described = info(args.folder)
        show(args, described.to_dict(), lambda: format_info(described))
        return 0
    if args.action == "verify":
        with _progress(args.action) as progress:
            found = verify(args.folder, decode=args.decode, progress=progress)
        show(args, found.to_dict(), lambda: format_verify(found))
        return 0 if found.ok else 1
    with _progress(args.action) as progress:
        packed = pack(
            args.source,
            args.target,
            shard_bytes=args.shard_mb << 20,
            split=args.split,
            append=args.append,
            skip_bad=args.skip_bad,
            short_side=args.short_side,
            quality=args.quality,
            decoded=args.decoded,
            workers=args.workers or 0,
            progress=progress,
        )
    show(args, packed.to_dict(), lambda: format_pack(packed))
    return 0


@contextlib.contextmanager
def _progress(what: str) -> Iterator[Callable[[int, int], None]]:
    """Yields a function (samples done, samples in total) that shows the rate and the remaining time on stderr."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:  # a log gets a line every ten seconds
        yield _ProgressLines(what)
        return
    rate = TextColumn("{task.fields[rate]:,.0f} images/s")
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), rate, TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, rate=0.0)
        yield lambda done, total: bar.update(task, completed=done, total=total, rate=bar.tasks[0].speed or 0.0)


class _ProgressLines:
    """Prints a line on stderr every ten seconds. The rate counts only samples and time after the first call."""

    def __init__(self, what: str) -> None:
        self._what, self._start_s, self._said_s = what, 0.0, 0.0
        self._before: int | None = None

    def __call__(self, done: int, total: int) -> None:
        now_s = time.monotonic()
        if self._before is None:
            self._before, self._start_s, self._said_s = done, now_s, now_s
        if now_s < self._said_s + 10 or done == self._before:
            return
        self._said_s, rate = now_s, (done - self._before) / (now_s - self._start_s)
        left_s = (total - done) / rate
        print(
            f"{self._what}: {done:,} of {total:,} images, {rate:,.0f} images/s, {left_s:,.0f} s left", file=sys.stderr
        )
