"""Signs of life outside the process group."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import run_ranks

from hyperbatch.comm import Heartbeat
from hyperbatch.comm.heartbeat import Words, _name_of


def beat(rank: int, path: str, end: str) -> tuple[list[Words], float]:
    """What this rank was told, and after how long."""
    store = dist.FileStore(path, 3)
    told: list[Words] = []
    start = time.monotonic()
    heart = Heartbeat(store, rank, 3, timeout_s=1.0, interval_s=0.1, on_lost=told.append)
    with heart:
        time.sleep(1.5)  # all is well for longer than the timeout
        assert told == []
        if rank == 1 and end == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and end == "done":
            return told, 0.0
        limit = time.monotonic() + (15 if end == "killed" else 2)
        while not told and time.monotonic() < limit:
            time.sleep(0.05)
    return told, time.monotonic() - start


@pytest.mark.parametrize("end", ["killed", "done"])
def test_a_lost_rank_is_known_to_all_and_one_that_left_is_not_missed(end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(3, beat, f"{folder}/beats", end, may_die=[1])
    for told, seconds in (results[0], results[2]):
        if end == "killed":
            assert len(told) == 1
            assert told[0]["message"].startswith("rank 1 has not responded")
            assert (told[0]["rank"], told[0]["host"]) == (1, socket.gethostname())
            assert seconds < 12, "1.5 s of life, 1 s of silence, and room for a busy machine"
        else:
            assert told == []


SCRIPT = """
import time, torch.distributed as dist
from hyperbatch.comm.heartbeat import Heartbeat
store = dist.TCPStore("127.0.0.1", {port}, is_master=False)
Heartbeat(store, 0, 2, timeout_s=0.5).start()
time.sleep(60)
"""


def test_by_default_the_process_ends_with_one_line() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    words = [sys.executable, "-c", SCRIPT.format(port=store.port)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith("hyperbatch: rank 1 has not responded")


def end_without_a_word(heart: Heartbeat) -> None:
    """As if its process had been killed."""
    heart._stop.set()
    for thread in heart._threads:
        thread.join()


def test_only_a_rank_that_stopped_without_a_word_is_silent() -> None:
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    told: list[Words] = []
    hearts = [Heartbeat(master.clone(), rank, 4, interval_s=0.3, on_lost=told.append) for rank in range(4)]
    for heart in hearts[:3]:
        heart.start()
    assert hearts[0].silent() == [], "rank 3 has not started yet"
    hearts[3].start()
    assert hearts[0].silent() == []
    end_without_a_word(hearts[1])
    hearts[2].stop()
    assert hearts[0].silent() == hearts[3].silent() == [1]
    hearts[0].stop()
    hearts[3].stop()
    assert told == []


def test_who_knows_the_reason_already_does_not_wait_for_beats() -> None:
    """At this interval it would wait for an hour."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=20))
    told: list[Words] = []
    hearts = [Heartbeat(master.clone(), rank, 2, interval_s=1200.0, on_lost=told.append).start() for rank in range(2)]
    assert hearts[1].fail({"message": "no memory"})
    assert hearts[0].silent() == [1]
    assert hearts[0].heard() == {"message": "no memory"}
    for heart in hearts:
        heart.stop()


def test_nobody_is_silent_when_the_store_has_gone() -> None:
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, timeout=timedelta(seconds=5))
    end_without_a_word(Heartbeat(store, 1, 2).start())
    with Heartbeat(store, 0, 2, interval_s=0.3) as heart:
        assert heart.silent() == [1]
        server.kill()
        server.wait()
        assert heart.silent() == []
    server.stdout.close()


def test_a_store_that_never_answers_is_given_up() -> None:
    """Its process is stopped: the connection stays, and requests to it do not return. The rank that keeps it is named,
    and its process goes."""
    server = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False, timeout=timedelta(seconds=5))
    told: list[Words] = []
    lost = threading.Event()
    heart = Heartbeat(
        store, 1, 2, timeout_s=1.0, interval_s=0.1, keeper=0, on_lost=lambda words: (told.append(words), lost.set())
    )
    store.set("hyperbatch-heartbeat/process-0", json.dumps([_name_of(server.pid), "a host"]))
    with heart:
        while not heart._keeper_process.name:
            time.sleep(0.05)
        server.send_signal(signal.SIGSTOP)
        assert lost.wait(30)
        assert server.wait(30) == -signal.SIGKILL
        assert heart.heard() == told[0]
        assert heart.places() == []
        assert heart.silent() == []
    (words,) = told
    assert words["message"].startswith("rank 0, which hosts the store, has not responded for 1.")
    assert (words["rank"], words["host"]) == (0, "a host")
    server.stdout.close()


SERVER = """
import time, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(60)
"""


def test_of_many_ranks_only_the_first_to_ask_read_all_heartbeats() -> None:
    store = dist.HashStore()
    hearts = [Heartbeat(store, rank, 12, timeout_s=1.0, interval_s=0.05) for rank in range(12)]
    for heart in hearts:
        heart._store.set(heart._key(heart._rank), "0")  # no rank sends another
    found = [heart.silent() for heart in hearts]
    assert found[0] == list(range(1, 12))
    assert [bool(each) for each in found] == [True] * 8 + [False] * 4
