"""Files that grow by a line at a time, and what is read from them: metrics.jsonl, layers.jsonl, mllog.txt."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from pathlib import Path
from typing import Any

from hyperbatch.record.text import strict_json


def read_metrics(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """The lines of metrics.jsonl that are whole; a torn last line and foreign lines are left out."""
    try:
        text = (folder / name).read_text(errors="replace")
    except FileNotFoundError:
        return []
    return [line for line in map(parse_metric_line, text.splitlines()) if line is not None]


def parse_metric_line(text: str) -> dict[str, Any] | None:
    """One line of metrics.jsonl or layers.jsonl, or None when it is not whole."""
    try:
        line = json.loads(text)
    except ValueError:
        return None
    return line if isinstance(line, dict) and isinstance(line.get("step"), int) and "event" in line else None


def drop_lines(folder: Path, step: int) -> None:
    """Of metrics.jsonl and layers.jsonl, those at or after the step."""
    for name in ("metrics.jsonl", "layers.jsonl"):
        kept = [line for line in read_metrics(folder, name) if line["step"] < step]
        _replace(folder / name, "".join(strict_json(line) + "\n" for line in kept))


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)


class Lines:
    """Lines that are appended to a file, one write each. One that cannot be written, for a full disk, say, is left out
    whole: it is not worth a run."""

    def __init__(self, path: Path, *, go_on: bool) -> None:
        """go_on: keep what is there."""
        self.name, self.lost, self.reason = path.name, 0, ""
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
                self._file.truncate(self._end)

    def close(self) -> None:
        self._file.close()

    @property
    def closed(self) -> bool:
        return self._file.closed
