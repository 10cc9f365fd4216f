"""The folder of a command and its ranks, and those that killed commands have left."""

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
