"""`bench data` gives the rows it promises; the figures themselves are no test's business."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperbatch.bench import data, peers
from hyperbatch.bench.data import bench_data
from hyperbatch.cli import main
from hyperbatch.errors import InputError

TINY = {"images": 8, "width": 64, "height": 48, "image_size": 32, "batch": 4, "threads": 1, "device": "cpu"}


def test_bench_data_rows():
    report = bench_data(**TINY, rounds=2)
    assert report["bench"] == "data"
    names = [row["name"] for row in report["rows"]]
    assert "DataLoader, folder, Pillow" in names
    assert sum(name.startswith("hyperbatch, ") for name in names) >= 3
    assert {"hyperbatch, arrays, batches of 4", "torch, arrays, whole epochs"} <= set(names)
    for row in report["rows"]:
        assert row["unit"] == "img/s"
        assert 0 < row["p20"] <= row["median"] <= row["p80"]
        assert (row["ratio_to_best_peer"] == 1) == row["peer"]
    assert multiprocessing.active_children() == []


def test_bench_data_without_peers_says_each_sample_as_it_is_measured(capsys):
    report = bench_data(**TINY, rounds=1, peers=[])
    assert [row for row in report["rows"] if row["peer"] or row["ratio_to_best_peer"] is not None] == []
    lines = capsys.readouterr().err.splitlines()
    assert "  ... 8 JPEGs of 64x48 written" in lines
    for row in report["rows"]:
        assert f"  ... {row['name']}, round 1 of 1: {row['median']:,.0f} img/s" in lines
        assert sum(line.startswith(f"  ... {row['name']}, warm-up: ") for line in lines) == 1


@pytest.mark.parametrize(("flag", "asked"), [("none", []), ("arrays,dataloader", ["arrays", "dataloader"])])
def test_peers_of_bench_data_are_named_on_the_command_line(flag, asked, monkeypatch, capsys):
    found = {}
    monkeypatch.setattr(data, "bench_data", lambda **options: found.update(options) or {"bench": "data"})
    assert main(["bench", "data", "--peers", flag, "--json"]) == 0
    assert found == {"peers": asked}
    assert json.loads(capsys.readouterr().out) == {"bench": "data"}


def test_a_peer_that_cannot_be_had_is_refused(monkeypatch):
    monkeypatch.setattr(peers, "_has_dali", lambda: False)
    assert peers.check_names(None) == peers.NAMES
    with pytest.raises(
        InputError, match="unknown peer 'ffcv' of `bench data`; use some of dataloader, dali, arrays, or none"
    ):
        bench_data(**TINY, peers=["ffcv"])
    with pytest.raises(InputError, match="DALI is not installed"):
        bench_data(**TINY, peers=["dali"])


def test_ranks_that_open_a_large_index_share_it(tmp_path):
    script = Path(__file__).parents[2] / "benchmarks" / "many_samples.py"
    command = [sys.executable, str(script), str(tmp_path / "out.json"), "--samples", "700000", "--ranks", "2"]
    environment = {**os.environ, "PYTHONPATH": str(script.parents[1])}
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    rows = json.loads((tmp_path / "out.json").read_text())["rows"]["2 ranks at once"]
    index_mb, labels_mb = 28 * 0.7, 8 * 0.7
    for row in rows:
        assert row["opened"]["private"] - row["before"]["private"] < labels_mb + 0.3 * index_mb
        assert row["opened"]["rss"] - row["before"]["rss"] > index_mb
