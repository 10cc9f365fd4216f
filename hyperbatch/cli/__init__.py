"""The hyperbatch command: one module per group of verbs, and one function per verb, which calls one function that a
library user can call, too.

    parser.py    all verbs as one parser; mistyped words get one line
    shared.py    what the verbs share: types of values, groups of flags, output
    flags.py     what `train --help` shows, and the names that other trainers have for our flags
    train.py     train, recipes          sweep.py    sweep            models.py    eval, predict, export
    runs.py      report, watch           data.py     data             plan.py      plan, simulate
    machine.py   profile, bench, doctor
    byte_code.py makes the next start quicker where Python does not

Whatever a verb needs is imported when it runs, so that `hyperbatch --help` answers at once.

Exit codes: 0 done, 1 the run failed, 2 the input was wrong, 3 trained but missed its target, 75 preempted: run it again
with --resume auto.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import NoReturn

from hyperbatch.cli.byte_code import keep_byte_code
from hyperbatch.cli.parser import parse
from hyperbatch.cli.shared import discard_output, is_first_rank, open_streams
from hyperbatch.errors import InputError, Preempted, RunFailed, notes_of

RANK_0_S = 2.0  # a launcher ends all ranks with the first that fails, and it is rank 0 that says what is wrong
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
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        discard_output()
        return 0


def command() -> NoReturn:
    """What the shell starts: `main`, then out."""
    from hyperbatch.engine.ranks import find_ranks

    open_streams()
    with contextlib.suppress(InputError):  # of the environment: `main` tells it
        if find_ranks() is None:  # the ranks of a launcher would all write to one home
            keep_byte_code()
    code = main()
    if "torch" in sys.modules:
        from hyperbatch.engine.worker import leave

        leave(code)
    raise SystemExit(code)


def _fail(message: object, code: int) -> int:
    if is_first_rank():  # what one rank finds wrong is told on all of them, see engine.ranks.together
        try:
            line = str(message).replace("\n", "\\n")  # the name of a file may hold one
            print(f"hyperbatch: {line}", file=sys.stderr)
        except BrokenPipeError:  # nobody reads it, and the code still counts
            discard_output()
    elif code == 2:
        time.sleep(RANK_0_S)
    return code
