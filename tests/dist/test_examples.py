"""The examples do what their first lines say."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

from harness import run_ranks

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_own_loop_reaches_a_good_accuracy(capsys):
    main = runpy.run_path(str(EXAMPLES / "own_loop.py"))["main"]
    assert main(epochs=8) > 0.95
    assert "trust ratios" in capsys.readouterr().out


def train_sharded(rank, folder):
    os.environ["WORLD_SIZE"] = "2"
    return runpy.run_path(str(EXAMPLES / "fsdp.py"))["main"](out=str(folder), epochs=4)


def test_a_sharded_model_in_an_own_loop(tmp_path):
    accuracies = run_ranks(2, train_sharded, tmp_path / "saved", timeout_s=120)
    assert min(accuracies) > 0.9  # each rank has batch-norm statistics of its own
    assert (tmp_path / "saved" / ".metadata").exists()


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
