"""How this host's ranks are started: how many there are by default, and torchrun's elastic agent that runs them.

It loads torch only when ranks are started, since a dry run asks for their number, too.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from hyperbatch.errors import InputError, Interrupted, RunFailed

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

AGENT_PATIENCE_S = 20.0  # below the 30 s the elastic agent gives ranks to end


def default_nproc(device: str) -> int:
    """One process per GPU; on a CPU two, so that the path of a large run is the path of a small one."""
    gpus = 0 if device == "cpu" else count_gpus()
    return gpus or min(2, os.cpu_count() or 1)


def count_gpus() -> int:
    """GPUs a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def start_ranks(nproc: int, module: str, argument: Path, *, hint: Callable[[], str] = str) -> None:
    """Runs `python -m module argument` as ranks 0 to nproc - 1 of this host, under torchrun's elastic agent.

    hint: what to tell the user to do, asked for when the ranks have failed.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # The agent's own log repeats, over many lines, what is said below in one.
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):  # some have levels of their own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        monitor_interval=0.1,
    )
    try:
        elastic_launch(agent, sys.executable)("-m", module, str(argument))
    except ChildFailedError as error:
        raise _explain(error, argument.parent, hint) from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise Interrupted("; ".join(part for part in (f"interrupted by {name}", hint()) if part)) from None


def _explain(error: ChildFailedError, scratch: Path, hint: Callable[[], str]) -> InputError | RunFailed:
    """The first failure among the ranks, in one line. Ranks leave their own words in rank-N.json."""
    said = {
        rank: json.loads(path.read_text())
        for rank in error.failures
        if (path := scratch / f"rank-{rank}.json").exists()
    }
    # SIGTERM is how the agent ends the survivors; after half a minute it uses SIGKILL on those that do not listen.
    killed = [rank for rank, f in error.failures.items() if f.exitcode < 0 and f.exitcode != -signal.SIGTERM]
    first_words = min(said, key=lambda rank: said[rank]["time"], default=None)
    if first_words is not None and (not killed or time.time() - said[first_words]["time"] > AGENT_PATIENCE_S):
        words = said[first_words]
        print(words.get("traceback", ""), file=sys.stderr, end="")
        silent = f"; rank {killed[0]} did not answer and was ended" if killed else ""
        kind = InputError if words["kind"] == "InputError" else RunFailed
        return kind(words["message"] + silent)
    # A rank that was killed says nothing, and the others fail within the same moment because of it: it is named.
    rank = killed[0] if killed else error.get_first_failure()[0]
    failure = error.failures[rank]
    what = f"exited with {failure.exitcode}"
    if failure.exitcode < 0:
        name = signal.Signals(-failure.exitcode).name
        what = f"was killed by {name}" + ("; out of memory?" if name == "SIGKILL" else "")
    return RunFailed("; ".join(part for part in (f"rank {rank} (pid {failure.pid}) {what}", hint()) if part))
