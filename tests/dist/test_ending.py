"""Runs of several ranks that fail end, and say why, although graphs hold the process group and the device is stuck.

Graphs need a GPU: here they are played. As with NCCL, the process group waits in its destructor until the last of them
has gone; and a rank that waits inside a graph is in code that no signal interrupts.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from datetime import timedelta
from pathlib import Path
from typing import ClassVar

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from test_step_runner import Played
from toy import config

from hyperbatch.data.source import DataError
from hyperbatch.engine import ending, loop, worker
from hyperbatch.engine.culprit import Exit, first_cause
from hyperbatch.engine.ending import Ending
from hyperbatch.engine.ranks import Ranks, ended_by_sigterm
from hyperbatch.engine.runner import StepRunner
from hyperbatch.errors import RunFailed
from hyperbatch.record import RunRecord


class Graph:
    """Holds the process group from its capture until it is reset, or nobody refers to it any more."""

    alive: ClassVar[weakref.WeakSet[Graph]] = weakref.WeakSet()

    def __init__(self, run, before):
        self.run, self.before = run, before
        Graph.alive.add(self)

    def replay(self):
        self.before()
        self.run()


class Holding(Played):
    """What a run is captured with. `events`: what a replay does, by its number."""

    def __init__(self, events=None, *, stuck_on_close=False):
        super().__init__()
        self.events, self.stuck_on_close = events or {}, stuck_on_close

    def capture(self, run):
        def before():
            self.replayed += 1
            self.events.get(self.replayed, lambda: None)()

        return Graph(run, before).replay

    def close(self):
        if self.stuck_on_close:
            stuck()
        Graph.alive.clear()


def stuck():
    """Waits for ever in C, as a thread that waits for a device does."""
    lock = ctypes.CDLL(None).pthread_mutex_lock
    mutex = ctypes.create_string_buffer(64)
    lock(mutex)
    lock(mutex)


def raises(error):
    raise error


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def leave_the_harness():
    dist.barrier()  # a rank that goes early would break the others' start
    dist.destroy_process_group()


def start(rank, folder, port, backend, *, launched_by_us=True, **values):
    """One rank of two, which opens its own process group. What it reports lies in rank-N.json and errN."""
    leave_the_harness()
    destroy = dist.destroy_process_group

    def destroy_when_graphs_are_gone():
        while len(Graph.alive):
            time.sleep(0.01)
        destroy()

    dist.destroy_process_group = destroy_when_graphs_are_gone
    ending.PATIENCE_S = 3.0
    loop.StepRunner = functools.partial(StepRunner, backend=backend, warm=True)
    sys.stderr = open(folder / f"err{rank}", "w")  # noqa: SIM115
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, local_size=2, launcher="test", master_port=port)
    said = folder / f"rank-{rank}.json"
    report = (lambda words: said.write_text(json.dumps(words))) if launched_by_us else None
    with ended_by_sigterm():
        return loop.run(config(out=str(folder / "run"), **{"timeout_s": 20.0, **values}), ranks, report=report)


def message(folder, rank):
    return json.loads((folder / f"rank-{rank}.json").read_text())["message"]


def diverges(rank, folder, port):
    try:
        start(rank, folder, port, Holding(), optimizer="sgd", lr=1e30, warmup_epochs=0.0)
    except RunFailed as error:
        return str(error), dist.is_initialized(), {thread.name for thread in threading.enumerate()}


def test_a_loss_that_is_not_finite_ends_a_captured_run(tmp_path):
    """Every rank finds it at the same step. A rank that is slow may be ended by what the other has said before it."""
    results = run_ranks(2, diverges, tmp_path, free_port(), may_die=[0, 1], timeout_s=40)
    assert any(results)
    for text, initialized, threads in filter(None, results):
        assert text.startswith("the loss became")
        assert not initialized
        assert "hyperbatch-signals" not in threads
    assert all("the loss became" in message(tmp_path, rank) for rank in (0, 1))
    assert "the loss became" in RunRecord.load(tmp_path / "run").error


BAD = "11 unreadable training samples"
FAILURES = {
    "bad data": (DataError(BAD), BAD),
    "out of memory": (torch.OutOfMemoryError("no room"), "rank 1: OutOfMemoryError: no room"),
    "Ctrl-C": (KeyboardInterrupt(), "rank 1 was interrupted"),
}


def one_fails(rank, folder, port, case, launched_by_us):
    event = (lambda: raises(FAILURES[case][0])) if rank == 1 else stuck
    try:
        start(rank, folder, port, Holding({3: event}), launched_by_us=launched_by_us)
    except BaseException as error:
        return repr(error)


@pytest.mark.parametrize("launched_by_us", [True, False])
@pytest.mark.parametrize("case", FAILURES)
def test_ranks_that_wait_inside_a_graph_end_with_the_one_that_failed(tmp_path, case, launched_by_us):
    error, text = FAILURES[case]
    waiting, failed = run_ranks(
        2, one_fails, tmp_path, free_port(), case, launched_by_us, may_die=[0], timeout_s=40
    )  # far below the timeout of silence
    assert waiting is None, "nothing else ends a thread that waits for the device"
    assert failed == repr(error)
    named = text if text.startswith("rank 1") else f"rank 1: {text}"
    assert RunRecord.load(tmp_path / "run").error == named
    if launched_by_us:
        assert [message(tmp_path, rank) for rank in (0, 1)] == [named, text]
        said = {rank: json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in (0, 1)}
        exits = {rank: Exit(pid=1, code=1) for rank in (0, 1)}
        assert first_cause(exits, said)["message"] == text, "the culprit's words are the first"
        assert said[0]["heard"]
    else:
        assert [(tmp_path / f"err{rank}").read_text() for rank in (0, 1)] == [f"hyperbatch: {named}\n"] * 2


def cannot_let_go(rank, folder, port, launched_by_us):
    backend = Holding({3: lambda: raises(DataError(BAD))}, stuck_on_close=True)
    start(rank, folder, port, backend, launched_by_us=launched_by_us)


@pytest.mark.parametrize("launched_by_us", [True, False])
def test_a_device_that_is_stuck_does_not_hold_up_the_end(tmp_path, launched_by_us):
    """The error does not reach the caller then, and its words are printed for it."""
    run_ranks(2, cannot_let_go, tmp_path, free_port(), launched_by_us, may_die=[0, 1], timeout_s=40)
    for rank in (0, 1):
        assert BAD in (message(tmp_path, rank) if launched_by_us else (tmp_path / f"err{rank}").read_text())
    assert BAD in RunRecord.load(tmp_path / "run").error


def is_stopped(rank, folder, port, number):
    """Both wait inside a graph; rank 0 is told to stop and cannot hear it. It has the store; rank 1 still hears."""
    timer = threading.Timer(0.5, os.kill, (os.getpid(), number))
    start(rank, folder, port, Holding({3: lambda: (rank == 0 and timer.start(), stuck())}))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_a_rank_that_waits_for_the_device(tmp_path, number):
    run_ranks(2, is_stopped, tmp_path, free_port(), number, may_die=[0, 1], timeout_s=40)
    assert [message(tmp_path, rank) for rank in (0, 1)] == ["rank 0 was interrupted"] * 2
    assert RunRecord.load(tmp_path / "run").error == "rank 0 was interrupted"


def is_silent(rank, folder, port):
    """Rank 1 stops without a word, its thread of signs of life, too, until rank 0 has said so."""
    event = (lambda: os.kill(os.getpid(), signal.SIGSTOP)) if rank == 1 else stuck
    if rank == 1:
        ender = f"while [ ! -s {folder}/rank-0.json ]; do sleep 0.1; done; kill -9 {os.getpid()}"
        subprocess.Popen(["sh", "-c", ender])
    start(rank, folder, port, Holding({3: event}), timeout_s=3.0)


def test_a_rank_that_is_silent_is_named(tmp_path):
    run_ranks(2, is_silent, tmp_path, free_port(), may_die=[0, 1])
    assert message(tmp_path, 0).startswith("rank 1 has not responded for")
    check_culprit(tmp_path / "run", message(tmp_path, 0))


def check_culprit(run, message):
    """Rank 1 was in its third step."""
    record = RunRecord.load(run)
    assert record.error == record.failure["message"] == message
    assert [record.failure[name] for name in ("rank", "host", "step")] == [1, socket.gethostname(), 3]


NCCL = "NCCL error in: NCCLUtils.cpp:94, remote process exited or there was a network error\nncclRemoteError: Last"


def exchange_fails(rank, folder, port, killed):
    """NCCL's error, played: what it says when the other rank has been killed, or only the connection has broken."""

    def fails():
        with contextlib.suppress(RuntimeError):  # gloo's, when rank 1 has ended
            dist.barrier()
        raise dist.DistBackendError(NCCL)

    def ends():
        if killed:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        stuck()

    try:
        start(rank, folder, port, Holding({3: fails if rank == 0 else ends}), timeout_s=5.0)
    except BaseException as error:
        return type(error).__name__, str(error)


