"""Heartbeats of ranks: a thread sends them through a store outside the process group.

Collectives captured in a CUDA graph have no watchdog: when a rank dies, the others wait inside a kernel forever. In
plain steps, the others get an error about a broken connection, but not its cause.

rank 0 -> watches 1 -> watches 2 -> watches 0        each rank sends heartbeats and watches its neighbour's
                        "1 is silent" -> store       the neighbour tells all ranks; those on 1's host kill its process
               2: "I failed, because" -> store       a rank that fails tells all others itself

A rank that sends heartbeats may still hang, because its main thread waits forever. A heartbeat therefore contains the
rank's place (comm/place.py). A rank that has made no progress for the timeout reports this to all, with every place.

The store is itself hosted by a process. If that process is stopped, requests to the store never return. A second thread
therefore watches whether the first one still gets answers, and all other requests have a time limit.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch.distributed as dist

from hyperbatch.comm.place import Place, told, who_hangs
from hyperbatch.comm.recorder import Question

_LOST, _SILENT = "lost", "silent"
_MAX_INTERVAL_S = 1.0  # longest time between two reads of the store, after which an announced failure ends a rank
_MOST = 0.7  # a rank without progress for this share of `timeout_s` reports the collective it waits in
_ANSWER_S = 2.0  # time limit of a request to the store
_SILENT_INTERVALS = 3  # after a failed exchange, a rank without a heartbeat for so many intervals counts as lost
_JUDGES = 8  # most ranks that look for the culprit: each reads all heartbeats, and the store has a single thread

T = TypeVar("T")
Words = dict[str, Any]  # about a failure: "message", a line for the user; "rank" and "host" of the failed rank


class _Process(NamedTuple):
    """The process of a rank; unknown fields are empty."""

    name: str = ""  # see `_name_of`
    host: str = ""


def within(seconds: float, ask: Callable[[], T], default: T) -> T:
    """Returns the result of `ask`, or the default if it takes longer than `seconds` or the store is gone."""
    answers: queue.SimpleQueue[T] = queue.SimpleQueue()

    def run() -> None:
        with contextlib.suppress(dist.DistError, RuntimeError):
            answers.put(ask())
            return
        answers.put(default)

    threading.Thread(target=run, name="hyperbatch-store", daemon=True).start()
    with contextlib.suppress(queue.Empty):
        return answers.get(timeout=seconds)
    return default


def announce(store: dist.Store, words: Words) -> bool:
    """Writes the words to the store for all ranks, unless another rank has already done so. Returns whether these words
    were the first."""
    text = json.dumps(words)
    return store.compare_set(_LOST, "", text).decode() == text


def announced(store: dist.Store) -> Words | None:
    """Returns the words that were announced first; None if no rank has failed or the store does not answer."""
    with contextlib.suppress(dist.DistError, RuntimeError):
        return json.loads(store.get(_LOST)) if store.check([_LOST]) else None
    return None


class Heartbeat:
    """Sends this rank's heartbeats and watches a neighbour's. Every rank must call `start()` and `stop()`, or use it as
    a context manager.

    A rank without a heartbeat for `timeout_s` is reported on every other rank within about two more intervals, and a
    rank that calls `fail` within one. `on_lost` is called once, from the thread, with words that name the rank. By
    default it prints their message to stderr and ends the process (exit code 1), because a thread that is stuck in the
    GPU's driver cannot be interrupted otherwise. Other ranks of the same host kill the silent rank's process if it
    still exists: it is stopped or stuck, reacts only to SIGKILL, and must not continue after the run has been given up.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        world_size: int,
        *,
        timeout_s: float = 30.0,
        interval_s: float | None = None,
        on_lost: Callable[[Words], None] | None = None,
        keeper: int | None = None,
        place: Callable[[], Place] | None = None,
        collective: Callable[[], str] | None = None,
    ) -> None:
        """store: any store that all ranks share, e.g. a TCPStore of your own. Other code must not block in it.

        keeper: the rank whose process hosts the store; None if another process does. place: returns this rank's place;
        the thread calls it at every heartbeat. collective: returns the collective that this rank waits in; called when
        the rank has made no progress for most of `timeout_s`.
        """
        self._store = dist.PrefixStore("hyperbatch-heartbeat", store)
        self._rank, self._world_size, self._watched = rank, world_size, (rank + 1) % world_size
        self._timeout_s, self._interval_s = timeout_s, interval_s or min(timeout_s / 20, _MAX_INTERVAL_S)
        self._on_lost = on_lost or _end_process
        self._keeper, self._keeper_process = keeper, _Process()
        self._answered, self._problem = time.monotonic(), ""  # of the store: its last answer, its last error
        self.given_up: Words | None = None  # words about the store, once it does not answer
        self._doomed = ""  # name of the process of a rank that was given up
        self._judges: bool | None = None  # whether this rank looks for the culprit; None: not decided yet
        self._lost, self._lock = False, threading.Lock()
        self._stays = False
        self._collective = collective
        self._question: Question | None = None  # the call of `collective`, once it was made
        self._place, self._at = place, (Place(phase="start"), time.monotonic())  # the last place, and since when
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"hyperbatch-heartbeat-{rank}", daemon=True)
            for run in (self._run, self._watch_store)
        ]

    def start(self) -> Heartbeat:
        self._store.set(f"process-{self._rank}", json.dumps(_Process(_name_of(os.getpid()), socket.gethostname())))
        self._store.set(self._key(self._rank), self._beat(0, time.monotonic()))  # a place for ranks that stop now
        if self._keeper is not None:  # read now, because the keeper might be stopped before the first heartbeat
            text = within(_ANSWER_S, lambda: self._store.get(f"process-{self._keeper}"), b"[]")
            self._keeper_process = _Process(*json.loads(text))
        self._answered = time.monotonic()
        for thread in self._threads:
            thread.start()
        return self

    def stop(self) -> None:
        """Ends the heartbeat of a rank that ends normally, so that the others do not report it."""
        self._stop.set()
        for thread in self._threads:
            thread.join(self._timeout_s)
        within(_ANSWER_S, lambda: self._store.set(self._key(self._rank), "done"), None)  # the store may be gone

    def leave(self) -> None:
        """Ends the threads after `fail`, except one that waits for the store."""
        self._stop.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self._interval_s)

    def fail(self, words: Words) -> bool:
        """Tells the other ranks why this one fails; they end at once. Returns True if no other rank had failed
        before."""
        self._stop.set()  # this rank ends by itself, whatever others report
        return self._asked(lambda: announce(self._store, words), True)

    def heard(self) -> Words | None:
        """Returns the words of a rank that failed, or words about the store if it does not answer; otherwise None."""
        return self._asked(lambda: announced(self._store), None) or self.given_up

    def about(self, rank: int, message: str) -> Words:
        """Returns words about the failure of a rank that cannot report it itself."""
        host = self._asked(lambda: self._process_of(rank), _Process()).host
        return {"message": message, "rank": rank, "host": host}

    def silent(self) -> list[int]:
        """Watches for three intervals (at most 3 s). Returns ranks without a heartbeat that have not ended normally.

        For a rank whose exchange has failed, long before `timeout_s`. The list is empty if the store does not answer,
        and the wait ends early if the reason of the failure becomes known. Only the first ranks that call this read all
        heartbeats; the others wait twice as long for what these report, and get an empty list.
        """
        before = self._asked(self._beats, {})
        until = time.monotonic() + _SILENT_INTERVALS * self._interval_s * (1 if self._judges else 2)
        while time.monotonic() < until and not self.heard():
            time.sleep(self._interval_s / 2)
        after = self._asked(self._beats, {})
        return [
            rank for rank, beat in after.items() if rank != self._rank and beat != b"done" and beat == before.get(rank)
        ]

    def hang(self) -> Words | None:
        """Tells all ranks which rank has made no progress for `timeout_s`. Returns the first words that were announced,
        or None. Only the first ranks that call this or `silent` read all heartbeats."""
        places = self._asked(self._places, {})
        if any(place.must_go_on and seconds > self._timeout_s for place, seconds in places.values()):
            words = self.about(*who_hangs(places))
            self._asked(lambda: announce(self._store, words), True)
            return self.heard()
        return None

    def without_store(self, what: str) -> Words | None:
        """If the store does not answer, gives it up and returns words about its host, followed by `what`. For a rank
        whose exchange has failed, long before `timeout_s`."""
        if self.given_up is None and not self._asked(lambda: self._store.check([_LOST]) or True, False):
            self.given_up = self._about_store(what)
        return self.given_up

    def stay(self) -> None:
        """Keeps reporting the current place, because this rank has failed there."""
        self._stays = True

    def places(self) -> list[str]:
        """Returns a line for each rank that has reported its place; empty if the store does not answer, or if enough
        other ranks have read the heartbeats before."""
        return told(self._asked(self._places, {}))

    @property
    def heard_after_s(self) -> float:
        """Seconds for which the store must stay available after a failure, so that every rank can read it."""
        return 2 * self._interval_s

    def __enter__(self) -> Heartbeat:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _asked(self, ask: Callable[[], T], default: T) -> T:
        """Returns the answer of the store, or the default if it does not answer."""
        return default if self.given_up else within(_ANSWER_S, ask, default)

    def _run(self) -> None:
        beat, seen, seen_at = 0, "", time.monotonic()
        while not self._stop.wait(self._interval_s):
            now = time.monotonic()
            try:
                beat += 1
                hangs = self._look_at_place(now)
                self._store.set(self._key(self._rank), self._beat(beat, now))
                if self._store.check([_LOST]) and not self._stop.is_set():
                    if self._store.check([_SILENT]):
                        self._doomed = self._process_of(int(self._store.get(_SILENT))).name
                    self._lose(json.loads(self._store.get(_LOST)))
                    return
                theirs = self._beat_of(self._watched)
                if self._keeper is not None and not self._keeper_process.name:
                    self._keeper_process = self._process_of(self._keeper)
                self._answered = now
            except (dist.DistError, RuntimeError) as error:
                self._problem = f": {str(error).strip().partition(chr(10))[0]}"
                continue
            if hangs and (words := self.hang()):
                self._lose(words)
                return
            if theirs != seen or theirs == "done":
                seen, seen_at = theirs, now
            elif now - seen_at > self._timeout_s and self._watched != self._rank:
                words = self.about(self._watched, f"rank {self._watched} has not responded for {now - seen_at:.1f} s")
                with contextlib.suppress(dist.DistError, RuntimeError):
                    self._store.set(_SILENT, str(self._watched))
                    announce(self._store, words)
                    self._doomed = self._process_of(self._watched).name
                self._lose(words)
                return

    def _watch_store(self) -> None:
        looked = time.monotonic()
        while not self._stop.wait(self._interval_s):
            now, before = time.monotonic(), looked
            looked = now
            if now - before > self._interval_s + self._timeout_s / 2:
                self._answered = now  # this process itself was stopped, for example with Ctrl-Z
            silent_s = now - self._answered
            if silent_s > self._timeout_s:
                self._doomed = self._keeper_process.name
                self.given_up = self._about_store(f"has not responded for {silent_s:.1f} s{self._problem}")
                self._lose(self.given_up)
                return

    def _about_store(self, what: str) -> Words:
        if self._keeper is None:
            return {"message": f"the store {what}"}
        whose = {"rank": self._keeper, "host": self._keeper_process.host}
        return {"message": f"rank {self._keeper}, which hosts the store, {what}", **whose}

    def _lose(self, words: Words) -> None:
        """Reports a lost rank. Only the first call has an effect."""
        with self._lock:
            first, self._lost = not self._lost, True
        if first:
            if self._on_lost is _end_process:
                self.end_silent()
            self._on_lost(words)
            self.end_silent()

    def _look_at_place(self, now: float) -> bool:
        """Updates this rank's place. Returns whether the rank hangs: it should have made progress and has not."""
        if self._place is None or self._stays:
            return False
        place = self._at[0]
        with contextlib.suppress(Exception):  # for example, the device is lost: heartbeats continue
            place = self._place()
        if place != self._at[0]:
            self._at, self._question = (place, now), None
        # This is done only after a long wait, because the recorder queries the device about each collective.
        if self._collective and self._question is None and now - self._at[1] > _MOST * self._timeout_s:
            self._question = Question(self._collective)
        # Two more intervals, so that silent ranks are reported first: a rank that waits for a stopped one makes no
        # progress either.
        return place.must_go_on and now - self._at[1] > self._timeout_s + 2 * self._interval_s

    def _beat(self, beat: int, now: float) -> str:
        if self._place is None:
            return str(beat)
        place, since = self._at
        if self._question is not None:
            place = replace(place, collective=self._question.answer)
        return f"{beat} {json.dumps([place.to_dict(), round(now - since, 1)])}"

    def _places(self) -> dict[int, tuple[Place, float]]:
        found = {}
        for rank, beat in self._beats().items():
            _, _, text = beat.decode().partition(" ")
            if text:
                place, seconds = json.loads(text)
                found[rank] = Place.from_dict(place), seconds
        return found

    def _process_of(self, rank: int) -> _Process:
        key = f"process-{rank}"
        return _Process(*json.loads(self._store.get(key))) if self._store.check([key]) else _Process()

    def end_silent(self) -> None:
        """Kills the process of a rank that was given up, if it runs on this host and is still the same process.

        `on_lost` should call it only after it has reported the rank, because a launcher that sees a process end ends
        all others.
        """
        name, self._doomed = self._doomed, ""
        pid = int(name.partition(" ")[0]) if name else os.getpid()
        if pid != os.getpid() and name == _name_of(pid):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)

    def _beat_of(self, rank: int) -> str:
        key = self._key(rank)
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _beats(self) -> dict[int, bytes]:
        """Returns the heartbeats of all ranks, in one request. Empty until all have started, and if enough other ranks
        have read them before."""
        if self._judges is None:
            self._judges = self._store.add("judges", 1) <= _JUDGES
        if not self._judges:
            return {}
        keys = [self._key(rank) for rank in range(self._world_size)]
        return dict(enumerate(self._store.multi_get(keys))) if self._store.check(keys) else {}

    def _key(self, rank: int) -> str:
        return f"beat-{rank}"


def _name_of(pid: int) -> str:
    """Returns a globally unique name of a process: pid, start time, boot and pid namespace; "" if it is not known."""
    try:
        began = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{pid} {began} {boot} {os.readlink(f'/proc/{pid}/ns/pid')}"
    except (OSError, IndexError):  # no /proc, or no such process
        return ""


def _end_process(words: Words) -> None:
    print(f"hyperbatch: {words['message']}; ending this rank", file=sys.stderr, flush=True)
    os._exit(1)
