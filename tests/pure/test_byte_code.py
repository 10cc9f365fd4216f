"""Byte code is kept in our cache where torch has none and Python would keep none, and only there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperbatch.cli import byte_code

ROOT = Path(__file__).parents[2]
# A torch that takes no time. The verb is one that loads nothing else of it.
CODE = """
import sys
from hyperbatch import cli
def main():
    import torch
    return 0
cli.main = main
cli.command()
"""


@pytest.fixture
def start(tmp_path):
    """Starts a command that imports torch; returns the folders that it left byte code of torch in."""
    package = tmp_path / "packages" / "torch"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")

    def run(**variables: str) -> set[str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        env |= {"PYTHONPATH": f"{package.parent}:{ROOT}", "HYPERBATCH_CACHE": str(tmp_path / "cache"), **variables}
        done = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found = [path for path in tmp_path.rglob("*.pyc") if "torch" in path.parts]
        return {path.relative_to(tmp_path).parts[0] for path in found}

    return run


def test_python_keeps_its_own_beside_the_source(start):
    assert start() == {"packages"}
    assert start(PYTHONDONTWRITEBYTECODE="1") == {"packages"}, "what is there is used"


def test_it_is_kept_in_the_cache_where_python_may_not(start):
    assert start(PYTHONDONTWRITEBYTECODE="1") == {"cache"}
    assert start(PYTHONDONTWRITEBYTECODE="1") == {"cache"}


def test_a_folder_that_the_user_has_named_is_used(start, tmp_path):
    assert start(PYTHONDONTWRITEBYTECODE="1", PYTHONPYCACHEPREFIX=str(tmp_path / "own")) == {"own"}


def test_the_ranks_of_a_launcher_keep_none(start):
    assert start(PYTHONDONTWRITEBYTECODE="1", RANK="0", WORLD_SIZE="2") == set()


@pytest.mark.parametrize("writable", [True, False])
def test_a_folder_that_cannot_be_written_is_not_asked_to(monkeypatch, tmp_path, writable):
    class Spec:
        origin, cached = str(tmp_path / "torch" / "__init__.py"), str(tmp_path / "torch" / "none.pyc")

    monkeypatch.setattr(byte_code.importlib.util, "find_spec", lambda name: Spec)
    monkeypatch.setattr(byte_code.os, "access", lambda path, mode: writable)
    monkeypatch.setenv("HYPERBATCH_CACHE", str(tmp_path / "cache"))
    for name in ("PYTHONPYCACHEPREFIX", "PYTHONDONTWRITEBYTECODE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    byte_code.keep_byte_code()
    expected = None if writable else str(tmp_path / "cache" / "byte_code")
    assert sys.pycache_prefix == expected
    assert os.environ["PYTHONPYCACHEPREFIX"] == (expected or "")
