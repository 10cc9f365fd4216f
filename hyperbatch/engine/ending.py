"""Ends one rank of several after a failure: it first reports the reason, and then closes everything that could block.

    error -> the timer starts -> if an exchange failed: which rank failed before or is silent?
          -> words for the parent or stderr -> words for the other ranks -> record (rank 0)
          -> graphs reset -> loader closed -> process group aborted -> the caller gets the error

The words of a rank are a dict that describes its failure. NCCL's destructor waits for the graphs that captured its
collectives, a device may be stuck in a collective whose other ranks are gone, and no signal handler runs in a thread
that waits for the device. A timer therefore ends the process if the steps of the last line take too long; by then
everything has been reported. A run of one rank only raises the error.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any, Self

import torch.distributed as dist

from hyperbatch.comm.heartbeat import Heartbeat, Words, announce, announced
from hyperbatch.comm.place import Place, named
from hyperbatch.engine.preempt import Preemption
from hyperbatch.engine.ranks import Ranks, interrupt
from hyperbatch.errors import InputError, Preempted, RunFailed

PATIENCE_S = 10.0  # time for an orderly end; torchrun's agent kills a rank after 30
GRACE_S = 2.0  # time for the main thread to raise the same failure by itself, as gloo's collectives do
STEPS = 2.5  # factor of PATIENCE_S for a preempted run, which first finishes its current step
MAX_TRACE_CHARS = 20_000  # only the end of a traceback is kept, because it is sent through the store

_runs = itertools.count()  # numbers the runs of this process, so that the words of each run have their own keys


def words_of(error: BaseException, rank: int, step: int | None = None) -> dict[str, Any]:
    """The words with which a rank describes its failure; engine/culprit.py chooses among those of several ranks.

    after: "exchange" or "signal" if the failure may be the consequence of another rank's. heard: True in words that a
    rank has adopted from another. step: the step of the run, if it trains.
    """
    kinds = (kind.__name__ for kind in (InputError, Preempted) if isinstance(error, kind))
    words: dict[str, Any] = {
        "kind": next(kinds, "RunFailed"),
        "time": time.time(),
        "rank": rank,
        "host": socket.gethostname(),
        "step": step,
    }
    if isinstance(error, (InputError, RunFailed)):
        return words | {"message": str(error)} | dict(getattr(error, "words", {}))
    if isinstance(error, KeyboardInterrupt):
        return words | {"message": f"rank {rank} was interrupted", "after": "signal"}
    # Any other error is a bug of ours or a fault of the machine.
    trace = "".join(traceback.format_exception(error))[-MAX_TRACE_CHARS:]
    words |= {"message": f"rank {rank}: {type(error).__name__}: {str(error).strip()}", "traceback": trace}
    return words | {"after": "exchange"} if is_exchange_error(error) else words


def is_exchange_error(error: BaseException) -> bool:
    """Whether a collective or the store failed, mostly because another rank is gone. gloo raises plain RuntimeError."""
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and ("gloo/" in str(error) or "NCCL" in str(error))


class Ending:
    """A context manager around the whole run; `told` is one around everything that runs in the process group."""

    def __init__(self, ranks: Ranks, report: Callable[[dict[str, Any]], None] | None = None) -> None:
        """report: sends the words to the command that started this rank; without it they are printed to stderr."""
        self.record: Callable[[dict[str, Any]], None] = lambda words: None  # writes them to the run's folder
        self.step: Callable[[], int | None] = lambda: None  # the run's current step
        self.place: Callable[[], Place] = lambda: Place(phase="start")  # of this rank; called in a thread
        self.collective: Callable[[], str] = str  # the one that this rank waits in; called in a thread
        self.preemption: Preemption | None = None  # also receives signals
        self._ranks, self._report = ranks, report
        self._alone = ranks.world_size == 1
        self._name = f"hyperbatch-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}-{next(_runs)}"
        self._store: dist.Store | None = None
        self._default_store: dist.Store | None = None  # on rank 0 it is the server, which ends with the last reference
        self._heart: Heartbeat | None = None
        self._grace_s = 0.0
        self._spoken = threading.Event()
        self._timer: threading.Timer | None = None
        self._said, self._lock = False, threading.Lock()
        self._kept_back: dict[str, Any] | None = None  # words not printed, since the error itself will show them
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        if not self._alone:
            self._undo.callback(self.disarm)
            self._undo.enter_context(self._signals_seen())
        return self

    def __exit__(self, *_: object) -> None:
        if self._said:
            self._let_others_hear()
            if self._heart is not None:
                self._heart.leave()
        self._undo.close()

    @property
    def store(self) -> dist.Store | None:
        """The store that all ranks share, available once `told` was entered; None if there is one rank."""
        return self._store

    def watch(self, timeout_s: float, *, raises: bool) -> None:
        """Starts the heartbeat. NCCL's watchdog is not enough: it names no rank, and does not see captured collectives.

        raises: whether collectives raise when another rank is gone; the main thread then gets a moment to raise first.
        """
        self._grace_s = GRACE_S if raises else 0.0
        if self._store is not None:
            self._heart = Heartbeat(
                self._store,
                self._ranks.rank,
                self._ranks.world_size,
                timeout_s=timeout_s,
                on_lost=self._lost,
                keeper=None if self._ranks.agent_store else 0,
                place=lambda: self.place(),
                collective=lambda: self.collective(),
            ).start()

    @contextlib.contextmanager
    def told(self) -> Iterator[None]:
        """A context inside the process group: an error that leaves it has been reported to all ranks, and says so."""
        if not self._alone and self._store is None:
            self._default_store = dist.distributed_c10d._get_default_store()
            # A connection of its own, because calls that block occupy theirs.
            self._store = dist.PrefixStore(self._name, self._default_store.clone())  # pyright: ignore[reportAttributeAccessIssue]
        try:
            yield
        except BaseException as error:
            if isinstance(error, (InputError, RunFailed)):
                error.on_all_ranks = True
            if self._store is None or self._said:
                raise
            cause = self._fail(error, self._store)
            if cause is not None:
                adopted = (InputError if cause["kind"] == "InputError" else RunFailed)(cause["message"])
                adopted.on_all_ranks = True
                raise adopted from error
            raise
        if self._heart is not None:
            self._heart.stop()
            self._heart = None

    # --- in the main thread -------------------------------------------------------------------------------------

    def _fail(self, error: BaseException, store: dist.Store) -> dict[str, Any] | None:
        """Reports the failure. If it is the consequence of another rank's failure, returns the words of that rank."""
        words, rank = words_of(error, self._ranks.rank, self.step()), self._ranks.rank
        self._arm(words)
        if self._heart is not None:
            self._heart.stay()
        self._ignore_signals()
        cause = self._cause(error, store) if "after" in words else None
        if cause is not None:
            # The rank that failed first prints the reason; if it hosted the store and is gone, this rank prints it.
            self._say(cause | {"heard": True}, aloud=self._heart is not None and bool(self._heart.given_up))
            self.record(cause)
            return cause
        if self._report is not None:
            self._say(words)
        message = words["message"]
        line = message if message.startswith(("rank ", "ranks ")) else f"rank {rank}: {message}"
        words |= {"message": line}
        first = True
        with contextlib.suppress(dist.DistError, RuntimeError):  # the store may have gone with another rank
            first = self._heart.fail(words) if self._heart is not None else announce(store, words)
        # The command prints rank 0's error itself. A mistake in the input is raised on every rank.
        self._say(words, aloud=first and rank != 0 and not isinstance(error, InputError))
        return None

    def _cause(self, error: BaseException, store: dist.Store) -> dict[str, Any] | None:
        """The words of the failure that caused a failed exchange or a signal, if there is one.

        A rank that fails reports the reason before it closes its connections. If another rank ended without a reason,
        this rank reports its number and ends at once.
        """
        if self._heart is None:
            return announced(store)
        if (words := self._heart.heard()) or isinstance(error, KeyboardInterrupt):
            return words and self._in_full(words)
        lost = self._heart.silent()
        if lost and not self._heart.heard():
            line = _who_is_lost(lost, error, self._ranks.rank)
            self._lost(self._heart.about(lost[0], line), after="exchange")
        # The exchange timed out: the rank that the others wait for still responds, but makes no progress.
        words = (
            self._heart.heard()
            or self._heart.hang()
            or self._heart.without_store(_unreachable(error, self._ranks.rank))
        )
        return words and self._in_full(words)

    def _in_full(self, words: Words) -> Words:
        """The words with all fields. A rank's own words are complete; those of a heartbeat lack the time, the step and
        the place of each rank."""
        if "kind" in words:
            return words
        places = [] if self._heart is None else self._heart.places()
        return {"kind": "RunFailed", "time": time.time(), "step": self.step(), **words, "places": places}

    def _ignore_signals(self) -> None:
        """Ignores further signals: the agent's SIGTERM follows Ctrl-C, and must not interrupt the orderly end."""
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                if _interrupts(number):
                    self._undo.callback(signal.signal, number, signal.signal(number, lambda *_: None))

    def _say(self, words: dict[str, Any], *, aloud: bool = True) -> bool:
        """Reports the words. Only the first call does so and returns True."""
        with self._lock:
            if self._said:
                return False
            self._said = True
        self._spoken.set()
        if self._report is not None:
            self._report(words)
        elif aloud:
            _print(words["message"], "".join(f"{line}\n" for line in words.get("places", ())))
        else:
            self._kept_back = words
        if self._heart is not None:
            self._heart.end_silent()
        return True

    # --- in other threads ---------------------------------------------------------------------------------------

    def _lost(self, words: Words, after: str = "") -> None:
        """Ends this rank because another has failed, unless it is already ending. NCCL would block it for long."""
        words = self._in_full(words)
        if after:
            words |= {"after": after}
        elif self._grace_s:
            self._spoken.wait(self._grace_s)
        if self._say(words | {"heard": True}):
            self._end(words)

    def _arm(self, words: dict[str, Any], patience_s: float | None = None) -> None:
        """Starts the timer that ends the process, by default after PATIENCE_S."""
        with self._lock:
            if self._timer is None:
                self._timer = _timer(lambda: self._too_late(words), patience_s)

    def disarm(self) -> None:
        with self._lock:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    def _too_late(self, words: dict[str, Any]) -> None:
        first = self._say(words)
        if self._kept_back is not None:
            _print(self._kept_back["message"], self._kept_back.get("traceback", ""))
        self._end(words if first else None)

    def _end(self, words: dict[str, Any] | None) -> None:
        """Ends the process, whatever the main thread waits for. words: for the record and the other ranks; None if they
        have been reported."""
        _timer(lambda: os._exit(1))  # even if the disk or the store does not answer
        try:
            if words is not None:
                self.record(words)
                if self._heart is not None:
                    self._heart.fail(words)
                    self._let_others_hear()
        finally:
            os._exit(1)

    def _let_others_hear(self) -> None:
        """Waits until the other ranks have read the store, which rank 0 may host."""
        if self._heart is not None and self._ranks.rank == 0 and not self._ranks.agent_store:
            time.sleep(self._heart.heard_after_s)

    @contextlib.contextmanager
    def _signals_seen(self) -> Iterator[None]:
        """Lets SIGINT and SIGTERM start the timer even if the main thread never runs their handlers."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        read, write = os.pipe()
        os.set_blocking(write, False)
        before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)

        def look() -> None:
            while number := os.read(read, 1)[0]:
                words = words_of(KeyboardInterrupt(), self._ranks.rank)
                if number in (signal.SIGINT, signal.SIGTERM) and _interrupts(number):
                    self._arm(words)
                elif self.preemption is not None and self.preemption.saw(number):
                    self._arm(words, STEPS * PATIENCE_S)

        thread = threading.Thread(target=look, name="hyperbatch-signals", daemon=True)
        thread.start()
        try:
            yield
        finally:
            signal.set_wakeup_fd(before)
            os.write(write, b"\0")  # closing the pipe would not end the thread while a forked process has a copy
            thread.join()
            os.close(write)
            os.close(read)


def _who_is_lost(lost: list[int], error: BaseException, rank: int) -> str:
    """Returns a line that names the lost ranks: NCCL reports that a connection broke, but not to which rank."""
    if len(lost) == 1:
        return f"rank {lost[0]} {_unreachable(error, rank, ' with it')}"
    return f"ranks {named(lost)} {_unreachable(error, rank, ' with them').replace('has', 'have', 1)}"


def _unreachable(error: BaseException, rank: int, whom: str = "") -> str:
    reason = str(error).strip().partition("\n")[0]
    return f"has ended or cannot be reached: communication{whom} failed on rank {rank}: {reason}"


def _interrupts(number: int) -> bool:
    return signal.getsignal(number) in (signal.default_int_handler, interrupt)


def _timer(function: Callable[[], None], patience_s: float | None = None) -> threading.Timer:
    timer = threading.Timer(PATIENCE_S if patience_s is None else patience_s, function)
    timer.daemon = True
    timer.start()
    return timer


def _print(line: str, before: str = "") -> None:
    print(f"{before}hyperbatch: {line}", file=sys.stderr, flush=True)
