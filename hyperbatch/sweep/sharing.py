"""File locks for several commands that fill one folder: who trains which runs, and who is still searching.

A lock ends with its process. On a file system without locks, no command waits for another.
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
    """Locks this part of the folder. Two commands must not train the same part, or parts of different divisions."""
    of = f"-of-{part[1]}.lock"
    with (folder / f".part-{part[0]}{of}").open("w") as file:
        others = [path for path in folder.glob(".part-*-of-*.lock") if not path.name.endswith(of)]
        # A shared lock, so that two commands that check at the same time do not take each other for the owner.
        if not _lock(file) or any(_is_held(path, fcntl.LOCK_SH) for path in others):
            raise InputError(
                f"{folder} is in use by another sweep; wait for it, or divide the runs with --part K/N and the same N "
                "in all commands"
            )
        yield


def _lock(file: IO[str], kind: int = fcntl.LOCK_EX) -> bool:
    """Returns False if another process has the lock."""
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
    """Marks this command as searching while it has runs of its own part to train, for which other commands may wait."""
    with (folder / SEARCH_LOCK).open("a") as file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_SH)
        try:
            yield
        finally:
            with contextlib.suppress(OSError):
                fcntl.flock(file, fcntl.LOCK_UN)  # closing alone would leave it to forked processes


def others_search(folder: Path) -> bool:
    """Whether another command is `searching`. This command must have left its own `searching`."""
    return _is_held(folder / SEARCH_LOCK)


@contextlib.contextmanager
def claimed(folder: Path, digest: str) -> Iterator[bool]:
    """Whether this command may train a run that all commands may train. Meanwhile it locks the run's byte of a file."""
    with (folder / CLAIMS).open("a") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(digest, 16))
            free = True
        except (BlockingIOError, PermissionError):
            free = False
        except OSError:
            free = True
        yield free
