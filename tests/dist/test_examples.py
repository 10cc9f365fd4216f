"""The examples do what their first lines say."""

import json
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

from hyperbatch import load_config
from hyperbatch.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop_reaches_a_good_accuracy(capsys):
    main = runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"]
    assert main(epochs=8) > 0.95
    assert "trust ratios" in capsys.readouterr().out


def test_own_model_and_data_through_the_command(tmp_path):
    words = [sys.executable, "-m", "hyperbatch", "train", "own_model_and_data:recipe", "--json", "--device", "cpu"]
    words += ["--out", str(tmp_path / "run")]
    done = subprocess.run(words, cwd=EXAMPLES, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["result"]["reached"]


def test_the_notebook_style_example_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    values = runpy.run_path(str(EXAMPLES / "from_python.py"))
    assert values["record"].result.top1 > 0.9
    assert len(values["curve"].losses) == values["record"].result.steps
    assert "top-1" in capsys.readouterr().out


def test_the_python_page_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """Its commands, its config file and its Python, in the order of the page."""
    page = (EXAMPLES.parent / "docs" / "python.md").read_text()
    monkeypatch.chdir(tmp_path)
    shell, toml, python = (
        "\n".join(re.findall(rf"```{kind}\n(.*?)```", page, re.DOTALL)[:count])
        for kind, count in (("sh", 1), ("toml", 1), ("python", None))
    )
    smoothing = []
    for line in shell.splitlines():
        words = shlex.split(line, comments=True)
        more = [] if "--save-config" in words else ["--dry-run", "--json"]
        assert main([*words[1:], *more]) == 0, line
        out = capsys.readouterr().out
        smoothing += [json.loads(out)["config"]["optim"]["label_smoothing"]] if more else []
    assert smoothing == [0.1, 0.2]
    (tmp_path / "mine.toml").write_text(toml)
    assert load_config(tmp_path / "mine.toml").global_batch == 128
    values = {}
    exec(python, values)
    assert values["best"] > 0.8
    assert "the best so far" in capsys.readouterr().out
