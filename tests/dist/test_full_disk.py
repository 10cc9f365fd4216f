"""Runs that begin, or go on, on a file system without room for a byte or a file: a real one, where one may be made."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from toy import config, flat_weights, same_bits

from benchmarks.soak_runs import small_disk
from hyperbatch.callbacks import EVENTS_FILE, Callback, Forward, Hooks, StepEvent, forwarded
from hyperbatch.engine import scratch
from hyperbatch.engine.scratch import scratch_folder
from hyperbatch.errors import InputError, Preempted, RunFailed
from hyperbatch.launch import train
from hyperbatch.record import RunRecord, Span, TraceFile, read_metrics
from hyperbatch.sweep.command import sweep
from hyperbatch.sweep.rows import read_rows

FULL = "No space left on device"


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", files=100) as made:
        if not made:
            pytest.skip("only root may make a file system here")
        yield tmp_path / "disk"


def fill(disk, *, files=True):
    (disk / "filler").mkdir()
    with open(disk / "filler" / "bytes", "wb", buffering=0) as file, contextlib.suppress(OSError):
        while file.write(bytes(1 << 16)):
            pass
    with contextlib.suppress(OSError):
        for number in range(1000 if files else 0):
            (disk / "filler" / str(number)).touch()
    room = os.statvfs(disk)
    assert (room.f_bavail, room.f_favail == 0) == (0, files)


def empty(disk):
    shutil.rmtree(disk / "filler")


class At(Callback):
    """Does something at a step."""

    def __init__(self, step, act):
        self.step, self.act = step, act

    def on_step(self, event):
        if event.step == self.step:
            self.act()


def make_room():
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(0.6)  # the run looks for it in intervals


def contents(out):
    files = [out / "config.toml", out / "record.json", *sorted((out / "checkpoints").iterdir())]
    return {path.name: path.read_bytes() for path in files}


def test_a_run_that_is_started_again_on_a_full_disk_is_not_lost(disk, capfd):
    whole, out = disk / "whole", disk / "run"
    values = {"nproc": 1, "epochs": 8.0}  # 50 steps, whose lines fill more than the last page of a file
    train(config(out=str(whole), **values))
    train(config(out=str(out), max_steps=12, **values))
    again = config(out=str(out), resume="auto", **values)
    before = contents(out)
    fill(disk)
    # There is room for a record neither at its end nor when it is preempted: it has not ended well, and can go on.
    with pytest.raises(RunFailed, match=f"record.json could not be written: {FULL}; --resume --out"):
        train(again)
    with pytest.raises(Preempted, match=rf"preempted by SIGUSR1 after step \d+, but .*could not be written: {FULL}"):
        train(again, [At(15, make_room)])
    assert contents(out) == before
    capfd.readouterr()
    record = train(again, [At(42, lambda: empty(disk))])
    assert same_bits(flat_weights(out), flat_weights(whole))
    steps = [line["step"] for line in read_metrics(out) if line["event"] == "step"]
    assert steps == sorted(set(steps))
    assert {*range(1, 13), *range(43, 51)} <= set(steps) < {*range(1, 51)}
    names = [event["name"] for event in json.loads((out / "trace.json").read_text())["traceEvents"]]
    assert names.count("process_name") == 4
    told = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warning")]
    assert told[0] == f"warning: {out / 'config.toml'} cannot be written and keeps its old content: {FULL}"
    assert told[1] == f"warning: {out} cannot be written: {FULL}; the run continues without these lines of metrics"
    steps = (20, 25, 30, 35, 40)
    lost = [
        f"the checkpoint of step {step} could not be written: {FULL}; the run continues without it" for step in steps
    ]
    assert told[2:] == [f"warning: {line}" for line in lost]
    assert record.warnings[: len(lost)] == lost
    assert any(line.endswith(f"lines could not be written to metrics.jsonl: {FULL}") for line in record.warnings)
    assert not list(out.rglob("*.partial"))


@pytest.mark.parametrize("resume", ["no", "auto"])
@pytest.mark.parametrize("files", [False, True])
def test_a_run_that_begins_on_a_full_disk_is_refused_in_one_line(disk, resume, files):
    fill(disk, files=files)
    with pytest.raises(InputError, match=f"^--out .*/new cannot be written: {FULL}; choose another folder$"):
        train(config(out=str(disk / "new"), nproc=1, resume=resume))
    assert not (disk / "new").exists()


def test_a_trace_is_json_while_the_disk_is_full_and_goes_on_after_it(disk):
    trace, spans = TraceFile(disk / "trace.json"), [Span("step", 0.0, 1.0, "engine", {})] * 600
    fill(disk)
    trace.process("rank 0")
    for span in spans:
        trace.span(span)
    trace.flush()
    assert trace.dropped > 0
    empty(disk)
    trace.flush()
    kept = json.loads((disk / "trace.json").read_text())["traceEvents"]
    assert [event["name"] for event in kept] == ["process_name", "thread_name"] + ["step"] * (600 - trace.dropped)
    fill(disk)
    for span in spans * 10:
        trace.span(span)
    trace.close()
    assert json.loads((disk / "trace.json").read_text())["traceEvents"][: len(kept)] == kept


def test_a_log_on_a_full_disk_loses_lines_and_nothing_else(disk):
    code = (
        "import shutil, sys\n"
        "from hyperbatch.engine.logfile import let_log_fill\n"
        "let_log_fill()\n"
        "for stream in (sys.stdout, sys.stderr):\n"
        "    print('x' * 10_000, file=stream, flush=True)\n"
        "shutil.rmtree(sys.argv[1])\n"
        "print('out')\n"
        "print('err', file=sys.stderr)\n"
    )
    with open(disk / "log", "ab") as log:
        fill(disk)
        words = [sys.executable, "-c", code, str(disk / "filler")]
        assert subprocess.run(words, stdout=log, stderr=log, check=False).returncode == 0
    assert (disk / "log").read_text().endswith("out\nerr\n")


def test_callbacks_are_told_what_the_disk_has_room_for(disk, capfd):
    told = []

    class Steps(Callback):
        def on_step(self, event):
            told.append(event.step)

    with forwarded(Hooks([Steps()]), disk):
        forward = Forward(disk / EVENTS_FILE)

        def tell(*steps):
            for step in steps:
                values = {"epoch": 0.0, "time_s": 0.0, "loss": 0.0, "lr": 0.0, "global_batch": 1, "images_per_s": 1.0}
                forward.tell("on_step", StepEvent(step=step, **values))

        tell(1)
        fill(disk)
        tell(*range(2, 500))
        empty(disk)
        tell(500, 501)
        forward.close()
    assert told == sorted(set(told))
    assert (told[0], told[-1]) == (1, 501)
    assert len(told) < 500
    assert capfd.readouterr().err == f"warning: callbacks do not receive all events: {FULL}\n"


def test_temporary_files_are_kept_in_memory_where_no_disk_has_room(disk, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(disk))
    fill(disk, files=False)
    with scratch_folder() as folder:
        assert str(folder.parent) == scratch.MEMORY_FOLDER
        (folder / "words").write_text("some")
    assert not folder.exists()
    monkeypatch.setattr(scratch, "MEMORY_FOLDER", str(disk))
    with pytest.raises(RunFailed, match=f"temporary files cannot be written: {FULL}; set TMPDIR"), scratch_folder():
        pass
    assert [path.name for path in disk.iterdir()] == ["filler"]


def test_a_sweep_on_a_full_disk_keeps_its_rows_and_goes_on_later(disk, tmp_path):
    """A row for which there is no room is no row. One in the last page of the file is, and the report waits."""
    plan, folder, told = tmp_path / "plan.toml", disk / "sweep", []
    text = 'recipe = "digits"\n[fixed]\ndevice = "cpu"\nepochs = 0.25\nwarmup_epochs = 0\n'

    def say(line):
        told.append(line)
        if line.startswith(("2/2", "3/8")):
            fill(disk)

    plan.write_text("seeds = 2\n" + text)
    assert sweep(plan, folder, say=say).done == 2
    lost = f"{folder / 'report.html'} could not be written: {FULL}"
    assert told[-1] == f"warning: {lost}; the same command writes it later"
    empty(disk)

    plan.write_text("seeds = 8\n" + text)
    told.clear()
    line = f"the rows can no longer be written to {folder}: {FULL}; once that is repaired, run the same command again"
    with pytest.raises(RunFailed, match=line):
        sweep(plan, folder, say=say)
    kept = read_rows(folder)
    assert told[-1].startswith(f"{len(kept) + 1}/8")  # the one that found no room
    assert (folder / "rows.jsonl").read_bytes().count(b"\n") == len(kept)
    assert not list(folder.glob("*.partial"))
    empty(disk)
    assert sweep(plan, folder).done == 8
    assert [row.seed for row in read_rows(folder)] == [*range(8)]
    assert (folder / "report.html").exists()


def test_a_run_whose_folder_is_deleted_does_not_end_as_if_all_were_there(tmp_path):
    out = tmp_path / "run"
    line = f"{out} was deleted or moved during the run: config.toml and metrics.jsonl are no longer there; --resume"
    with pytest.raises(RunFailed, match=line):
        train(config(out=str(out), nproc=1), callbacks=[At(12, lambda: shutil.rmtree(out))])
    record = RunRecord.load(out)
    assert record.error.startswith(f"{out} was deleted")
    assert record.result.steps == 30
