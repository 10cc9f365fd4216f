"""Several commands fill one folder: who makes which runs, and who is still at work. Locks end with their process.

Where a file system has no locks, none of them holds anybody up.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from hyperbatch.errors import InputError

SEARCH_LOCK, CLAIMS = ".search.lock", ".confirm.lock"


@contextlib.contextmanager
def held(folder: Path, part: str) -> Iterator[None]:
    """Two commands must not make the same runs in one folder; `part` names this one's."""
    with (folder / f".{part}.lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"{folder} is in use by another sweep; wait for it, or divide the runs with --part K/N"
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


@contextlib.contextmanager
def searching(folder: Path) -> Iterator[None]:
    """While this command has runs of its own part to make, for which searches may be waiting."""
    with (folder / SEARCH_LOCK).open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing would leave it to processes that were forked meanwhile


def others_search(folder: Path) -> bool:
    """Whether any command is `searching`; this one must have ended its own."""
    with (folder / SEARCH_LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            pass
        return False


@contextlib.contextmanager
def claimed(folder: Path, digest: str) -> Iterator[bool]:
    """Whether a run that any command may make is this one's: one byte of a file is locked meanwhile, by its digest."""
    with (folder / CLAIMS).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(digest, 16))
            free = True
        except (BlockingIOError, PermissionError):
            free = False
        except OSError:
            free = True
        yield free
