"""What a run on a GPU writes beside its metrics: trust ratios of replayed steps, memory, clock, and its trace."""

from __future__ import annotations

import json

import pytest
import torch
from test_graph_gpu import train

from hyperbatch.record import read_metrics
from hyperbatch.report import write_report

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


def layers(out):
    return [(line["step"], line["trust_ratios"]) for line in read_metrics(out, "layers.jsonl")]


def test_trust_ratios_over_time_are_those_of_plain_steps(tmp_path):
    plain, _ = train(tmp_path / "plain", graph="off")
    captured, _ = train(tmp_path / "captured", graph="on", steps_per_launch=1)
    assert layers(tmp_path / "captured") == layers(tmp_path / "plain")
    assert [step for step, _ in layers(tmp_path / "plain")] == list(range(1, 13))
    last = {name: float(f"{ratio:.4g}") for name, ratio in captured.trust_ratios.items()}
    assert layers(tmp_path / "captured")[-1][1] == last != {}
    assert plain.trust_ratios == captured.trust_ratios


def test_the_record_knows_the_device_and_the_trace_its_evaluations(tmp_path):
    record, _ = train(tmp_path)
    [rank] = record.ranks
    assert rank["device"] == torch.cuda.get_device_name()
    assert 0 < rank["memory_peak_bytes"] < rank["memory_bytes"]
    assert 0 < rank.get("clock_least_mhz", 1) <= rank.get("clock_mhz", 1)
    assert 0 <= rank.get("utilisation", 0) <= 1
    names = [event["name"] for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"]]
    assert {"evaluation", "checkpoint", "write"} <= set(names)
    assert "peak memory" in write_report([tmp_path]).read_text()
