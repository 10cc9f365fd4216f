"""The output of a run that goes to a file, as under a scheduler: a full disk costs lines of it, not the run.

For commands that train: what they say is in the run's folder, too. Where the output is all that a command leaves, a
part that finds no room is an error.
"""

from __future__ import annotations

import io
import os
import stat
import sys
from typing import Any

from hyperbatch.durable import FULL


class _Log(io.FileIO):
    """What finds no room is left out."""

    def write(self, data: Any, /) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return len(data)


def let_log_fill() -> None:
    """From now on, where stdout or stderr are plain files."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            number = stream.fileno()
        except (AttributeError, OSError, ValueError):  # there is none, or it is closed or somebody's own
            continue
        if stat.S_ISREG(os.fstat(number).st_mode):
            stream.flush()
            log = io.BufferedWriter(_Log(number, "wb", closefd=False))
            setattr(sys, name, io.TextIOWrapper(log, stream.encoding, stream.errors, line_buffering=True))
