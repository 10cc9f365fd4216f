from __future__ import annotations

import os

import pytest

from hyperbatch import cores


@pytest.mark.parametrize(
    ("limit", "usable"),
    [(None, 8), ("max 100000\n", 8), ("250000 100000\n", 2), ("50000 100000\n", 1), ("9900000 100000\n", 8), ("", 8)],
)
def test_the_limit_of_a_container_counts(tmp_path, monkeypatch, limit, usable):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(8), raising=False)
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    if limit is not None:
        (tmp_path / "cpu.max").write_text(limit)
    assert cores.usable_cores() == usable


def test_a_system_that_knows_no_affinity_counts_what_it_has(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    monkeypatch.setattr(cores, "CPU_MAX", tmp_path / "cpu.max")
    assert cores.usable_cores() == 6
