"""One rank, as the elastic agent starts it: python -m hyperbatch.engine.worker CONFIG.json."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1


def main(config_path: Path) -> int:
    """0 when the run ended, target reached or not, or was preempted: the parent reads the record. Failures are left
    beside the config."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C during imports would print where they were
    end_with_parent()
    gc.disable()  # torch's modules make 200,000 objects that stay; to look through them meanwhile takes 0.2 s
    from hyperbatch.config import Config
    from hyperbatch.engine.agent import PREEMPT_FILE
    from hyperbatch.engine.logfile import let_log_fill
    from hyperbatch.engine.ranks import ended_by_sigterm, find_ranks

    let_log_fill()
    ranks = find_ranks()
    assert ranks is not None, "the agent sets RANK and WORLD_SIZE"
    config = Config.from_dict(json.loads(config_path.read_text()))
    said = config_path.parent / f"rank-{ranks.rank}.json"

    def report(words: dict[str, Any]) -> None:
        try:
            said.write_text(json.dumps(words))
        except OSError:  # a full disk: the command reads nothing, and the user at least this
            print(f"{words.get('traceback', '')}hyperbatch: {words['message']}", file=sys.stderr, flush=True)

    parent_file = config_path.parent / PREEMPT_FILE
    if parent_file.exists():
        return 0  # the command is about to end
    from hyperbatch.callbacks import EVENTS_FILE, NO_HOOKS, Forward
    from hyperbatch.engine.ending import words_of
    from hyperbatch.engine.loop import run

    gc.freeze()  # nor does a step wait until somebody has looked through them again
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    events = config_path.parent / EVENTS_FILE
    hooks = Forward(events) if ranks.rank == 0 and events.exists() else NO_HOOKS
    try:
        # Rank 0 leaves a record when it is told to stop; the others may be waiting for it in code no signal reaches.
        with ended_by_sigterm() if ranks.rank == 0 else contextlib.nullcontext():
            run(config, ranks, report=report, parent_file=parent_file, hooks=hooks)
    except BaseException as error:
        words = words_of(error, ranks.rank)
        if not said.exists():  # else the run has told it, before it gave up what it held
            report(words)
        code = 2 if words["kind"] == "InputError" else 1
    else:
        return 0
    # Everything is told. An interpreter that ends in order waits for threads and for the device.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def leave(code: int) -> NoReturn:
    """Ends a process that has torch and has written and closed everything. To take torch's modules and a CUDA context
    apart piece by piece would cost half a second and more, in which a run that makes room is not yet started again."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """A command that is killed cannot end its ranks, and they would go on in a folder that nobody holds any more."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # Linux has it
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
