"""Signs of life outside the process group."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from harness import run_ranks

from hyperbatch.comm import Heartbeat


def beat(rank: int, path: str, end: str) -> tuple[list[str], float]:
    """What this rank was told, and after how long."""
    store = dist.FileStore(path, 3)
    told: list[str] = []
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
            assert told[0].startswith("rank 1 has given no sign of life")
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
    assert done.stderr.strip().splitlines()[-1].startswith("hyperbatch: rank 1 has given no sign of life")
