"""The folder of a command and its ranks, and those that killed commands have left."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import tempfile

from hyperbatch.engine import scratch
from hyperbatch.engine.scratch import scratch_folder

HOLD = """
from hyperbatch.engine.scratch import scratch_folder
with scratch_folder() as folder:
    print(folder, flush=True)
    input()
"""


def test_a_folder_of_a_killed_command_goes_with_the_next_and_that_of_a_living_one_stays(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", HOLD]
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as living:
        assert living.stdout is not None
        stays = living.stdout.readline().strip()
        with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as killed:
            assert killed.stdout is not None
            left = killed.stdout.readline().strip()
            killed.send_signal(signal.SIGKILL)
        assert os.path.exists(left)
        with scratch_folder() as folder:
            assert {str(path) for path in tmp_path.iterdir()} == {stays, str(folder)}
        living.communicate("\n")
    assert not list(tmp_path.iterdir())


def test_folders_without_a_lock_are_left_for_a_minute_and_links_for_good(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    young, old, target = (tmp_path / name for name in (f"{scratch.PREFIX}a", f"{scratch.PREFIX}b", "target"))
    for folder in (young, old, target):
        folder.mkdir()
    link = tmp_path / f"{scratch.PREFIX}c"
    link.symlink_to(target)
    os.utime(old, (0, 0))
    os.utime(target, (0, 0))
    with scratch_folder():
        assert young.exists()
        assert not old.exists()
        assert link.is_symlink()
        assert target.exists()


def test_it_is_in_memory_where_no_folder_for_temporary_files_can_be_written(tmp_path, monkeypatch):
    def none_usable():
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none_usable)
    monkeypatch.setattr(scratch, "MEMORY_FOLDER", str(tmp_path))
    with scratch_folder() as folder:
        assert folder.parent == tmp_path
        assert [path.name for path in folder.iterdir()] == ["lock"]


def test_a_lock_is_held_when_others_find_it(tmp_path, monkeypatch):
    """Another command that looks at this moment must not take the folder for one that was left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    flock = fcntl.flock

    def look_first(file, how):
        if how == fcntl.LOCK_EX:
            scratch._remove_abandoned(tmp_path)
        flock(file, how)

    monkeypatch.setattr(scratch.fcntl, "flock", look_first)
    with scratch_folder() as folder:
        assert folder.exists()
        scratch._remove_abandoned(tmp_path)
        assert folder.exists()
