"""Trace and pictures of a prediction: well-formed, and saying what the numbers say."""

from __future__ import annotations

import json
import xml.etree.ElementTree as xml
from itertools import pairwise
from pathlib import Path

import pytest

from hyperbatch.config import BatchPhase, Config, OptimConfig, ScheduleConfig
from hyperbatch.errors import InputError
from hyperbatch.plan.planner import make_plan
from hyperbatch.sim import plots, validate
from hyperbatch.sim.plots import line_chart, sweep_svg, write_sweep
from hyperbatch.sim.sweep import simulate
from hyperbatch.sim.trace import overlap_svg, trace_events, write_trace

CONFIG = Config(
    recipe="test",
    optim=OptimConfig(precision="fp16"),
    schedule=ScheduleConfig(batch_phases=(BatchPhase(0, 86_016),)),
)
PLANS = [make_plan(CONFIG, cluster="abci", gpus=2048, strategy=name).to_dict() for name in ("equal", "optimal")]


def test_trace_covers_the_step_and_every_group(tmp_path: Path) -> None:
    events = trace_events(PLANS[1])
    slices = [event for event in events if event["ph"] == "X"]
    compute = [event for event in slices if event["tid"] == 0]
    assert sum(event["dur"] for event in compute) == pytest.approx(PLANS[1]["step_s"] * 1e6)
    for before, after in pairwise(compute):
        assert before["ts"] + before["dur"] == pytest.approx(after["ts"])
    assert len([event for event in slices if event["tid"] == 1]) == len(PLANS[1]["groups"])

    write_trace(str(tmp_path / "trace.json"), *PLANS)
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in written} == {0, 1}


def test_the_overlap_picture_has_a_bar_for_each_group() -> None:
    picture = xml.fromstring(overlap_svg(*PLANS))
    titles = [element.text or "" for element in picture.iter() if element.tag.endswith("title")]
    assert sum(title.startswith("group") for title in titles) == sum(len(plan["groups"]) for plan in PLANS)
    assert titles.count("backward") == 2


def test_a_chart_draws_every_line_inside_its_frame() -> None:
    picture = xml.fromstring(
        line_chart("t", "x", "y", {"a": [(8, 1.0), (64, 0.5)], "b": [(8, 0.9), (64, 0.4)]}, log_y=False)
    )
    lines = [element for element in picture.iter() if element.tag.endswith("polyline")]
    assert len(lines) == 2
    for line in lines:
        for pair in line.attrib["points"].split():
            x, y = map(float, pair.split(","))
            assert 0 <= x <= 560
            assert 0 <= y <= 320


@pytest.mark.parametrize("sizes", [[8], [8, 64, 512]])
def test_a_sweep_is_four_charts(sizes: list[int], tmp_path: Path) -> None:
    values = simulate(CONFIG, cluster="cloud_h200_efa", gpus=sizes, batch_per_rank=32).to_dict()
    picture = xml.fromstring(sweep_svg(values))
    assert len([child for child in picture if child.tag.endswith("svg")]) == 4
    assert len([element for element in picture.iter() if element.tag.endswith("polyline")]) == 7
    with pytest.raises(InputError, match="cannot be written"):
        write_sweep(tmp_path / "nowhere" / "sweep.svg", values)


@pytest.mark.parametrize("module", [plots, validate])
def test_asking_for_help_writes_nothing(module, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["module", "--help"])
    with pytest.raises(SystemExit) as left:
        module.main()
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
