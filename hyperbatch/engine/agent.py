"""Starts this host's ranks: chooses their default number, and runs them under torchrun's elastic agent.

This module loads torch only when ranks are started, because a dry run uses the default number, too.
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

AGENT_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)  # that make the agent end the ranks
RANK_BYTES = 128 << 20  # the least memory that a process with torch needs for itself
PREEMPT_FILE = "preempt"  # next to the argument; it tells the ranks that the command was preempted


def default_nproc(device: str) -> int:
    """Returns one process per GPU. On a CPU there are two, so that a small run takes the code path of a large one."""
    gpus = 0 if device == "cpu" else count_gpus()
    return gpus or min(2, usable_cores())


def check_nproc(nproc: int) -> None:
    """Raises InputError if this host's memory cannot hold `nproc` processes."""
    needed, there = nproc * RANK_BYTES, host_memory_bytes()
    if needed > there:
        raise InputError(
            f"--nproc {nproc}: they need at least {needed >> 30:,} GiB of memory, and this host has "
            f"{there >> 30:,}; start fewer, at most one per GPU or core"
        )


def count_gpus() -> int:
    """Returns the number of GPUs that a process started here would see."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip() not in ("", "-1")])
    return _gpus_of_host()


@cache
def _gpus_of_host() -> int:
    """Cached, because the driver answers slowly."""
    if shutil.which("nvidia-smi") is None:
        return 0
    listed = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=30, check=False).stdout
    return sum(line.startswith("GPU ") for line in listed.splitlines())


def cpu_has_bf16() -> bool:
    """Whether the CPU has instructions for bf16. With them bf16 is faster than fp32, without them many times slower."""
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

    hint: returns advice for the user; it is called when the ranks have failed. preempt_signals: these signals do not
    end the ranks. They are passed on to the ranks through PREEMPT_FILE, and the ranks end by themselves.
    """
    check_nproc(nproc)
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from hyperbatch.engine.stores import LOOPBACK, ONE_HOST

    # The agent's own log would repeat over many lines the error that is raised below in one line.
    for name in ("torch.distributed.elastic", *logging.root.manager.loggerDict):  # some loggers set their own level
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
        logs_specs=DefaultLogsSpecs(log_dir=str(argument.parent / "logs")),  # otherwise a folder would remain in /tmp
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
    """A context in which each of these signals writes its name to the file `asked`."""
    own = signals if threading.current_thread() is threading.main_thread() else ()
    names = {number: asked.with_name(f"{asked.name}.{number.name}") for number in own}
    for number, path in names.items():
        path.write_text(number.name)  # written now, because the disk may be full later

    def handle(number: int, _: object) -> None:
        if not asked.exists():
            name = signal.Signals(number).name
            os.replace(names[signal.Signals(number)], asked)  # atomic, so that no rank reads an incomplete name
            with contextlib.suppress(OSError):  # stderr may be a log on a full disk
                os.write(sys.stderr.fileno(), f"hyperbatch: {name}: the run will end after a checkpoint\n".encode())

    before = {number: signal.signal(number, handle) for number in own}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _explain(error: ChildFailedError, scratch: Path, hint: Callable[[], str]) -> InputError | RunFailed:
    """Returns the first failure among the ranks as a one-line error. Ranks write the words that describe their failure
    to rank-N.json."""
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
    """Returns the words that a rank has written; {} if it was killed while it wrote them."""
    try:
        return json.loads(path.read_text())
    except ValueError:
        return {}
