"""Reads and writes files that grow line by line: metrics.jsonl, layers.jsonl, mllog.txt."""

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
    """Returns the complete lines of metrics.jsonl. An incomplete last line and invalid lines are skipped."""
    try:
        text = (folder / name).read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in map(parse_metric_line, text.splitlines()) if line is not None]


def parse_metric_line(text: str | bytes) -> dict[str, Any] | None:
    """Parses one line of metrics.jsonl or layers.jsonl. Returns None if it is incomplete or invalid."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) and "event" in line else None


def drop_lines(folder: Path, step: int) -> list[str]:
    """Removes the lines of metrics.jsonl and layers.jsonl at or after the step, and incomplete lines. Returns a message
    for each file for which this failed.

    Unless somebody has edited the file, these lines are at its end, and truncating it also works on a full disk.
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
    """Appends lines to a file, with one write each. A line that cannot be written, for example because the disk is
    full, is skipped as a whole, and the run continues."""

    def __init__(self, path: Path, *, go_on: bool, warn: Callable[[str], None] = lambda line: None) -> None:
        """go_on: whether to keep the file's content. warn: called with the reason when the first line is skipped."""
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
