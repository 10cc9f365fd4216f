"""`benchmarks.loader_times` on a CPU: cores decode in nvJPEG's place. The figures themselves are no test's business."""

import json

import numpy as np
import pytest
import torch

from benchmarks import loader_probe, loader_times
from benchmarks.loader_marks import InParts
from hyperbatch.bench import step_data
from hyperbatch.bench.data import write_jpegs
from hyperbatch.config import DataConfig, OptimConfig
from hyperbatch.data.source import open_data
from hyperbatch.engine import loop
from hyperbatch.optim.build import build_optimizer
from hyperbatch.optim.rates import RateTable

CPU = torch.device("cpu")
TINY = ("--device", "cpu", "--model", "resnet8", "--image-size", "8", "--steps", "20")


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("jpegs") / "set"
    write_jpegs(folder, 5, 40, 30)
    source, _ = open_data(DataConfig(data=str(folder)))
    return loader_probe.files_of(source, 5)


def test_every_question_is_answered(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(step_data, "GENERATED_SIZE", (64, 48))
    train_stride = loop.train_stride
    loader_times.main([str(tmp_path / "out.json"), *TINY, "--shares", "1.0"])
    assert loop.train_stride is train_stride
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["failed"] == {}
    assert report["left_out"] == []
    assert report["queued"] == {"left_out": "no decoding units"}
    forms = ("files to weights", "shards of 256 px to weights")
    variants = [("default (0.0)", forms), ("rates first", forms[:1])]
    variants += [("share 1.0", forms), ("rates aside", forms[:1]), ("in parts of 40", forms[:1])]
    names = [f"{form}, {name}" for name, asked in variants for form in asked]
    names += [f"{forms[1]}, rates first", f"{forms[1]}, in parts of 40"]
    assert [row["name"] for row in report["rows"]] == ["synthetic, step alone", *names]
    for row in report["rows"]:
        assert row["mean"] > 0
        assert row["steps"] == 16, "a fifth of them is the start"
        assert len(row.get("part_ms", [0])) == 1
    for name in forms:
        found = report["breakdown"][name]
        assert found["batches"] == 15
        assert sum(found["step_thread_ms"].values()) == pytest.approx(found["period_ms"])
        assert found["device_thread_ms"]["decodes"] > 0
        assert found["gpu_ms"]["cut"] > 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "img/s", "of", "synthetic", "step", "ms", "data", "wait", "ms"]
    assert lines[1].startswith("synthetic, step alone")


def test_time_that_is_over_and_errors_cost_one_answer_each(tmp_path, capsys):
    clock = [100.0]
    answers = loader_times.Answers(tmp_path / "out.json", 60.0, now=lambda: clock[0])

    def takes(seconds, *rows):
        clock[0] += seconds
        answers.rows.extend(rows)

    def fails():
        raise RuntimeError("no such thing")

    answers.ask("built", lambda: takes(40, {"mean": 1.0}))
    answers.ask("broken", fails)
    answers.ask("in time", lambda: takes(5))
    answers.ask("at the end", lambda: takes(11))
    answers.ask("late", fails)
    answers.write()
    report = json.loads((tmp_path / "out.json").read_text())
    assert report["left_out"] == ["late"]
    assert report["failed"] == {"broken": "RuntimeError: no such thing"}
    assert report["rows"] == [{"mean": 1.0}]
    assert "... broken failed: no such thing" in capsys.readouterr().err


def test_files_in_parts_are_the_files(files):
    whole = loader_times.decode_on_cores(files, CPU)
    decode = InParts(loader_times.decode_on_cores, 2)
    parts = decode(files, CPU)
    assert len(decode.median_ms()) == 3
    assert np.array_equal(parts.images[:, 1:], whole.images[:, 1:])
    for i in range(5):
        assert torch.equal(parts.pixels(i), whole.pixels(i))


def test_rates_that_are_sent_aside_are_the_rates():
    tables = []
    for _ in range(2):
        model = torch.nn.Linear(3, 2)
        optimizer = build_optimizer(OptimConfig(), model, None, lr=0.1)
        optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
        tables.append(RateTable(optimizer, 3))
    plain, aside = tables
    rates = [(0.1, 0.5), (0.7, 1 / 3)]
    plain.write(rates)
    with loader_times.rates_aside(aside, CPU):
        aside.write(rates)
    assert "write" not in vars(aside)
    assert aside._rows == plain._rows
    assert plain._table is not None
    assert torch.equal(aside._table, plain._table)


def test_a_stream_is_held_up_where_decoding_outlasts_the_load():
    row = loader_probe.row_of("a copy", [[(3.0, 2.0), (2.5, 2.0)], [(3.0, 2.0), (1.0, 2.0)], [(1.0, 2.0)]])
    assert (row["held_up"], row["streams"]) == (1, 3)
    assert row["decode_ms"] == [2500, 1000, 1000]
    assert row["load_ms"] == 2000


@pytest.mark.parametrize("name", loader_probe.queued_behind(CPU))
def test_what_is_queued_comes_behind_the_load_and_before_decoding(name):
    events = []
    queued = loader_probe.queued_behind(CPU)[name]
    decode_s, load_s = loader_probe.decoded_beside(
        lambda: events.append("decode"), lambda: events.append("load"), lambda: (events.append("queued"), queued()), CPU
    )
    assert events == ["load", "queued", "decode"]
    assert decode_s > 0
    assert load_s > 0
