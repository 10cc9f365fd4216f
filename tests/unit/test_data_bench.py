"""`bench data` gives the rows it promises; the figures themselves are no test's business."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from hyperbatch.bench.data import bench_data


def test_bench_data_rows():
    report = bench_data(images=8, width=64, height=48, image_size=32, batch=4, threads=1, rounds=2, device="cpu")
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