def test_an_exchange_that_fails_names_the_rank_that_was_killed(tmp_path):
    """It ends at once: NCCL would keep it for minutes, and there is nothing left that it could do."""
    ended, killed = run_ranks(2, exchange_fails, tmp_path, free_port(), True, may_die=[0, 1], timeout_s=40)
    line = f"rank 1 has ended or cannot be reached: communication with it failed on rank 0: {NCCL.splitlines()[0]}"
    assert ended is None
    assert killed is None
    words = json.loads((tmp_path / "rank-0.json").read_text())
    assert words["message"] == line
    assert "traceback" not in words
    check_culprit(tmp_path / "run", line)


def test_an_exchange_that_fails_among_living_ranks_keeps_its_error(tmp_path):
    failed, waiting = run_ranks(2, exchange_fails, tmp_path, free_port(), False, may_die=[1], timeout_s=40)
    assert waiting is None, "ended by what rank 0 had said"
    assert failed == ("DistBackendError", NCCL)
    assert [message(tmp_path, rank) for rank in (0, 1)] == [f"rank 0: DistBackendError: {NCCL}"] * 2


def trains_again(rank, folder, port):
    """In a process group of the caller's, a run after one that failed."""
    ranks = Ranks(rank=rank, world_size=2, local_rank=rank, local_size=2, launcher="test")
    loop.StepRunner = functools.partial(StepRunner, backend=Holding(), warm=True)
    with contextlib.suppress(RunFailed):
        loop.run(config(out=str(folder / "lost"), optimizer="sgd", lr=1e30, warmup_epochs=0.0), ranks)
    assert not Graph.alive
    record = loop.run(config(out=str(folder / "good"), timeout_s=5.0), ranks)
    return record.result.steps


