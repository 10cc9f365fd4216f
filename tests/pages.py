"""The code of documentation pages, read from them and run as a reader would."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).parents[1]
NOT_HERE = ("make", "pip", "torchrun", "srun")  # these need an installation or a cluster
NEXT = "--- the next command"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced code of one language ("" for plain text), in the order of the page."""
    found = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [code for name, code in found if name == language]


def commands(page: Path) -> list[str]:
    """Every command of the page's shell code, continued lines joined, without comments."""
    lines = "\n".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [command for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).rstrip())]


def words(command: str) -> list[str]:
    """The command's words without the variables that are set before it."""
    found = shlex.split(command)
    while found and re.match(r"\w+=", found[0]):
        del found[0]
    return found


def placeholders(command: str) -> set[str]:
    """Words in capitals that stand for something of the reader's."""
    return {word for word in words(command) if re.fullmatch(r"[A-Z]+\d*(?:[:/]\w+)?", word)}


def run(page: Path, folder: Path, *, leave_out: Collection[str] = ()) -> list[str]:
    """Runs the page's commands in the folder, one shell for all, and returns what each printed.

    Commands of NOT_HERE, those with placeholders or an address on the web, and those of `leave_out` are not run. A run
    that misses its target (exit code 3) is fine.
    """
    tool = folder / "bin" / "hyperbatch"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\n{sys.executable} -m hyperbatch "$@"\ncode=$?\n[ $code = 3 ] && exit 0\nexit $code\n')
    tool.chmod(0o755)
    script = []
    for command in commands(page):
        found = words(command)
        elsewhere = "://" in command or (found and found[0] in NOT_HERE)
        if not (command in leave_out or elsewhere or placeholders(command)):
            script += [command, f"echo {NEXT}"]
    environment = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        ["bash", "-ec", "\n".join(script)], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout.split(f"{NEXT}\n")[:-1]
