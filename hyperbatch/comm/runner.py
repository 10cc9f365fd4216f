"""Runs collectives: in one thread with a FIFO for CPU tensors, and on one side stream for CUDA tensors.

    main thread     backward ....... hook: submit(g0) ...... hook: submit(g1) ...... finish: wait, wait
    comm thread                      [---- g0 ----]          [---- g1 ----]

A process group matches collectives by the order in which they are issued. With one FIFO this is the order of `submit`,
which is the same on every rank. Callbacks of futures, or several threads, would not guarantee that.
"""

from __future__ import annotations

import queue
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from hyperbatch.stopwatch import Mark, mark

_CPU = torch.device("cpu")
Exchange = Callable[[], None]  # issues the collectives of one message, e.g. of a gradient group
Then = Callable[[BaseException | None], None]  # called after an exchange in the same thread, with its error or None


class ExchangeHandle(ABC):
    """An exchange in flight. `wait()` makes its result visible to the caller; `done()` returns without blocking."""

    start: Mark
    end: Mark

    @abstractmethod
    def wait(self) -> None:
        """Waits for the exchange, and raises its error if it failed."""

    @abstractmethod
    def done(self) -> bool: ...


class DoneHandle(ExchangeHandle):
    """The handle of an exchange that already ran on the caller's thread."""

    def __init__(self, start: Mark, error: BaseException | None) -> None:
        self.start, self.end, self._error = start, mark(_CPU), error

    def wait(self) -> None:
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return True


class ThreadHandle(ExchangeHandle):
    def __init__(self) -> None:
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def done(self) -> bool:
        return self._finished.is_set()


class StreamHandle(ExchangeHandle):
    def __init__(
        self, start: Mark, end: Mark, device: torch.device, exchange: Exchange, error: BaseException | None
    ) -> None:
        assert isinstance(end, torch.cuda.Event)
        self.start, self.end, self._reached = start, end, end
        self._device, self._error = device, error
        self._exchange: Exchange | None = exchange  # keeps its tensors alive until a stream is ordered after it

    def wait(self) -> None:
        if self._error is not None:
            raise self._error
        torch.cuda.current_stream(self._device).wait_event(self._reached)
        self._exchange = None

    def done(self) -> bool:
        return self._reached.query()


# Every runner runs its exchanges one after another. After a failure every later exchange fails with the same error:
# this rank has missed a collective that the others may have run, so its next one would be matched with the wrong one.


class ThreadRunner:
    """Runs exchanges on a thread of its own."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[tuple[Exchange, Then | None, ThreadHandle] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_serve, args=(self._queue,), name=name, daemon=True)
        self._thread.start()
        # The thread refers to the queue only, so it also ends when the runner is garbage-collected.
        self._end = weakref.finalize(self, self._queue.put, None)

    def submit(self, exchange: Exchange, then: Then | None = None) -> ThreadHandle:
        handle = ThreadHandle()
        self._queue.put((exchange, then, handle))
        return handle

    def close(self) -> None:
        """Ends the thread after the exchanges submitted so far."""
        self._end()
        self._thread.join()


def _serve(submitted: queue.SimpleQueue[tuple[Exchange, Then | None, ThreadHandle] | None]) -> None:
    broken: BaseException | None = None
    with torch.no_grad():  # the grad mode is set per thread
        while (item := submitted.get()) is not None:
            exchange, then, handle = item
            handle.start = mark(_CPU)
            if broken is None:
                try:
                    exchange()
                except BaseException as error:
                    broken = error
            handle._error = broken
            handle.end = mark(_CPU)
            handle._finished.set()
            if then is not None:
                then(broken)
            del item, exchange, then, handle  # otherwise an exchange's tensors would live until the next exchange


class InlineRunner:
    """Runs exchanges at once, on the thread that submits them."""

    def __init__(self) -> None:
        self._broken: BaseException | None = None

    def submit(self, exchange: Exchange, then: Then | None = None) -> ExchangeHandle:
        start = mark(_CPU)
        with torch.no_grad():
            error = self._run(exchange)
        if then is not None:
            then(error)
        return DoneHandle(start, error)

    def _run(self, exchange: Exchange) -> BaseException | None:
        """Runs the exchange and returns its error or None. If an earlier exchange failed, returns that error instead of
        running this one."""
        if self._broken is None:
            try:
                exchange()
            except BaseException as error:
                self._broken = error
                if not isinstance(error, Exception):  # Ctrl-C
                    raise
        return self._broken


class StreamRunner(InlineRunner):
    """Runs exchanges on its own stream, after the work that is queued on the submitting stream so far."""

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device
        self.stream = torch.cuda.Stream(device)

    def submit(self, exchange: Exchange, then: Then | None = None) -> ExchangeHandle:
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream), torch.no_grad():
            start = mark(self.device)
            # A capture sends no message. If it fails, the other ranks have missed nothing, and it may be tried again.
            if torch.cuda.is_current_stream_capturing() and self._broken is None:
                exchange()
                error = None
            else:
                error = self._run(exchange)
            end = mark(self.device)
            if then is not None:
                then(error)
        return StreamHandle(start, end, self.device, exchange, error)
