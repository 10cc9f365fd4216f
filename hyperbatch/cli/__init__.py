"""The hyperbatch command: one module per group of verbs, one function per verb, which calls one function of the
library.

    parser.py    all verbs as one parser; one-line errors for unknown words
    shared.py    what the verbs share: types of values, groups of flags, output
    flags.py     what `train --help` shows, and the names that other trainers have for our flags
    train.py     train, recipes          sweep.py    sweep            models.py    eval, predict, export
    runs.py      report, watch           data.py     data             plan.py      plan, simulate
    machine.py   profile, bench, doctor
    byte_code.py caches byte code where Python does not, so that the next start is faster

Each verb imports what it needs when it runs, so that `hyperbatch --help` is fast.

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 3 trained but missed its target, 75 preempted: run it again
with --resume auto.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import sys
import time
from typing import NoReturn

from hyperbatch.cli.byte_code import keep_byte_code
from hyperbatch.cli.parser import parse
from hyperbatch.cli.shared import discard_output, open_streams, place_of_rank
from hyperbatch.errors import InputError, Interrupted, Preempted, RunFailed, notes_of
from hyperbatch.tables import printable

RANK_0_S = 2.0  # when one rank fails, the launcher ends all ranks; this gives rank 0 time to print the error
PREEMPTED = 75  # sysexits.h: EX_TEMPFAIL, "try again later"


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    try:
        args = parse(arguments)
        return args.function(args)
    except InputError as error:
        return _fail(error, 2)
    except Preempted as error:
        return _fail(error, PREEMPTED)
    except RunFailed as error:
        return _fail(error, 1)
    except KeyboardInterrupt as error:
        return _fail("; ".join(("interrupted", *notes_of(error))), 1)
    except BrokenPipeError:  # the reader of our output has closed it, as `| head` does
        discard_output()
        return 0
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:
            raise
        return _fail(InputError(f"{error.filename}: {error.strerror}; give a shorter one"), 2)


def command() -> NoReturn:
    """The entry point of the shell command: runs `main` and exits."""
    from hyperbatch.engine.ranks import find_ranks

    open_streams()
    with contextlib.suppress(InputError):  # wrong environment variables, which `main` reports
        if find_ranks() is None:  # the ranks of a launcher would all write to one home folder
            keep_byte_code()
    code = main()
    if "torch" in sys.modules:
        from hyperbatch.engine.worker import leave

        leave(code)
    raise SystemExit(code)


def _fail(error: InputError | RunFailed | str, code: int) -> int:
    """Prints the error on rank 0 and returns the code. Before the ranks have met, each knows only its own errors: a
    file that is missing on its host, which the host's first rank prints, a missing GPU, or a connection that failed."""
    place = place_of_rank()
    if place is not None and place.rank > 0:
        if code == 2:
            time.sleep(RANK_0_S)
        if isinstance(error, (str, Interrupted)) or error.on_all_ranks or (place.local_rank > 0 and error.on_host):
            return code
        error = f"rank {place.rank} (host {socket.gethostname()}): {error}"
    try:
        print(f"hyperbatch: {printable(str(error))}", file=sys.stderr)
    except BrokenPipeError:  # nobody reads the message, but the exit code still counts
        discard_output()
    return code
