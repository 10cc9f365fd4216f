"""Trace and pictures of a prediction: well-formed, and saying what the numbers say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks import pictures, validate
from hyperbatch import cli
from hyperbatch.config import BatchPhase, Config, OptimConfig, ScheduleConfig
from hyperbatch.errors import InputError
from hyperbatch.plan.planner import make_plan
from hyperbatch.plan.types import StepTiming
from hyperbatch.record import write_trace
from hyperbatch.report.chart import HEIGHT, WIDTH, Band, log_ticks
from hyperbatch.report.picture import (
    charts_picture,
    line_chart,
    plan_picture,
    sweep_charts,
    timeline_picture,
    write_picture,
)
from hyperbatch.sim.sweep import simulate

CONFIG = Config(
    recipe="test",
    optim=OptimConfig(precision="fp16"),
    schedule=ScheduleConfig(batch_phases=(BatchPhase(0, 86_016),)),
)
STEPS = {name: make_plan(CONFIG, cluster="abci", gpus=2048, strategy=name).step.timing for name in ("equal", "optimal")}


def elements(picture: str, tag: str) -> list[xml.Element]:
    return [element for element in xml.fromstring(picture).iter() if element.tag.endswith(f"}}{tag}")]


def test_a_timing_comes_back_from_its_own_values() -> None:
    timing = STEPS["optimal"]
    assert StepTiming.from_dict(json.loads(json.dumps(timing.to_dict()))) == timing
    assert timing.parts()[-1][2] == pytest.approx(timing.step_s)
    assert [name for name, _, _ in timing.parts()] == ["forward", "backward", "exposed_comm", "update"]


def test_trace_covers_the_step_and_every_group(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.json", STEPS)
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in written} == {1, 2}
    assert [event["args"]["name"] for event in written if event["name"] == "process_name"] == list(STEPS)
    slices = [event for event in written if event["ph"] == "X" and event["pid"] == 2]
    compute = [event for event in slices if event["tid"] == 0]
    timing = STEPS["optimal"]
    assert sum(event["dur"] for event in compute) == pytest.approx(timing.step_s * 1e6, abs=0.1 * len(compute))
    for before, after in pairwise(compute):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"], abs=0.11)  # microseconds, to one digit
    groups = [event for event in slices if event["tid"] == 1]
    assert [event["args"]["bytes"] for event in groups] == [group.bytes for group in timing.groups]
    assert groups[-1]["ts"] + groups[-1]["dur"] == pytest.approx(timing.groups[-1].end_s * 1e6, abs=0.11)
    with pytest.raises(InputError, match="cannot be written"):
        write_trace(tmp_path / "nowhere" / "trace.json", STEPS)
    with pytest.raises(InputError, match="give titles and StepTimings"):
        write_trace(tmp_path / "trace.json", timing)  # pyright: ignore[reportArgumentType]


def test_the_time_lines_have_a_bar_for_each_group() -> None:
    picture = timeline_picture(STEPS)
    titles = [element.text or "" for element in elements(picture, "title")]
    assert sum(title.startswith("group") for title in titles) == sum(len(step.groups) for step in STEPS.values())
    assert sum(title.startswith("backward: ") for title in titles) == 2
    words = [element.text or "" for element in elements(picture, "text")]
    assert any(word.startswith("equal: exposed communication ") for word in words)


@pytest.mark.parametrize("log_y", [False, True])
def test_a_chart_draws_every_line_inside_its_frame(log_y: bool) -> None:
    series = {"a": [(8.0, 1.0), (64.0, 0.5)], "b": [(8.0, 0.9), (64.0, 0.4)]}
    picture = charts_picture(line_chart("t", "x", series, log_y=log_y))
    curves = [path for path in elements(picture, "path") if path.attrib["class"] == "curve"]
    assert len(curves) == 2
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in elements(picture, "circle")]
    assert len(dots) == 4
    assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in dots)
    assert dots[0][1] < dots[2][1] < dots[1][1] < dots[3][1], "a larger value lies higher"


@pytest.mark.parametrize(("low", "high"), [(3.0, 4.0), (0.5, 0.5), (12.0, 90_000.0), (1.0, 10.0)])
def test_logarithmic_ticks_cover_the_range(low: float, high: float) -> None:
    found = log_ticks(low, high)
    assert found[0] <= low
    assert found[-1] >= high
    assert len(found) >= 2
    assert found == sorted(set(found))


def test_a_logarithmic_axis_is_said_and_has_round_numbers() -> None:
    series = {"a": [(0.31, 3.0), (17.2, 40_000.0)]}
    picture = charts_picture(line_chart("t", "s", series, log_y=True))
    words = [element.text or "" for element in elements(picture, "text")]
    assert "Logarithmic x and y axes." in words
    assert [word for word in words if word[0].isdigit()] == [
        *("10", "100", "1000", "1e+04"),
        *("0.2", "0.5", "1", "2", "5", "10", "20 s"),
    ]


def test_an_axis_of_counts_has_those_that_occur() -> None:
    series = {"a": [(8.0, 1.0), (96.0, 2.0), (384.0, 3.0)]}
    words = [element.text or "" for element in elements(charts_picture(line_chart("t", "GPUs", series)), "text")]
    assert words[-3:] == ["8", "96", "384 GPUs"]


def test_a_band_lies_around_its_curve() -> None:
    chart = line_chart("t", "x", {"a": [(1.0, 2.0), (10.0, 3.0)]})
    chart.bands.append(Band(color=0, x=chart.lines[0].x, low=[1.0, 2.5], high=[4.0, 5.0]))
    [band] = [path for path in elements(charts_picture(chart), "path") if path.attrib["class"] == "band"]
    corners = [tuple(map(float, corner.split())) for corner in band.attrib["d"][1:-1].split("L")]
    dots = [(float(dot.attrib["cx"]), float(dot.attrib["cy"])) for dot in elements(charts_picture(chart), "circle")]
    (left, right), (above, above_right, below_right, below) = dots, corners
    assert above[0] == below[0] == left[0]
    assert above[1] < left[1] < below[1]
    assert above_right[1] < right[1] < below_right[1]


def test_a_plan_is_drawn_beside_its_alternatives() -> None:
    plan = make_plan(CONFIG, cluster="abci", gpus=2048)
    picture = plan_picture(plan)
    words = [element.text or "" for element in elements(picture, "text")]
    assert words[0].startswith("One step of test on 2,048 GPUs of abci: ")
    assert {"The step by grouping, shortest first", "The step by all-reduce, shortest first"} <= set(words)
    assert set(plan.strategies) | set(plan.algorithms) <= set(words)
    titles = [element.text or "" for element in elements(picture, "title")]
    assert any(title.startswith("single, exposed communication: ") for title in titles)


@pytest.mark.parametrize("sizes", [[8], [8, 64, 512]])
def test_a_sweep_is_four_charts(sizes: list[int], tmp_path: Path) -> None:
    values = simulate(CONFIG, cluster="cloud_h200_efa", gpus=sizes, batch_per_rank=32).to_dict()
    charts = sweep_charts(values)
    assert len(charts) == 4
    picture = charts_picture(*charts)
    assert len(elements(picture, "clipPath")) == 4
    drawn = [path.attrib["class"] for path in elements(picture, "path")]
    assert drawn.count("curve") == 5
    assert drawn.count("band") == 1
    words = [element.text or "" for element in elements(picture, "text")]
    assert any(word.startswith("Time to target, in ") for word in words)
    assert "Cost against time to target" in words
    assert sum("test on cloud_h200_efa." in word for word in words) == 4, "each panel says what it shows"
    assert words[-len(sizes) :] == [*map(str, sizes[:-1]), f"{sizes[-1]} GPUs"], (
        "on the cost curve, as the cluster grows"
    )
    with pytest.raises(InputError, match="cannot be written"):
        write_picture(tmp_path / "nowhere" / "sweep.svg", picture)


@pytest.mark.parametrize(
    ("arguments", "file"),
    [
        (["simulate", "--cluster", "abci", "--gpus", "512,1024", "--plot"], "sweep.svg"),
        (["plan", "--cluster", "abci", "--gpus", "512", "--plot"], "step.svg"),
        (["plan", "--cluster", "abci", "--gpus", "512", "--trace"], "trace.json"),
    ],
)
def test_the_command_writes_what_it_is_asked_for(arguments, file, tmp_path, capsys) -> None:
    assert cli.main([*arguments, str(tmp_path / file)]) == 0
    text = (tmp_path / file).read_text()
    assert json.loads(text)["traceEvents"] if file.endswith("json") else elements(text, "text")
    assert cli.main([*arguments, str(tmp_path / "nowhere" / file)]) == 2
    assert "cannot be written" in capsys.readouterr().err


@pytest.mark.parametrize("module", [pictures, validate])
def test_asking_for_help_writes_nothing(module, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["module", "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
