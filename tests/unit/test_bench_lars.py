"""The shared bench machinery, and the lars and muon verbs end to end on the CPU. No timing decides anything here."""

from __future__ import annotations

import json

import pytest

from hyperbatch.bench import harness
from hyperbatch.bench.harness import Candidate
from hyperbatch.bench.lars import bench_lars
from hyperbatch.bench.muon import bench_muon
from hyperbatch.errors import InputError


def test_rounds_are_interleaved_and_rotate():
    calls = []
    candidates = [Candidate(name=name, run=lambda name=name: calls.append(name)) for name in "abc"]

    def measure(run):
        run()
        return float(len(calls))

    samples = harness.interleave(candidates, measure, rounds=3, warmup=1)
    assert "".join(calls) == "abc" + "abc" + "bca" + "cab"
    assert {name: len(values) for name, values in samples.items()} == {"a": 3, "b": 3, "c": 3}


@pytest.mark.parametrize(("higher", "ratio"), [(False, 0.5), (True, 0.2)])
def test_rows_hold_order_statistics_and_the_ratio_to_the_best_peer(higher, ratio):
    names = [Candidate(name="ours", run=print), *(Candidate(name=n, run=print, peer=True) for n in ("near", "far"))]
    samples = {"ours": [3.0, 1.0, 2.0, 0.0, 4.0], "near": [4.0], "far": [10.0]}
    ours, near, far = harness.rows(names, samples, unit="ms", scale=1e3, higher_is_better=higher)
    assert (ours["median"], ours["p20"], ours["p80"]) == pytest.approx((2000, 800, 3200))
    assert ours["ratio_to_best_peer"] == pytest.approx(ratio)
    assert (far if higher else near)["ratio_to_best_peer"] == 1.0
    assert harness.rows(names[:1], samples, unit="ms")[0]["ratio_to_best_peer"] is None


def test_the_verb_gives_the_promised_shape():
    result = json.loads(json.dumps(bench_lars(("thousand",), ("fp32",), device="cpu", rounds=1)))
    assert result["bench"] == "lars"
    assert result["versions"]["torch"]
    assert {"device", "commit"} <= set(result)
    names = [row["name"] for row in result["rows"]]
    assert "thousand / hyperbatch arena float32 / eager" in names
    assert "thousand / peer foreach LARS / eager" in names
    for row in result["rows"]:
        assert {"name", "median", "p20", "p80", "unit", "ratio_to_best_peer"} <= set(row)
        assert row["median"] > 0
    assert "thousand / hyperbatch float32 / eager" in harness.format_table(result)


def test_muon_is_timed_beside_torchs():
    result = bench_muon(("resnet8",), ("fp32",), device="cpu", rounds=1)
    names = [row["name"] for row in result["rows"]]
    assert "resnet8 / hyperbatch Muon arena float32, 3 iterations / eager" in names
    assert "resnet8 / peer torch.optim.Muon and fused SGD / eager" in names
    assert all(row["median"] > 0 for row in result["rows"])


def test_an_unknown_model_is_named():
    with pytest.raises(InputError, match="unknown model 'vgg'"):
        bench_lars(("vgg",))
