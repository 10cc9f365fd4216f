"""trace.json: measured or predicted spans of time, to be opened in Perfetto."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hyperbatch.errors import InputError, check_kind
from hyperbatch.record.text import strict_json

if TYPE_CHECKING:
    from hyperbatch.plan.types import GroupTiming, StepTiming

MAX_SPANS = 100_000  # about 12 MB of trace.json, which Perfetto opens without a delay


class Span(NamedTuple):
    """A span of time in trace.json. Times are seconds since training began, pauses included."""

    name: str
    start_s: float
    duration_s: float
    track: str
    args: Mapping[str, Any]


def spans_per_rank(world_size: int) -> int:
    return MAX_SPANS // world_size


class TraceFile:
    """Writes a trace in Chrome's trace format, which Perfetto opens: spans on tracks, tracks in processes.

    The file grows at its end: each flush overwrites the closing brackets, so it is valid JSON at all times. The first
    `limit` spans are kept. `dropped` counts the others and those that could not be written, and `reason` says why.
    """

    HEAD, TAIL = b'{"displayTimeUnit":"ms","traceEvents":[\n', b"\n]}\n"

    def __init__(self, path: Path, *, go_on: bool = False, limit: int = MAX_SPANS) -> None:
        """go_on: whether to keep the spans of an earlier attempt. Call `process` before the first span."""
        self.limit, self.dropped, self.reason = limit, 0, ""
        self._names: list[bytes] = []  # names of processes and tracks, kept until they are written
        self._pending: list[bytes] = []
        self._spans = self._process = 0
        old = path.read_bytes() if go_on and path.exists() else b""
        if old.endswith(self.TAIL):
            self._spans = old.count(b'"ph":"X"')
            self._process = old.count(b'"process_name"')
            self._file = open(path, "r+b", buffering=0)  # noqa: SIM115
            self._end, self._before = len(old) - len(self.TAIL), b",\n"
        else:
            self._file = open(path, "wb", buffering=0)  # noqa: SIM115
            self._end, self._before = 0, self.HEAD

    def process(self, name: str) -> None:
        """Starts a new process: later spans are drawn in it, below the earlier ones."""
        self.flush()
        self._tracks: dict[str, int] = {}
        self._process += 1
        self._names.append(self._meta("process_name", name))
        self.flush()

    def span(self, span: Span) -> None:
        if self._spans >= self.limit:
            self.dropped += 1
            return
        self._spans += 1
        name, start_s, duration_s, track, args = span
        if track not in self._tracks:
            self._tracks[track] = len(self._tracks)
            self._names.append(self._meta("thread_name", track, self._tracks[track]))
        event = {
            "name": name,
            "ph": "X",
            "ts": round(start_s * 1e6, 1),
            "dur": round(duration_s * 1e6, 1),
            "pid": self._process,
            "tid": self._tracks[track],
        }
        self._pending.append(strict_json({**event, "args": args} if args else event).encode())
        if len(self._pending) >= 512 or time.monotonic() >= self._flush_at:
            self.flush()

    def flush(self) -> None:
        if self._names or self._pending:
            try:
                self._put(b",\n".join([*self._names, *self._pending]))
                self._names.clear()
            except OSError as error:  # a full disk must not end a run
                self.dropped, self.reason = self.dropped + len(self._pending), error.strerror or str(error)
            self._pending.clear()
        self._flush_at = time.monotonic() + 1

    def close(self) -> None:
        self.flush()
        if self.dropped:
            self._names.append(self._meta("process_labels", f"{self.dropped} later spans left out"))
        self.flush()
        self._file.close()

    def _meta(self, kind: str, text: str, thread: int = 0) -> bytes:
        args = {"labels" if kind == "process_labels" else "name": text}
        return strict_json({"name": kind, "ph": "M", "pid": self._process, "tid": thread, "args": args}).encode()

    def _put(self, events: bytes) -> None:
        new = self._before + events
        try:
            self._file.seek(self._end)
            if self._file.write(new + self.TAIL) != len(new) + len(self.TAIL):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            with contextlib.suppress(OSError):  # restores the old content, which needs no more space
                self._file.seek(self._end)
                self._file.write(self.TAIL if self._end else b"")
                self._file.truncate()
            raise
        self._end, self._before = self._end + len(new), b",\n"


def group_spans(groups: Sequence[GroupTiming], start_s: float = 0.0) -> list[Span]:
    """Returns the spans of the gradient exchange of a step that began at `start_s`."""
    return [
        Span(
            f"group {group.index}",
            start_s + group.start_s,
            group.end_s - group.start_s,
            "exchange",
            {"algorithm": group.algorithm, "bytes": group.bytes},
        )
        for group in groups
    ]


def write_trace(path: str | Path, steps: Mapping[str, StepTiming]) -> None:
    """Writes predicted or measured steps to one trace, below each other. The keys of `steps` are their titles."""
    check_kind("steps", steps, Mapping, 'give titles and StepTimings, such as {"predicted": plan.step.timing}')
    try:
        trace = TraceFile(Path(path))
        for title, timing in steps.items():
            trace.process(title)
            for part, start_s, end_s in timing.parts():
                trace.span(Span(part.replace("_", " "), start_s, end_s - start_s, "compute", {}))
            for span in group_spans(timing.groups):
                trace.span(span)
        trace.close()
        if trace.reason:
            raise InputError(f"{path}: cannot be written ({trace.reason})")
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror})") from None
