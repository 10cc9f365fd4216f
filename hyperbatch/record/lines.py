"""Files that grow by a line at a time, and what is read from them: metrics.jsonl, layers.jsonl, mllog.txt."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from hyperbatch.durable import replace_text


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole; a torn last line and foreign lines are left out."""
    try:
        text = (folder / name).read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in map(parse_metric_line, text.splitlines()) if line is not None]


def parse_metric_line(text: str | bytes) -> dict[str, Any] | None:
    """One line of metrics.jsonl or layers.jsonl, or None when it is not whole."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) and "event" in line else None


def drop_lines(folder: Path, step: int) -> list[str]:
    """Of metrics.jsonl and layers.jsonl, those at or after the step, and what is not whole. Returns what could not be
    dropped, a line each.

    They are the end of the file, unless somebody has edited it: cutting it off needs no room on a disk that is full.
    """
    failed = []
    for path in (folder / "metrics.jsonl", folder / "layers.jsonl"):
        try:
            before = path.read_bytes() if path.exists() else b""
            kept = b"".join(line for line in before.splitlines(keepends=True) if _is_before(line, step))
            if not before.startswith(kept):
                replace_text(path, kept.decode())
            elif kept != before:
                os.truncate(path, len(kept))
        except OSError as error:
            reason = error.strerror or error
            failed.append(f"{path.name} keeps the old lines of the steps from {step} on, which are repeated: {reason}")
    return failed


def _is_before(line: bytes, step: int) -> bool:
    parsed = parse_metric_line(line) if line.endswith(b"\n") else None
    return parsed is not None and parsed["step"] < step


class Lines:
    """Lines that are appended to a file, one write each. One that cannot be written, for a full disk, say, is left out
    whole: it is not worth a run."""

    def __init__(self, path: Path, *, go_on: bool, warn: Callable[[str], None] = lambda line: None) -> None:
        """go_on: keep what is there. warn: is told why, when the first line is left out."""
        self.name, self.lost, self.reason, self._warn = path.name, 0, "", warn
        self._file = open(path, "ab" if go_on else "wb", buffering=0)  # noqa: SIM115
        self._end = self._file.seek(0, os.SEEK_END)

    def add(self, line: str) -> None:
        data = line.encode() + b"\n"
        try:
            if self._file.write(data) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            self._end += len(data)
        except OSError as error:
            self.lost, self.reason = self.lost + 1, error.strerror or str(error)
            with contextlib.suppress(OSError):
                self._file.truncate(self._file.seek(self._end))
            if self.lost == 1:
                self._warn(self.reason)

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed
