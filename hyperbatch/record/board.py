"""tensorboard/: the curves of a run, if TensorBoard is installed."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

INTERVAL_S = 0.05  # a point costs 50 us (the CRC is computed in Python); 20 points per second are enough to look at


class Tensorboard:
    """Writes scalar curves to an event file in tensorboard's record format. Needs neither torch nor tensorflow.

    Importing tensorboard takes 0.2 s, so a thread does it while the run is set up; points are kept until then.
    """

    def __init__(self, folder: Path, resume_from_step: int | None, warnings: list[str]) -> None:
        self._folder, self._resume_from_step, self._warnings = folder, resume_from_step, warnings
        self._waiting: list[tuple[float, int, dict[str, float]]] = []
        self._next_point = self._flush_at = 0.0
        self._write: Callable[[bytes], None] | None = None
        self._failed: Exception | None = None
        self._loader = threading.Thread(target=self._load, name="tensorboard import", daemon=True)
        self._loader.start()

    def _load(self) -> None:
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.compat.proto.summary_pb2 import Summary  # pyright: ignore[reportAttributeAccessIssue]
            from tensorboard.summary.writer.record_writer import RecordWriter
        except Exception as error:  # a broken installation fails in many ways, and none of them may stop a run
            self._failed = error
            return
        self._event, self._summary, self._records = Event, Summary, RecordWriter

    def add(self, prefix: str, step: int, scalars: Mapping[str, float], *, always: bool = False) -> None:
        now = time.monotonic()
        if self._failed or (now < self._next_point and not always):
            return
        self._next_point = now + INTERVAL_S
        self._waiting.append((time.time(), step, {f"{prefix}/{name}": value for name, value in scalars.items()}))
        if not self._loader.is_alive():
            self._drain(flush=now >= self._flush_at)
            if now >= self._flush_at:
                self._flush_at = now + 2

    def _drain(self, *, flush: bool) -> None:
        try:
            if self._failed:
                raise self._failed
            if self._write is None:
                self._open()
            for wall_time, step, scalars in self._waiting:
                values = [self._summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items()]
                self._put(wall_time=wall_time, step=step, summary=self._summary(value=values))
            if flush:
                self._file.flush()
        except Exception as error:  # a full disk or an unknown version of tensorboard; the other files are complete
            self._failed = error
            warning = f"tensorboard/ is missing or ends early: {error}"
            if warning not in self._warnings:
                self._warnings.append(warning)
        self._waiting.clear()

    def _open(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._file = open(self._folder / f"events.out.tfevents.{time.time_ns()}.{os.getpid()}", "wb")  # noqa: SIM115
        self._write = self._records(self._file).write
        self._put(wall_time=time.time(), file_version="brain.Event:2")
        if self._resume_from_step is not None:
            # A session start makes tensorboard discard what an earlier attempt wrote for this step and later ones.
            self._put(wall_time=time.time(), step=self._resume_from_step, session_log={"status": 1})

    def _put(self, **fields: Any) -> None:
        assert self._write is not None
        self._write(self._event(**fields).SerializeToString())

    def close(self) -> None:
        self._loader.join()
        self._drain(flush=True)
        if self._write:
            with contextlib.suppress(OSError):  # the file could not be flushed
                self._file.close()
