"""Where collectives run: one thread with a FIFO for CPU tensors, one side stream for CUDA tensors.

    main thread     backward ....... hook: submit(g0) ...... hook: submit(g1) ...... finish: wait, wait
    comm thread                      [---- g0 ----]          [---- g1 ----]

A process group matches collectives by the order in which they are issued. One FIFO makes that order the order of
`submit`, which is the same on every rank; callbacks of futures, or several threads, would not.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from hyperbatch.stopwatch import Mark, mark

Job = Callable[[], None]
Then = Callable[[BaseException | None], None]  # called after a job, where it ran, with what it raised


class Handle(ABC):
    """A collective in flight. `wait()` makes its result visible to the caller; `done()` asks without blocking."""

    start: Mark
    end: Mark

    @abstractmethod
    def wait(self) -> None:
        """Raises what the collective raised."""

    @abstractmethod
    def done(self) -> bool: ...


class DoneHandle(Handle):
    """Of a job that ran at once: there is nobody to talk to."""

    def __init__(self) -> None:
        self.start = self.end = time.perf_counter()

    def wait(self) -> None:
        pass

    def done(self) -> bool:
        return True


class ThreadHandle(Handle):
    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()


class StreamHandle(Handle):
    def __init__(self, start: Mark, end: Mark, device: torch.device, job: Job) -> None:
        assert isinstance(end, torch.cuda.Event)
        self.start, self.end, self._reached = start, end, end
        self._device = device
        self._job: Job | None = job  # keeps its tensors alive until the waiting stream is behind them

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._reached)
        self._job = None

    def done(self) -> bool:
        return self._reached.query()


class ThreadRunner:
    """Runs jobs one after another. After a failure every later job fails with the same error, at once."""

    def __init__(self, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Then | None, ThreadHandle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self._thread.start()
        # The thread holds the queue only, so an abandoned runner ends it too.
        self._end = weakref.finalize(self, self._jobs.put, None)

    def submit(self, job: Job, then: Then | None = None) -> ThreadHandle:
        handle = ThreadHandle()
        self._jobs.put((job, then, handle))
        return handle

    def close(self) -> None:
        """Ends the thread after the jobs submitted so far."""
        self._end()
        self._thread.join()


def _serve(jobs: queue.SimpleQueue[tuple[Job, Then | None, ThreadHandle] | None]) -> None:
    broken: BaseException | None = None
    with torch.no_grad():  # grad mode belongs to a thread
        while (item := jobs.get()) is not None:
            job, then, handle = item
            handle.start = time.perf_counter()
            if broken is None:
                try:
                    job()
                except BaseException as error:
                    broken = error
            handle._error = broken
            handle.end = time.perf_counter()
            handle._finished.set()
            if then is not None:
                then(broken)
            del item, job, then, handle  # the tensors of a job must not live until the next one comes


class StreamRunner:
    """Runs jobs on a stream of its own, behind what the submitting stream has been given so far."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def submit(self, job: Job, then: Then | None = None) -> StreamHandle:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            start = mark(self.device)
            job()
            end = mark(self.device)
            if then is not None:
                then(None)
        return StreamHandle(start, end, self.device, job)
