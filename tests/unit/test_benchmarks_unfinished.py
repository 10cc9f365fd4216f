"""`benchmarks.unfinished`: its queue names plans that exist, and runs what has time and data."""

from __future__ import annotations

import time

from benchmarks.unfinished import QUEUE, listing, main, read_queue, run_queue
from hyperbatch.sweep.rows import read_rows

PLAN = """
recipe = "digits"
seeds = 1
[fixed]
device = "cpu"
epochs = 0.25
warmup_epochs = 0
"""


def test_the_queue_names_plans_that_can_be_read(capsys):
    queue = read_queue()
    main([])
    lines = capsys.readouterr().out.splitlines()
    assert [waiting.folder.name in line for waiting, line in zip(queue, lines, strict=True)] == [True] * len(queue)
    plans = {path.stem for path in (QUEUE.parent / "plans").glob("*.toml")}
    assert plans <= {waiting.plan_file.stem for waiting in queue}, "every plan that no record holds is in the queue"


def test_the_queue_runs_until_its_time_is_over_and_continues_there(tmp_path):
    (tmp_path / "records" / "2030-01-01_known").mkdir(parents=True)
    (tmp_path / "records" / "2030-01-01_known" / "plan.toml").write_text(PLAN)
    plans = tmp_path / "benchmarks" / "plans"
    plans.mkdir(parents=True)
    (plans / "new.toml").write_text(PLAN)
    (plans / "elsewhere.toml").write_text(PLAN)
    queue_file = tmp_path / "queue.toml"
    queue_file.write_text(
        '[[queue]]\nplan = "2030-01-01_known"\n[[queue]]\nplan = "elsewhere"\ndata = "pictures"\n'
        '[[queue]]\nplan = "new"\n'
    )
    queue = read_queue(queue_file, tmp_path)
    known, elsewhere, new = (waiting.folder for waiting in queue)
    assert run_queue(queue, {}, time.monotonic()) == [], "there is no time"
    assert run_queue(queue, {}, time.monotonic() + 600) == [known, new], "without the data set of `elsewhere`"
    assert [len(read_rows(folder)) for folder in (known, elsewhere, new)] == [1, 0, 1]
    assert [line.split()[:3] for line in listing(queue).splitlines()] == [[n, "of", "1"] for n in "101"]
    assert run_queue(queue, {}, time.monotonic() + 600) == [], "nothing is left"
