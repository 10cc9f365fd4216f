"""`bench data` gives the rows it promises; the figures themselves are no test's business."""

import multiprocessing

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
