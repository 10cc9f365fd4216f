"""How this host's ranks are started: how many there are by default, and torchrun's elastic agent that runs them.

It loads torch only when ranks are started, since a dry run asks for their number, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperbatch.cores import usable_cores
from hyperbatch.engine.culprit import Exit, first_cause
from hyperbatch.errors import InputError, Interrupted, Preempted, RunFailed
from hyperbatch.memory import host_memory_bytes

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # what it ends the ranks for
RANK_BYTES = 128 << 20  # of memory that a process with torch has for itself, at the very least
PREEMPT_FILE = "preempt"  # beside the argument: ranks see there that the command was asked to make room


def default_nproc(device: str) -> int:
    """One process per GPU; on a CPU two, so that the path of a large run is the path of a small one."""
    gpus = 0 if device == "cpu" else count_gpus()
    return gpus or min(2, usable_cores())


def check_nproc(nproc: int) -> None:
    """InputError for more processes than this host's memory can hold."""
    needed, there = nproc * RANK_BYTES, host_memory_bytes()
    if needed > there:
        raise InputError(
            f"--nproc {nproc}: they need at least {needed >> 30:,} GiB of memory, and this host has "
            f"{there >> 30:,}; start fewer, at most one per GPU or core"
        )


def count_gpus() -> int:
    """GPUs a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return _gpus_of_host()


@cache
def _gpus_of_host() -> int:
    """Asked once: the driver takes its time."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions for bf16: then it is faster than fp32, and otherwise many times slower."""
    try:
        told = set(Path("/proc/cpuinfo").read_text().split())
    except OSError:  # not Linux
        return False
    return not told.isdisjoint({"avx512_bf16", "amx_bf16"})


def start_ranks(
    nproc: int,
    module: str,
    argument: Path,
    *,
    hint: Callable[[], str] = str,
    preempt_signals: Sequence[signal.Signals] = (),
) -> None:
    """Runs `python -m module argument` as ranks 0 to nproc - 1 of this host, under torchrun's elastic agent.

    hint: what to tell the user to do, asked for when the ranks have failed. preempt_signals: are passed on to the ranks
    as PREEMPT_FILE, and the ranks end by themselves.
    """
    check_nproc(nproc)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from hyperbatch.engine.stores import LOOPBACK, ONE_HOST

    # The agent's own log repeats, over many lines, what is said below in one.
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):  # some have levels of their own
        if name.startswith("torch.distributed.elastic"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    agent = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        run_id=uuid.uuid4().hex,
        rdzv_backend=ONE_HOST,
        local_addr=LOOPBACK,
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=str(argument.parent / "logs")),  # else a folder stays in /tmp
        signals_to_handle=",".join(number.name for number in AGENT_SIGNALS if number not in preempt_signals),
    )
    asked = argument.parent / PREEMPT_FILE
    try:
        with _passed_on(preempt_signals, asked):
            elastic_launch(agent, sys.executable)("-m", module, str(argument))
    except ChildFailedError as error:
        reason = _explain(error, argument.parent, hint)
        if asked.exists() and isinstance(reason, RunFailed) and not isinstance(reason, Preempted):
            preempted = Preempted(f"{asked.read_text()}: {reason}")
            preempted.words = reason.words
            raise preempted from None
        raise reason from None
    except SignalException as error:
        name = signal.Signals(error.sigval).name
        raise Interrupted("; ".join(part for part in (f"interrupted by {name}", hint()) if part)) from None


@contextlib.contextmanager
def _passed_on(signals: Sequence[signal.Signals], asked: Path) -> Iterator[None]:
    """Each of the signals leaves its name in the file `asked`."""
    own = signals if threading.current_thread() is threading.main_thread() else ()
    names = {number: asked.with_name(f"{asked.name}.{number.name}") for number in own}
    for number, path in names.items():
        path.write_text(number.name)  # now, while there is room on the disk

    def handle(number: int, _: object) -> None:
        if not asked.exists():
            name = signal.Signals(number).name
            os.replace(names[signal.Signals(number)], asked)  # nobody reads half a name
            with contextlib.suppress(OSError):  # a log on a full disk
                os.write(sys.stderr.fileno(), f"hyperbatch: {name}: the run will end after a checkpoint\n".encode())

    before = {number: signal.signal(number, handle) for number in own}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(error: ChildFailedError, scratch: Path, hint: Callable[[], str]) -> InputError | RunFailed:
    """The first failure among the ranks, in one line. Ranks leave their own words in rank-N.json."""
    said = {int(path.stem.removeprefix("rank-")): _read(path) for path in scratch.glob("rank-*.json")}
    exits = {rank: Exit(failure.pid, failure.exitcode) for rank, failure in error.failures.items()}
    words = first_cause(exits, {rank: words for rank, words in said.items() if words})
    print(
        words.get("traceback", ""),
        *(f"{place}\n" for place in words.get("places", ())),
        file=sys.stderr,
        sep="",
        end="",
    )
    if words["kind"] == "InputError":
        return InputError(words["message"])
    kind = Preempted if words["kind"] == "Preempted" else RunFailed
    failed = kind("; ".join(part for part in (words["message"], hint()) if part))
    failed.words = words
    return failed


def _read(path: Path) -> dict[str, Any]:
    """What a rank has said; nothing where it was killed while it wrote."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return {}
