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
    """Runs a rank and returns its exit code: 0 if the run ended, with or without reaching its target, or was preempted,
    because the parent reads the record. The reason of a failure is written to a file next to the config."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # otherwise Ctrl-C during imports would print a traceback
    end_with_parent()
    quiet_torch()
    gc.disable()  # importing torch creates 200,000 permanent objects; collections during the import would take 0.2 s
    from hyperbatch.config import Config
    from hyperbatch.engine.agent import PREEMPT_FILE
    from hyperbatch.engine.logfile import let_log_fill
    from hyperbatch.engine.ranks import ended_by_sigterm, find_ranks

    let_log_fill()
    ranks = find_ranks()
    assert ranks is not None, "the agent sets RANK and WORLD_SIZE"
    if not config_path.exists():
        return 1  # the command was interrupted while it started this rank, and has removed its files
    config = Config.from_dict(json.loads(config_path.read_text()))
    said = config_path.parent / f"rank-{ranks.rank}.json"

    def report(words: dict[str, Any]) -> None:
        try:
            said.write_text(json.dumps(words))
        except OSError:  # on a full disk the command cannot read the reason, so this rank prints it
            print(f"{words.get('traceback', '')}hyperbatch: {words['message']}", file=sys.stderr, flush=True)

    parent_file = config_path.parent / PREEMPT_FILE
    if parent_file.exists():
        return 0  # the command is about to end
    from hyperbatch.callbacks import EVENTS_FILE, NO_HOOKS, Forward
    from hyperbatch.engine.ending import words_of
    from hyperbatch.engine.loop import run

    gc.freeze()  # later collections, which would delay a step, ignore these objects
    gc.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    events = config_path.parent / EVENTS_FILE
    hooks = Forward(events) if ranks.rank == 0 and events.exists() else NO_HOOKS
    try:
        # Rank 0 writes a record on SIGTERM. The others may be waiting for it in code that no signal interrupts.
        with ended_by_sigterm() if ranks.rank == 0 else contextlib.nullcontext():
            run(config, ranks, report=report, parent_file=parent_file, hooks=hooks)
    except BaseException as error:
        words = words_of(error, ranks.rank)
        if not said.exists():  # otherwise the run has already reported the failure, before it released its resources
            report(words)
        code = 2 if words["kind"] == "InputError" else 1
    else:
        return 0
    # Everything has been reported. A regular exit of the interpreter would wait for threads and for the device.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def quiet_torch() -> None:
    """Must be called before torch is imported. When a rank is gone, torch would print a stack trace of C++ for every
    request to the store that fails, on every rank: 75 kB each before the reason, which is one line."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def leave(code: int) -> NoReturn:
    """Ends a process that has loaded torch and has written and closed everything. A regular exit, which destroys
    torch's modules and the CUDA context one by one, takes half a second or more, and delays the restart of a preempted
    run."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def end_with_parent() -> None:
    """Makes the kernel end this rank when its parent ends. A command that is killed cannot end its ranks, and they
    would go on in a folder that is no longer locked."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)  # exists on Linux only
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


if __name__ == "__main__":
    leave(main(Path(sys.argv[1])))
