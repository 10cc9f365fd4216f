"""The temporary folder through which a command and its ranks exchange a few kB.

A command that is killed cannot remove its folder. The folder's lock ends with the command, so the next command can
remove the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from hyperbatch.errors import RunFailed

PREFIX = "hyperbatch-run-"
MEMORY_FOLDER = "/dev/shm"
ROOM_BYTES = 1 << 18  # space for the messages of ranks that fail
UNLOCKED_S = 60.0  # a folder without a lock is considered abandoned after this time


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """A context with a temporary folder, which is in memory if no disk has space for it."""
    problem = ""
    with contextlib.ExitStack() as held:
        for parent in (None, MEMORY_FOLDER):
            try:
                parent = parent or tempfile.gettempdir()  # raises if all folders that it tries are full
                _remove_abandoned(Path(parent))
                folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix=PREFIX, dir=parent)))
                (folder / "room").write_bytes(bytes(ROOM_BYTES))
                (folder / "room").unlink()
                fcntl.flock(held.enter_context((folder / "new_lock").open("w")), fcntl.LOCK_EX)
                os.replace(folder / "new_lock", folder / "lock")  # so that no process finds it unlocked
                break
            except OSError as error:
                problem = problem or error.strerror or str(error)
        else:
            raise RunFailed(f"temporary files cannot be written: {problem}; set TMPDIR to a folder with free space")
        yield folder


def _remove_abandoned(parent: Path) -> None:
    """Removes the folders of this user's commands that have ended."""
    for folder in parent.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # in use, or just removed
            status = folder.lstat()
            if status.st_uid != os.getuid() or folder.is_symlink():
                continue
            lock = folder / "lock"
            if lock.exists():
                with lock.open("r") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder)
            elif time.time() - status.st_mtime > UNLOCKED_S:
                shutil.rmtree(folder)
