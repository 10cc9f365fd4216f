"""Which commands may lose lines of an output that goes to a file on a full disk: those that train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

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
