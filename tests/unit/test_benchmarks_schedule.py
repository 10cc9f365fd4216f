"""`benchmarks.schedule` adds up what the engine took: a tiny schedule for real, the sums on moments that are given."""

from __future__ import annotations

import json

import pytest

from benchmarks.schedule import add_up, exposed_comm_s, main, measure, sliced, span_rows
from hyperbatch.config import BatchPhase
from hyperbatch.errors import InputError
from hyperbatch.recipes import find_recipe, get_recipe
from hyperbatch.schedule import SizeSpan, resolve_phases, size_spans, steps

FAST = find_recipe("resnet50_fast").config()


def test_slices_have_as_many_steps_of_every_size():
    config = sliced(FAST, 9_469, 256, 10)
    phases = resolve_phases(config.schedule.batch_phases, 9_469, 1)
    seen = [
        next(span.image_size for span in size_spans(config) if span.from_epoch <= step.epoch + 1e-9 < span.to_epoch)
        for step in steps(phases, 9_469, config.schedule.epochs)
    ]
    assert seen == [size for size in (88, 112, 128, 144, 160, 176) for _ in range(10)]
    assert (config.model, config.optim) == (FAST.model, FAST.optim), "what is computed is the recipe's"


def test_the_sum_is_that_of_steady_steps_and_switches():
    """Steps of 1 s at 8 px and 2 s at 16 px; the first of each takes 3 s and 5 s longer."""
    spans = [SizeSpan(0, 3, 8), SizeSpan(3, 4, 16)]
    ends, now = [], 0.0
    for step_s, extra in ((1.0, 3.0), (2.0, 5.0)):
        for i in range(8):
            now += step_s + (extra if i == 0 else 0.0)
            ends.append(now)
    rows = span_rows(spans, ends, [0.25] * 16, 10)
    assert [row["step_s"] for row in rows] == pytest.approx([1.0, 2.0])
    assert [row["switch_s"] for row in rows] == pytest.approx([3.0, 5.0])
    assert [row["data_wait_fraction"] for row in rows] == pytest.approx([0.25, 0.125])
    total = add_up(rows, images=1_000, batch=10, gpus=2, exposed_s=[0.5, 0.0])
    assert total == pytest.approx(3 * 50 * 1.5 + 3 + 1 * 50 * 2.0 + 5)


def test_exchange_is_simulated_for_several_gpus_alone():
    assert exposed_comm_s(FAST, 1) == [0.0] * 6
    few, many = exposed_comm_s(FAST, 8), exposed_comm_s(FAST, 64)
    assert len(few) == 6
    assert all(0 <= a <= b for a, b in zip(few, many, strict=True))
    assert many[0] > 0, "a rank's 32 small images do not hide 51 MB"


def test_a_tiny_schedule_through_the_engine(capsys):
    sets = ["batch_phases=0:64", "size_phases=0:4,10:8", "device=cpu"]
    main(["digits", "--steps", "4", "--images", "1433", "--json", *(word for s in sets for word in ("--set", s))])
    report = json.loads(capsys.readouterr().out)
    assert [(row["image_size"], row["epochs"]) for row in report["rows"]] == [(4, 10.0), (8, 10.0)]
    assert report["measured"] == "all"
    assert report["full_size_epochs"] == pytest.approx((10 * 4**2 + 10 * 8**2) / 224**2)
    parts = [row["epochs"] * 1433 / 64 * row["step_s"] + row["switch_s"] for row in report["rows"]]
    assert report["train_s"] == pytest.approx(sum(parts))
    assert report["eval_s_each"] > 0


@pytest.mark.parametrize(
    ("values", "options", "words"),
    [
        ({}, {}, "changes its batch, too"),
        ({"batch_phases": "0:64"}, {"steps": 2}, "--steps 2: give at least 4"),
        ({"batch_phases": "0:64"}, {"gpus": 3}, "--gpus 3: the batch of 64 does not divide"),
    ],
)
def test_what_cannot_be_measured(values, options, words):
    given = {"batch_phases": (BatchPhase(0, 64),)} if values else {}
    with pytest.raises(InputError, match=words):
        measure(get_recipe("digits", **given), **options)
