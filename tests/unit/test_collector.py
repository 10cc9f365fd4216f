"""What a run asks of Python's garbage collector holds until the run is over."""

from __future__ import annotations

import gc
import sys

import pytest

import hyperbatch.engine.loop  # noqa: F401  # or it would load torch once more below
from hyperbatch import launch


@pytest.fixture
def nothing_frozen():
    gc.unfreeze()
    yield
    gc.unfreeze()


@pytest.mark.usefixtures("nothing_frozen")
def test_what_was_there_before_a_run_is_collected_again_behind_it(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    with launch._torch_loaded():
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


@pytest.mark.usefixtures("nothing_frozen")
def test_what_the_caller_has_frozen_stays_so(monkeypatch):
    monkeypatch.delitem(sys.modules, "torch")
    gc.freeze()
    before = gc.get_freeze_count()
    with launch._torch_loaded():
        assert gc.get_freeze_count() >= before
    assert gc.get_freeze_count() >= before


@pytest.mark.usefixtures("nothing_frozen")
def test_a_program_that_has_loaded_torch_keeps_its_settings():
    with launch._torch_loaded():
        assert gc.get_freeze_count() == 0