def test_the_words_of_a_failed_run_do_not_end_the_next(tmp_path):
    assert run_ranks(2, trains_again, tmp_path, 0) == [30, 30]


def test_one_process_raises_and_goes_on(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, backend=Holding(), warm=True))
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), threading.active_count()
    with pytest.raises(RunFailed, match="the loss became"):
        loop.run(config(out=str(tmp_path), optimizer="sgd", lr=1e30, warmup_epochs=0.0), Ranks())
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT), threading.active_count()) == before


def restarted(rank):
    """The agent of rank 1's host has restarted its ranks more often than that of rank 0's."""
    os.environ["TORCHELASTIC_RESTART_COUNT"] = str(3 * rank)
    with Ending(Ranks(rank=rank, world_size=2, launcher="test")) as ending, ending.told():
        assert ending.store is not None
        ending.store.set(f"here-{rank}", "")
        ending.store.wait([f"here-{1 - rank}"], timedelta(seconds=5))
    return True


def test_ranks_of_hosts_that_were_restarted_more_or_less_often_meet():
    """Otherwise a healthy run would end after --timeout-s, as none would see a heartbeat of the other."""
    assert run_ranks(2, restarted) == [True, True]


def works(rank, folder, port):
    """As the agent starts it. What is wrong before the run is told, too."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    leave_the_harness()
    worker.main(folder / "config.json")


def test_a_worker_ends_with_its_exit_code_and_leaves_its_words(tmp_path):
    values = config(device="cuda", out=str(tmp_path / "run")).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(AssertionError, match="died with exit code 2"):
        run_ranks(2, works, Path(tmp_path), free_port())
    assert "--device cuda: torch sees no GPU here" in message(tmp_path, 0)
