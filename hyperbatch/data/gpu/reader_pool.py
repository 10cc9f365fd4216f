"""The parent's side of `reader_process.py`: the processes, and the shared, pinned memory that they fill.

    slab   [ worker 0: slot 0 | slot 1 | ... ][ worker 1: slot 0 | ... ]      batch b uses slot b % slots of each worker

Threads that read thousands of files per second would compete with the step for Python's lock; processes do not.
"""

from __future__ import annotations

import atexit
import contextlib
import mmap
import os
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hyperbatch.data.source import DataError, EncodedSource, Location, Source

_WORTH_PROCESSES = 2048  # samples; threads read a smaller set before processes have started
_PACKAGE_ROOT = str(Path(__file__).parents[3])
# -c and not -m, because with -m the child's classes would belong to __main__.
_CHILD = "from hyperbatch.data.gpu.reader_process import main; main()"


def can_serve(source: Source) -> bool:
    """Whether processes can read the set, because its samples are in files of this machine."""
    return isinstance(source, EncodedSource) and source.locations([0]) is not None


def worth_processes(source: Source) -> bool:
    can_use = hasattr(os, "memfd_create") and hasattr(os, "preadv")
    return can_use and len(source) >= _WORTH_PROCESSES and can_serve(source)


_idle: list[ReaderPool] = []  # kept for the next evaluation, because starting processes takes half a second


def take_pool(workers: int, slots: int, slot_bytes: int, *, pin: bool) -> ReaderPool:
    """Returns an idle pool that fits, or a new one."""
    for pool in _idle:
        if (pool.workers, pool.slots, pool.pin) == (workers, slots, pin) and slot_bytes <= pool.slot_bytes:
            _idle.remove(pool)
            return pool
    return ReaderPool(workers, slots, slot_bytes, pin=pin)


def return_pool(pool: ReaderPool) -> None:
    """Keeps the pool for later use, or closes it if replies are still outstanding."""
    if pool.unanswered:
        pool.close()
    else:
        _idle.append(pool)


@atexit.register
def close_idle() -> None:
    while _idle:
        _idle.pop().close()


class ReaderPool:
    """`workers` processes, each with `slots` pieces of the slab. Requests to a worker are answered in order."""

    def __init__(self, workers: int, slots: int, slot_bytes: int, *, pin: bool) -> None:
        self.workers, self.slots, self.slot_bytes, self.pin = workers, slots, slot_bytes, pin
        self._asked = self._answered = 0  # each counted by one thread
        size = workers * slots * slot_bytes
        # Anonymous memory, because /dev/shm is tiny in many containers.
        self._descriptor = os.memfd_create("hyperbatch-data")
        os.ftruncate(self._descriptor, size)
        self._map = mmap.mmap(self._descriptor, size)
        self.slab: Tensor = torch.frombuffer(self._map, dtype=torch.uint8)
        self._pinned = pin
        if pin:
            runtime: Any = torch.cuda.cudart()
            # If the memory cannot be pinned, copies are slower.
            self._pinned = int(runtime.cudaHostRegister(self.slab.data_ptr(), size, 0)) == 0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._requests: list[Connection] = []
        self._replies: list[Connection] = []
        for _ in range(workers):
            self._start()

    def _start(self) -> None:
        child_in, ours_out = os.pipe()
        ours_in, child_out = os.pipe()
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([_PACKAGE_ROOT, os.environ.get("PYTHONPATH", "")])}
        environment["OMP_NUM_THREADS"] = "1"
        self._processes.append(
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(child_in), str(child_out)],
                pass_fds=(child_in, child_out),
                env=environment,
                stdin=subprocess.DEVNULL,
            )
        )
        os.close(child_in)
        os.close(child_out)
        self._requests.append(Connection(ours_out, readable=False))
        self._replies.append(Connection(ours_in, writable=False))
        self._requests[-1].send(f"/proc/{os.getpid()}/fd/{self._descriptor}")

    def request(self, worker: int, slot: int, decoder: str, wanted: list[Location], cpu_pixels: list[int]) -> None:
        """Sends a request to a worker; the arguments are those of `reader_process.fill`."""
        start = (worker * self.slots + slot) * self.slot_bytes
        with self._death_reported(worker):
            self._asked += 1
            self._requests[worker].send((start, start + self.slot_bytes, decoder, wanted, cpu_pixels))

    def reply(self, worker: int) -> np.ndarray:
        """Waits for a worker's next reply, which is the result of `reader_process.fill`."""
        with self._death_reported(worker):
            samples = self._replies[worker].recv()
            self._answered += 1
            return samples

    @contextlib.contextmanager
    def _death_reported(self, worker: int):
        try:
            yield
        except (EOFError, OSError) as error:
            code = self._processes[worker].poll()
            raise DataError(
                f"a worker process of the data loader ended ({code}); is the machine out of memory?"
            ) from error

    @property
    def unanswered(self) -> int:
        return self._asked - self._answered

    def close(self) -> None:
        for connection in (*self._requests, *self._replies):
            connection.close()
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait()
        if self._pinned:
            runtime: Any = torch.cuda.cudart()
            runtime.cudaHostUnregister(self.slab.data_ptr())
        os.close(self._descriptor)
        del self.slab  # the memory map is freed with the last tensor that uses it
