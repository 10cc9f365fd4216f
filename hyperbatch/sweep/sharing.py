"""Several commands fill one folder: who makes which runs, and who is still at work. Locks end with their process.

Where a file system has no locks, none of them holds anybody up.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from hyperbatch.errors import InputError

SEARCH_LOCK, CLAIMS = ".search.lock", ".confirm.lock"


@contextlib.contextmanager
def held(folder: Path, part: tuple[int, int]) -> Iterator[None]:
    """Two commands must not make the same runs in one folder: neither the same part, nor parts of another division."""
    of = f"-of-{part[1]}.lock"
    with (folder / f".part-{part[0]}{of}").open("w") as file:
        others = [path for path in folder.glob(".part-*-of-*.lock") if not path.name.endswith(of)]
        # Shared: two commands that look at the same time do not take each other for the holder.
        if not _lock(file) or any(_is_held(path, fcntl.LOCK_SH) for path in others):
            raise InputError(
                f"{folder} is in use by another sweep; wait for it, or divide the runs with --part K/N and the same N "
                "in all commands"
            )
        yield


def _lock(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """False where another process holds it."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks
    return True


def _is_held(path: Path, kind: int = fcntl.LOCK_EX) -> bool:
    with path.open("a") as file:
        return not _lock(file, kind)


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
    return _is_held(folder / SEARCH_LOCK)


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
