"""Keeps a run alive if its output goes to a file, as under a scheduler, and the disk is full: it loses lines only.

This is for commands that train, whose results are in the run's folder, too. If a command's only result is its output,
a full disk must remain an error.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any

from hyperbatch.durable import FULL


class _Log(io.FileIO):
    """A file that discards what does not fit on the disk."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return len(data)


def let_log_fill() -> None:
    """Makes stdout and stderr discard what does not fit on the disk, if they are plain files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # there is no stream, or it is closed or not a file
            continue
        if stat.S_ISREG(os.fstat(number).st_mode):
            stream.flush()
            log = io.BufferedWriter(_Log(number, "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(log, stream.encoding, stream.errors, line_buffering=True))
