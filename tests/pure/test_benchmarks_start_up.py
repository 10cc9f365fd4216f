"""The table of a start: stages follow from the main thread's stack, and name functions that exist."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.start_up import OPENING, STAGES, TORCH, since_start_s, stage_of, table

ROOT = Path(__file__).parents[2] / "hyperbatch"
BEFORE = ["<frozen runpy>:_run_code", "__init__.py:main", "launch.py:_train_as"]
IMPORT = "<frozen importlib._bootstrap>:_find_and_load"


@pytest.mark.parametrize(
    ("stack", "stage"),
    [
        ([], OPENING),
        ([IMPORT, "loop.py:<module>", IMPORT, "__init__.py:<module>", IMPORT, "graph.py:<module>"], TORCH),
        ([IMPORT, "loop.py:<module>", IMPORT, "snapshot.py:<module>"], "the engine's modules are imported"),
        (["loop.py:run", "run.py:build_run", "learner.py:build_learner"], "the model is built"),
        (["learner.py:build_learner", "measure.py:probe"], "the order of backward is found, cuDNN loaded"),
        (["loop.py:train", "loop.py:train_strides", "saver.py:save"], "the last checkpoint is written"),
        (
            ["warmup.py:compile_kernels", "contextlib.py:__enter__", "compile.py:_wait_for_preparation"],
            "waiting until Triton is prepared",
        ),
    ],
)
def test_a_stage_is_the_innermost_that_is_known(stack, stage):
    assert stage_of([*BEFORE, *stack]) == stage


def test_a_sample_stands_for_the_time_since_the_one_before():
    build, other = ["learner.py:build_learner"], ["ranks.py:join"]
    rows = table([(0.5, []), (0.75, other), (1.0, build), (1.25, other), (2.0, build)])
    assert rows == [
        (OPENING, 0.0, 0.5),
        ("the GPU's context is opened", 0.5, 0.5),
        ("the model is built", 0.75, 1.0),
    ]


def test_the_functions_that_stages_are_known_by_exist():
    of_others = {"thread.py:shutdown", "cache.py:triton_key", "loop.py:<module>"}
    for mark in {mark for _, marks in STAGES for mark in marks} - of_others:
        file, function = mark.split(":")
        assert any(f"def {function}(" in path.read_text() for path in ROOT.rglob(file)), mark


def test_seconds_count_from_the_start_of_the_process():
    assert 0 < since_start_s() < 86_400
