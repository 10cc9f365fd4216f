"""README and docs/python.md: their commands and their Python are read from the page and run."""

from __future__ import annotations

import re
import shlex

import pages
import pytest
import torch

import hyperbatch
from hyperbatch.cli.parser import parse
from hyperbatch.record import RunRecord

README = pages.ROOT / "README.md"
PYTHON = pages.ROOT / "docs" / "python.md"
WITH_COMMANDS = sorted([README, *(pages.ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize("page", WITH_COMMANDS, ids=lambda page: page.name)
def test_the_command_line_knows_every_command(page):
    """Those that need data or a cluster, too."""
    for command in pages.commands(page):
        ours = re.search(r"(?:^|\s)hyperbatch (.*?)(?: > .*)?$", command)
        if ours and not command.startswith("pip"):
            parse([{"N": "8"}.get(word, word) for word in shlex.split(ours[1]) if not word.startswith("$")])


@pytest.mark.slow
def test_the_commands_of_the_readme(tmp_path):
    trained, exported, recipes, simulation, plan, doctor = pages.run(README, tmp_path)
    assert trained.startswith("digits reached 99 % top-1 in ")
    shown = next(block for block in pages.blocks(README, "") if "digits reached" in block)
    assert labels(shown) == labels(trained), "the page shows what a run prints"
    assert RunRecord.load(tmp_path / "runs" / "first").result.reached
    assert (tmp_path / "runs" / "first" / "model.safetensors").exists()
    assert "model.safetensors" in exported
    assert "fujitsu_resnet50" in recipes
    assert "2,048" in simulation
    assert "h200x8" in plan
    assert "torus" in doctor


def labels(summary):
    return re.findall(r"^  (\w+) ", summary, re.MULTILINE)


def test_the_python_of_the_readme():
    values = {"model": torch.nn.Sequential(torch.nn.Linear(4, 3))}
    for block in pages.blocks(README, "python"):
        exec(block, values)
    assert isinstance(values["optimizer"], hyperbatch.LARS)


@pytest.mark.slow
def test_the_python_page(tmp_path, monkeypatch, capsys):
    """Its commands, its config file and its Python, in the order of the page."""
    # Without wandb; the tests of the trackers run it where it is installed.
    leave_out = [command for command in pages.commands(PYTHON) if "--tracker wandb" in command]
    answers = pages.run(PYTHON, tmp_path, leave_out=leave_out)
    saved, trained, preview, finished, longer = answers
    assert "digits.toml" in saved
    assert re.search(r"(?m)^label_smoothing +0\.2$", preview)
    assert finished.splitlines()[0] == trained.splitlines()[0], "a finished run returns its record"
    assert re.search(r"trained +8\.\d+ epochs", longer)
    assert RunRecord.load(tmp_path / "runs" / "five").config["schedule"]["epochs"] == 8
    monkeypatch.chdir(tmp_path)
    (toml,) = pages.blocks(PYTHON, "toml")
    (tmp_path / "mine.toml").write_text(toml)
    assert hyperbatch.load_config("mine.toml").global_batch == 128
    values = {}
    exec("\n".join(pages.blocks(PYTHON, "python")), values)
    assert values["best"] > 0.8
    assert "the best so far" in capsys.readouterr().out
