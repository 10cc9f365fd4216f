"""Preemption: after a signal, all ranks stop after the same step and leave a checkpoint.

    signal on any rank, or the parent command's file
      -> store: preempted                                  a thread on every rank reads it
      -> every rank: the last step that it has started     it starts no further step for now
      -> rank 0: the latest of these                       the run stops after it; ranks that are behind do the missing
                                                           steps first

The cost per step is an uncontended lock; there is neither an exchange nor a read from the device. The host launches a
stride of captured steps as a whole, so a run stops only between strides.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Self

import torch.distributed as dist

from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import RunFailed

INTERVAL_S = 0.25  # between two reads of the store by a rank
OFTEN = 512  # with more ranks than this, each reads less often, so that the load of the store does not grow
LEAVE_S = 1.0  # time for the thread to end: the interpreter would abort if it ended while the thread is in the store
SHOWN_RANKS = 8  # most ranks that a message names
PARENT_S = 1.0  # after a SIGTERM, time for the parent command to write that all ranks were preempted


def signals_of(names: str | None) -> list[signal.Signals]:
    """Returns the signals of `--preempt-signals`."""
    return [] if names is None else [signal.Signals[f"SIG{name}"] for name in names.split(",")]


class Preemption:
    """A context manager around the whole run, in which the signals do not kill it; `watched` is one around training."""

    def __init__(self, names: str | None, ranks: Ranks, *, timeout_s: float, parent_file: Path | None = None) -> None:
        """names: the value of `--preempt-signals`. parent_file: the command that started this rank writes the name of a
        signal that it receives to this file. A SIGTERM may then also come from that command's agent, which ends the
        remaining ranks after a failure."""
        self.on_stop: Callable[[], None] = lambda: None  # called when the run's last step is over
        self.reason = ""  # the signal's name
        self._signals, self._ranks, self._timeout_s = signals_of(names), ranks, timeout_s
        self._interval_s = INTERVAL_S * max(1.0, ranks.world_size / OFTEN)
        self._parent_file, self._parent = parent_file, os.getppid()
        self._term_s: float | None = None  # when SIGTERM was received
        self._begun = 0  # the last step that was started
        self._frozen = False  # True: no step may start before the ranks have agreed on the last one
        self._stop_after: int | None = None
        self._problem = ""  # why the ranks have not agreed yet, as far as this one knows
        self._lock, self._decided, self._over = threading.Lock(), threading.Event(), threading.Event()
        self._undo = contextlib.ExitStack()

    def __enter__(self) -> Self:
        # Before training, SIGTERM ends the run: there is nothing to save, and a rank may be waiting for others.
        self._handle([number for number in self._signals if number != signal.SIGTERM], self._undo)
        return self

    def __exit__(self, *_: object) -> None:
        self._undo.close()

    def saw(self, number: int, *_: object) -> bool:
        """The signal handler; other threads may call it, too. Returns True for a SIGTERM that asks this run to stop:
        the caller then starts a timer, because a run that hangs would not stop by itself."""
        if number not in self._signals:
            return False
        if number == signal.SIGTERM and self._parent_file is not None:
            self._term_s = self._term_s or time.monotonic()
            if os.getppid() != self._parent:  # the parent has ended, and with it the lock of the run's folder
                self._end_at_once()
            return False
        self.reason = self.reason or signal.Signals(number).name
        return number == signal.SIGTERM

    @contextlib.contextmanager
    def watched(self, store: dist.Store | None) -> Iterator[None]:
        """A context around training, in which the run can be preempted. store: shared by all ranks; None for one."""
        if not self._signals:
            yield
            return
        shared = None if store is None else dist.PrefixStore("hyperbatch-preempt", store)
        thread = threading.Thread(target=self._watch, args=(shared,), name="hyperbatch-preempt", daemon=True)
        # After a failure, the thread is joined only once the failure is reported, and not for long, because the store
        # may never answer.
        self._undo.callback(thread.join, LEAVE_S)
        with contextlib.ExitStack() as undo:
            self._handle([number for number in self._signals if number == signal.SIGTERM], undo)
            thread.start()
            try:
                yield
            except BaseException:
                self._over.set()  # without a join: the store may not answer, and the failure must be reported first
                raise
            self._over.set()
            thread.join(self._timeout_s)

    def may_begin(self, last_step: int) -> bool:
        """Whether a stride that ends with this step may start. The answer is the same on every rank."""
        with self._lock:
            if not self._frozen:
                self._begun = last_step
                return True
        if not self._decided.wait(self._timeout_s):
            raise RunFailed(f"{self.reason or 'a signal'}: the ranks did not agree on a last step{self._problem}")
        assert self._stop_after is not None
        if last_step <= self._stop_after:
            return True
        self.on_stop()
        return False

    # --- in the thread --------------------------------------------------------------------------------------------

    def _watch(self, store: dist.Store | None) -> None:
        while not self._over.wait(self._interval_s):
            try:
                if not self.reason:
                    self._look_at_parent()
                if store is not None and self._spread(store):
                    self._agree(store)
                    return
            except (dist.DistError, RuntimeError) as error:
                self._problem = f": {str(error).strip().partition(chr(10))[0]}"
                continue  # the store ended with its rank, so the run will fail anyway
            if store is None and self.reason:
                self._decide(self._freeze())
                return

    def _look_at_parent(self) -> None:
        if self._parent_file is None:
            return
        with contextlib.suppress(FileNotFoundError):
            self.reason = self._parent_file.read_text()
            return
        if self._term_s is not None and time.monotonic() - self._term_s > PARENT_S:
            self._term_s = None
            self._end_at_once()

    def _end_at_once(self) -> None:
        """Ends this rank after a SIGTERM that was not for all ranks. Rank 0 writes a record, as after Ctrl-C, unless it
        ignores SIGINT, as a background job of a shell does. The other ranks write no record, and may be waiting for
        rank 0 in code that no signal interrupts."""
        if self._ranks.rank != 0 or signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            os._exit(128 + signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)

    def _spread(self, store: dist.Store) -> bool:
        """Returns whether any rank was preempted. If it was this rank, the store is updated; a signal that arrives
        during this call is written by the next one."""
        if self.reason:
            store.set("asked", self.reason)
            return True
        if store.check(["asked"]):
            self.reason = store.get("asked").decode()
            return True
        return False

    def _agree(self, store: dist.Store) -> None:
        """Agrees with the other ranks on the last step. The store runs in a single thread, so only rank 0 queries it
        about every rank. The others poll for rank 0's answer, which mostly is there at once, and less and less often if
        it is not."""
        store.set(f"begun-{self._ranks.rank}", str(self._freeze()))
        wait_s, missing = INTERVAL_S / 10, list(range(self._ranks.world_size))
        while not (self._latest(store, missing) if self._ranks.rank == 0 else store.check(["latest"])):
            if self._ranks.rank != 0:
                wait_s = min(2 * wait_s, self._interval_s)
                self._problem = store.get("missing").decode() if store.check(["missing"]) else ""
            if self._over.wait(wait_s):
                return
        self._decide(int(store.get("latest")))

    def _latest(self, store: dist.Store, missing: list[int]) -> bool:
        """Returns whether every rank has written the last step that it has started. If so, writes the latest of these
        to the store, otherwise a text that names the missing ranks. missing: the ranks that have not written yet; this
        call updates it."""
        keys = [f"begun-{rank}" for rank in range(self._ranks.world_size)]
        if store.check(keys):
            store.set("latest", str(max(map(int, store.multi_get(keys)))))
            return True
        missing[:] = [rank for rank in missing if not store.check([keys[rank]])]
        problem = f"; no response from rank {', '.join(map(str, missing[:SHOWN_RANKS]))}" if missing else ""
        if problem != self._problem:
            self._problem = problem
            store.set("missing", problem)
        return False

    def _freeze(self) -> int:
        with self._lock:
            self._frozen = True
            return self._begun

    def _decide(self, step: int) -> None:
        self._stop_after = step
        self._decided.set()

    def _handle(self, signals: list[signal.Signals], undo: contextlib.ExitStack) -> None:
        if threading.current_thread() is threading.main_thread():
            for number in signals:
                undo.callback(signal.signal, number, signal.signal(number, self.saw))
