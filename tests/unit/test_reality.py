"""The comparison with an emulated cluster: what it predicts and how it judges, without the cluster."""

from __future__ import annotations

import pytest

from benchmarks.reality import BEST, Settings, format_reality, predict, recording, summary
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.machine import Link, Network

SETTINGS = Settings(model="resnet8", backward_s=0.5)
NETWORK = Network(
    devices_per_node=2,
    nics_per_node=2,
    intra=Link(bandwidth_bytes_per_s=150e6, latency_s=1e-3),
    inter=Link(bandwidth_bytes_per_s=1e6, latency_s=2e-3),
    flat_algorithms=("ring",),
    flat_uses_all_nics=False,
)


def test_every_algorithm_with_every_grouping_is_predicted_and_optimal_is_least() -> None:
    cases = predict(NETWORK, SETTINGS)
    assert len({case.name for case in cases}) == len(cases) == 4 * 6 + 1
    least = {case.algorithm: case.timing.exposed_comm_s for case in cases if case.strategy == "optimal"}
    for case in cases:
        case.plan.check_covers(tensors("resnet8"))
        assert case.timing.backward_s == pytest.approx(0.5)
        assert case.timing.forward_s == case.timing.update_s == 0
        assert least[BEST] <= least[case.algorithm] <= case.timing.exposed_comm_s + 1e-12
    assert sum(layer.backward_s for layer in recording(SETTINGS)) == pytest.approx(0.5)


def test_how_a_table_is_judged() -> None:
    def row(strategy: str, predicted_s: float, measured_s: float) -> dict[str, object]:
        return {
            "algorithm": "flat",
            "strategy": strategy,
            "groups": 1,
            "predicted_step_s": 1 + predicted_s,
            "step_s": 1 + measured_s,
            "step_error": (1 + predicted_s) / (1 + measured_s) - 1,
            "predicted_exposed_s": predicted_s,
            "exposed_s": measured_s,
        }

    rows = [row("optimal", 1.0, 1.05), row("cubic", 1.2, 1.0), row("single", 3.0, 4.0)]
    found = summary(rows)
    assert (found["steps"], found["within_15_percent"]) == (3, 2)
    assert found["worst_error"] == pytest.approx(0.2)
    assert (found["pairs"], found["pairs_ordered_as_predicted"]) == (3, 2), "optimal and cubic changed places"
    assert found["optimal_exposed"]["flat"]["best_other_s"] == 1.0
    assert "ordered as predicted: 2 of 3" in format_reality(
        {"rows": rows, "summary": found, "load": {"before": 0.5, "after": 1.0}}
    )
