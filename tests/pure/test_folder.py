"""Who may write into a run's folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hyperbatch.engine.folder import HELD, SWEEP_ROWS, claimed
from hyperbatch.errors import InputError

HOLD = """
import sys, time
from pathlib import Path
from hyperbatch.engine.folder import claimed
with claimed(Path(sys.argv[1]), resume="no"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_that_another_process_holds_is_refused_until_that_is_gone(tmp_path):
    out = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", HOLD, out], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout is not None
            assert other.stdout.readline() == "held\n"
            with pytest.raises(InputError, match="is in use by another run"), claimed(out, resume="yes"):
                pass
        finally:
            os.kill(other.pid, signal.SIGKILL)
    with claimed(out, resume="yes"):  # nothing has to be cleaned up
        pass


def test_ranks_share_what_the_command_holds_and_let_go_with_it(tmp_path):
    out, elsewhere = tmp_path / "run", tmp_path / "elsewhere"
    with claimed(out, resume="no"):
        with claimed(out, resume="no"):  # as rank 0 does, in a process that inherits the environment
            assert os.environ[HELD] == str(out)
        with claimed(elsewhere, resume="no"):  # a run inside a run
            assert os.environ[HELD] == str(elsewhere)
        assert os.environ[HELD] == str(out)
    assert HELD not in os.environ
    with claimed(out, resume="no"):
        pass


def test_a_run_that_is_refused_keeps_nothing(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "step-1.pt").touch()
    with pytest.raises(InputError, match="already holds a run"), claimed(tmp_path, resume="no"):
        pass
    assert HELD not in os.environ
    with claimed(tmp_path, resume="yes"):
        pass


def test_the_folder_of_a_sweep_keeps_its_report(tmp_path):
    (tmp_path / SWEEP_ROWS).touch()
    with (
        pytest.raises(InputError, match="holds a sweep, whose report would be replaced"),
        claimed(tmp_path, resume="no"),
    ):
        pass


def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise OSError("no locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with claimed(tmp_path / "run", resume="no"):
        assert os.environ[HELD] == str(tmp_path / "run")


@pytest.mark.parametrize("left", ["record.json", "checkpoints/step-00000001.pt", None])
def test_input_that_is_refused_later_removes_no_run(tmp_path, left):
    """A folder in which training had begun stays; one that only holds what setting up left there goes."""
    out = tmp_path / "run"

    def begins():
        with claimed(out, resume=False):
            (out / "checkpoints").mkdir()
            (out / "metrics.jsonl").touch()
            if left:
                (out / left).touch()
            raise InputError("refused")

    with pytest.raises(InputError, match="refused"):
        begins()
    assert out.exists() == (left is not None)
