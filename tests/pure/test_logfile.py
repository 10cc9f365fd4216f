"""Output that goes to a file on a full disk: commands that train may lose lines of it, others fail in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperbatch.cli import main

ROOT = Path(__file__).parents[2]
CODE = """
import sys
from hyperbatch import cli, launch
from hyperbatch.cli import train
from hyperbatch.sweep import command

def tell(*args, **options):
    sys.exit(type(sys.stdout.buffer.raw).__name__)

launch.train = command.sweep = train.show = tell
cli.command()
"""


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["train"], "_Log"),
        (["sweep", "plan.toml", "--out", "sweep"], "_Log"),
        (["train", "--dry-run", "--json"], "FileIO"),
        (["recipes", "--json"], "FileIO"),
    ],
    ids=["train", "sweep", "dry run", "recipes"],
)
def test_only_commands_that_train_may_lose_output(tmp_path, arguments, file):
    words = [sys.executable, "-c", CODE, *arguments]
    with open(tmp_path / "out", "wb") as out:
        env = {"PYTHONPATH": str(ROOT), "HYPERBATCH_CACHE": str(tmp_path)}
        done = subprocess.run(words, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.PIPE, text=True, check=False)
    assert done.stderr.strip() == file


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is full")
def test_an_answer_that_cannot_be_written_is_an_error_of_one_line():
    words = [sys.executable, "-m", "hyperbatch", "recipes", "--json"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run(words, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    said = "hyperbatch: the output cannot be written: No space left on device; write it to a disk with free space\n"
    assert (done.returncode, done.stderr) == (1, said)


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_a_command_without_output_does_its_work(tmp_path, closed):
    """A file that it opens must not be given the number of stderr, and be printed into."""
    words = f"exec {sys.executable} -m hyperbatch train --save-config {tmp_path / 'run.toml'} {closed}"
    assert subprocess.run(["sh", "-c", words], cwd=ROOT, check=False).returncode == 0
    assert (tmp_path / "run.toml").read_text().startswith("recipe")


@pytest.mark.parametrize(("arguments", "code"), [(["recipes"], 0), (["recipes", "--nonsense"], 2)])
def test_a_reader_that_has_left_gets_no_complaint(arguments, code):
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "hyperbatch", *arguments]
    done = subprocess.run(words, cwd=ROOT, stdout=write, stderr=write if code else subprocess.PIPE, check=False)
    os.close(write)
    assert (done.returncode, done.stderr) == (code, None if code else b"")


def test_a_run_whose_reader_has_left_is_not_done(monkeypatch, capsys):
    def train(config):
        raise BrokenPipeError

    monkeypatch.setattr("hyperbatch.launch.train", train)
    assert main(["train"]) == 1
    assert capsys.readouterr().err.startswith("hyperbatch: the run has ended, because the pipe")


@pytest.mark.parametrize(
    ("encoding", "printed"), [("utf-8:strict", b"\xe9t\xe9, \xe9\x87\x91"), ("ascii:strict", rb"\udce9t\udce9, \u91d1")]
)
def test_any_name_of_a_class_can_be_printed(tmp_path, encoding, printed):
    """One that is not in UTF-8, as archives of old systems hold them, and one that the terminal does not know."""
    for split in (b"train", b"val"):
        for name in (b"\xe9t\xe9", "\u91d1".encode()):
            folder = os.path.join(os.fsencode(tmp_path), split, name)
            os.makedirs(folder)
            Path(os.fsdecode(folder), "1.jpg").touch()
    words = [sys.executable, "-m", "hyperbatch", "data", "info", str(tmp_path)]
    env = os.environ | {"PYTHONIOENCODING": encoding}
    done = subprocess.run(words, cwd=ROOT, env=env, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert {*printed.split(b", ")} <= {*done.stdout.splitlines()[0].partition(b": ")[2].split(b", ")}
