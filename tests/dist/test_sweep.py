"""A real sweep: rows as runs end, interrupted and continued, diverged arms, parts side by side."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyperbatch import cli
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.sweep import command
from hyperbatch.sweep.rows import read_rows
from hyperbatch.sweep.sharing import held, searching

PLAN = """
recipe = "digits"
seeds = 2
[fixed]
device = "cpu"
epochs = 0.25
warmup_epochs = 0
[[arms]]
name = "LARS"
grid.lr = [0.5, 1]
[[arms]]
name = "SGD"
optimizer = "sgd"
lr = 1e30
"""
# Never over by itself: an interrupt finds it at work.
ENDLESS = """[[arms]]
name = "endless"
epochs = 1000000
target_top1 = "none"
"""
STEPS = 6  # of 64 samples in a quarter of an epoch
EXACT = ("top1", "epochs", "steps", "reached", "seed", "arm", "digest", "error")


@pytest.fixture
def plan(tmp_path):
    path = tmp_path / "plan.toml"
    path.write_text(PLAN)
    return path


def words(*arguments):
    return [sys.executable, "-m", "hyperbatch", *map(str, arguments)]


def exact(folder):
    return sorted(
        ({name: row.to_dict().get(name) for name in EXACT} for row in read_rows(folder)), key=lambda row: row["digest"]
    )


def test_a_sweep_is_interrupted_goes_on_and_gives_what_runs_alone_give(plan, tmp_path, capfd):
    """By Ctrl-C after its first row. Then every run is there once, with the numbers of an unbroken sweep."""
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "whole"), "--json"]) == 0
    whole = json.loads(capfd.readouterr().out)
    assert (whole["planned"], whole["done"], whole["failed"]) == (6, 6, 2)
    assert [point["runs"] for point in whole["points"]] == [2, 2, 2]
    assert all(point["top1"]["mean"] > 0 for point in whole["points"][:2])

    folder = tmp_path / "parts"
    lars, sgd = PLAN.rsplit("[[arms]]", 1)
    plan.write_text(f"{lars}{ENDLESS}[[arms]]{sgd}")
    with subprocess.Popen(words("sweep", plan, "--out", folder), stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: len(read_rows(folder)) > 0)
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    before = len(read_rows(folder))
    assert "Traceback" not in said
    assert process.returncode == 1, said
    assert f"{before} of 8 rows are in {folder}; run the same command again to continue" in said.splitlines()[-1]
    assert 0 < before <= 4
    assert (folder / "report.html").exists()

    plan.write_text(PLAN)
    assert cli.main(["sweep", str(plan), "--out", str(folder)]) == 0
    assert exact(folder) == exact(tmp_path / "whole")
    assert "6 of 6 runs done; 2 failed" in capfd.readouterr().out

    # A row's own command, in a process of its own.
    row = read_rows(folder)[1]
    done = subprocess.run(
        [*words(), *shlex.split(row.command)[1:], "--json"], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    alone = json.loads(done.stdout)["result"]
    assert {name: alone[name] for name in ("top1", "epochs", "steps")} == {
        name: row.result[name] for name in ("top1", "epochs", "steps")
    }


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_of_several_ranks_is_no_row(tmp_path, number):
    plan, folder = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(f"{PLAN.partition('[[arms]]')[0]}nproc = 2\n{ENDLESS}")
    command = words("sweep", plan, "--out", folder, "--keep-runs")
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: (folder / "runs" / "1" / "metrics.jsonl").exists())
            process.send_signal(number)
            _, said = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert f"interrupted; 0 of 2 rows are in {folder}; run the same command again to continue" in said.splitlines()[-1]
    assert read_rows(folder) == []


def test_processes_side_by_side_end_with_their_parent(tmp_path):
    """Also as a job of a script, `hyperbatch sweep ... &`, which ignores Ctrl-C."""
    plan, folder = tmp_path / "plan.toml", tmp_path / "out"
    plan.write_text(f"{PLAN.partition('[[arms]]')[0]}{ENDLESS}")
    command = words("sweep", plan, "--out", folder, "--keep-runs", "--side-by-side", "2")
    ignore = partial(signal.signal, signal.SIGINT, signal.SIG_IGN)
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=ignore) as process:
        try:
            for run in ("1", "2"):
                wait_for(lambda run=run: (folder / "runs" / run / "metrics.jsonl").exists())
            process.send_signal(signal.SIGTERM)
            _, said = process.communicate(timeout=60)  # until nobody holds the pipe any more
        finally:
            process.kill()
    assert process.returncode == 1
    assert said.count("interrupted; 0 of 2 rows") == 2
    assert "a part of the sweep ended early" in said.splitlines()[-1]


@pytest.mark.parametrize(("code", "error"), [(1, RunFailed), (2, InputError), (-signal.SIGINT, RunFailed)])
def test_a_part_that_a_signal_ended_is_no_mistake_of_the_user(plan, tmp_path, monkeypatch, code, error):
    monkeypatch.setattr(command.subprocess, "Popen", lambda *_, **__: SimpleNamespace(wait=lambda: code))
    with pytest.raises(error, match="a part of the sweep ended early"):
        command.side_by_side(plan, tmp_path / "out", 2)


@pytest.mark.parametrize(("cores", "asked", "threads"), [(8, None, "2"), (2, None, "1"), (8, "5", "5")])
def test_processes_side_by_side_share_the_cores(plan, tmp_path, monkeypatch, cores, asked, threads):
    """Threads of several processes on one core wait for one another most of the time."""
    seen = []
    monkeypatch.setattr(command, "usable_cores", lambda: cores)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if asked:
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
    played = lambda *_, env, **__: seen.append(env["OMP_NUM_THREADS"]) or SimpleNamespace(wait=lambda: 0)  # noqa: E731
    monkeypatch.setattr(command.subprocess, "Popen", played)
    command.side_by_side(plan, tmp_path / "out", 4)
    assert seen == [threads] * 4


def test_a_command_that_is_refused_leaves_the_plan_of_the_other_one(plan, tmp_path, capsys):
    (tmp_path / "plan.toml").write_text(PLAN)
    with held(tmp_path, (1, 1)):
        other = tmp_path / "other.toml"
        other.write_text(PLAN.replace("0.5", "0.7"))
        assert cli.main(["sweep", str(other), "--out", str(tmp_path)]) == 2
    assert "is in use by another sweep" in capsys.readouterr().err
    assert (tmp_path / "plan.toml").read_text() == PLAN


def test_the_folder_of_a_run_keeps_its_report(plan, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.toml").touch()
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "run")]) == 2
    assert "run holds a run, whose report would be replaced; choose another folder" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["config.toml"]


def test_a_sweep_of_which_every_run_failed_has_failed(plan, tmp_path, capsys):
    fixed, *_, sgd = PLAN.split("[[arms]]")
    plan.write_text(f"{fixed}[[arms]]{sgd}")
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out")]) == 1
    assert "2 of 2 runs done; 2 failed, the first of them (run 1): the loss became nan" in capsys.readouterr().out
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out"), "--part", "1/2"]) == 0, "a part cannot know"
    assert cli.main(["sweep", str(plan), "--row", "1"]) == 1


def wait_for(condition, timeout_s=120):
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_diverged_run_is_a_row_and_is_made_again_on_demand_only(plan, tmp_path, capsys):
    folder = tmp_path / "out"
    assert cli.main(["sweep", str(plan), "--out", str(folder)]) == 0
    failed = [row for row in read_rows(folder) if row.error]
    assert [row.arm for row in failed] == ["SGD", "SGD"]
    assert all("the loss became nan" in str(row.error) for row in failed)
    assert all(0 < row.result["steps"] < STEPS for row in failed), "stopped early"
    assert all(row.torch and row.device and row.command for row in failed)
    assert cli.main(["sweep", str(plan), "--out", str(folder)]) == 0
    assert len(read_rows(folder)) == 6
    assert cli.main(["sweep", str(plan), "--out", str(folder), "--retry-failed"]) == 0
    assert len(read_rows(folder)) == 8
    capsys.readouterr()
    assert cli.main(["sweep", str(plan), "--out", str(folder), "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert (values["done"], values["failed"]) == (6, 2)


def test_a_plan_that_grows_is_continued(plan, tmp_path):
    folder = tmp_path / "out"
    assert cli.main(["sweep", str(plan), "--out", str(folder)]) == 0
    arms = PLAN[PLAN.index("[[arms]]") :].split("[[arms]]")[1:]
    plan.write_text(
        PLAN.replace("seeds = 2", "seeds = 3").partition("[[arms]]")[0] + f"[[arms]]{arms[1]}[[arms]]{arms[0]}"
    )
    assert cli.main(["sweep", str(plan), "--out", str(folder)]) == 0
    assert [row.seed for row in read_rows(folder)] == [0, 1] * 3 + [2] * 3
    assert (folder / "plan.toml").read_text() == plan.read_text()


def test_parts_and_side_by_side_share_the_runs_and_the_confirmation(plan, tmp_path, capfd):
    plan.write_text(PLAN.replace("[fixed]", "confirm = 3\n[fixed]") + "confirm = 0\n")
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "one"), "--part", "2/2"]) == 0
    assert [row.run for row in read_rows(tmp_path / "one")] == [2, 4, 6]
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "one"), "--side-by-side", "2", "--json"]) == 0
    values = json.loads(capfd.readouterr().out.splitlines()[-1])
    search, fresh, sgd = values["rows"][:4], values["rows"][4:7], values["rows"][7:]
    assert [row["run"] for row in (*search, *sgd)] == [1, 2, 3, 4, 5, 6]
    means = [point["top1"]["mean"] for point in values["points"]]
    first = 7 if means[0] >= means[1] else 10
    assert [(row["run"], row["seed"], row["confirms"]) for row in fresh] == [
        (first + i, 2 + i, True) for i in range(3)
    ], "of the better point"
    assert (values["planned"], values["done"]) == (9, 9)
    assert len(read_rows(tmp_path / "one")) == 9, "each made once"
    assert cli.main(["sweep", str(plan), "--row", str(first + 1), "--json"]) == 0
    again = json.loads(capfd.readouterr().out)
    assert {name: again[name] for name in EXACT} == {name: fresh[1][name] for name in EXACT}


@pytest.mark.parametrize("until", [[], ["--until", "1000"]])
def test_a_part_waits_for_the_search_of_others_until_they_end_or_its_time_is_over(
    plan, tmp_path, capsys, monkeypatch, until
):
    plan.write_text(PLAN.replace("seeds = 2", "confirm = 3").rpartition("[[arms]]")[0])
    now = 0.0

    def sleep(_):
        nonlocal now
        now = 2000.0
        if not until:
            others.close()

    monkeypatch.setattr(command, "time", SimpleNamespace(perf_counter=lambda: now, sleep=sleep))
    with contextlib.ExitStack() as others:
        others.enter_context(searching(tmp_path))
        assert cli.main(["sweep", str(plan), "--out", str(tmp_path), "--part", "1/2", *until]) == 0
    assert [row.run for row in read_rows(tmp_path)] == [1]
    said = capsys.readouterr()
    assert said.err.count("waiting for the searches of the other parts") == 1
    assert ("1000 s have passed" in said.err) == bool(until)
    assert "1 of 5 runs done; run the same command again for the others" in said.out


def test_no_run_begins_after_the_time_is_over(plan, tmp_path, capsys):
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out"), "--until", "0"]) == 0
    assert read_rows(tmp_path / "out") == []
    said = capsys.readouterr()
    assert "0 of 6 runs done" in said.out


def test_a_row_is_made_again_and_nothing_is_written(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sweep", str(plan), "--row", "2", "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert (row["run"], row["seed"], row["steps"], row["error"]) == (2, 1, STEPS, None)
    assert [path.name for path in tmp_path.iterdir()] == ["plan.toml"]


def test_runs_are_kept_on_demand_without_checkpoints(plan, tmp_path):
    plan.write_text(PLAN.partition("[[arms]]")[0].replace("seeds = 2", "seeds = 1"))
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out"), "--keep-runs"]) == 0
    run = tmp_path / "out" / "runs" / "1"
    assert {"record.json", "metrics.jsonl"} <= {path.name for path in run.iterdir()}
    assert not (run / "checkpoints").exists()
    assert cli.main(["report", str(run)]) == 0


def test_several_ranks_have_processes_of_their_own(tmp_path):
    plan = tmp_path / "plan.toml"
    plan.write_text(PLAN.partition("[[arms]]")[0].replace("seeds = 2", "seeds = 1") + "nproc = 2\n")
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out")]) == 0
    (row,) = read_rows(tmp_path / "out")
    assert row.error is None
    assert row.result["steps"] == STEPS
    assert "--nproc 2" in row.command


def test_an_unexpected_error_is_a_row_and_the_next_run_starts_clean(plan, tmp_path, monkeypatch):
    from hyperbatch.engine import session

    calls, train = [], session.train

    def breaks(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise ZeroDivisionError("our bug")
        return train(*arguments)

    monkeypatch.setattr(session, "train", breaks)
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out")]) == 0
    rows = read_rows(tmp_path / "out")
    assert rows[0].error == "ZeroDivisionError: our bug"
    assert rows[1].error is None


def test_under_a_launcher_it_is_refused(plan, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path / "out")]) == 2
    assert "without torchrun" in capsys.readouterr().err


def test_each_part_has_a_gpu_of_its_own(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert command.visible_gpus() == ["3", "5"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert command.visible_gpus() == []


def test_its_folder_must_be_writable(plan, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert cli.main(["sweep", str(plan), "--out", str(Path(tmp_path / "file" / "out"))]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_damaged_file_of_environments_is_told_before_a_run(plan, tmp_path, capsys):
    (tmp_path / "environment.json").write_text("<<<<<<< ours")
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path)]) == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"{tmp_path / 'environment.json'} is not valid JSON" in told
    assert read_rows(tmp_path) == []


@pytest.mark.parametrize("setting", ['tracker = "tensorboard"', "max_restarts = 1"])
def test_what_no_session_does_is_done_as_by_train(tmp_path, monkeypatch, setting):
    """A session has neither trackers nor restarts: they were left out without a word."""
    (plan := tmp_path / "plan.toml").write_text(f'recipe = "digits"\n[fixed]\ndevice = "cpu"\n{setting}')

    def train(config):
        raise RunFailed("by train")

    monkeypatch.setattr("hyperbatch.sweep.trainer.train", train)
    assert [row.error for row in command.sweep(plan, tmp_path / "out").rows] == ["by train"]


def test_a_tracker_that_is_not_installed_is_told_at_once(tmp_path, monkeypatch):
    (plan := tmp_path / "plan.toml").write_text('recipe = "digits"\n[fixed]\ntracker = "mlflow"')
    nothing = SimpleNamespace(util=SimpleNamespace(find_spec=lambda name: None))
    monkeypatch.setattr("hyperbatch.trackers.importlib", nothing)
    with pytest.raises(InputError, match="plan: --tracker mlflow: mlflow is not installed"):
        command.sweep(plan, tmp_path / "out")


def test_a_folder_that_is_gone_ends_the_sweep_in_one_line(plan, tmp_path):
    folder, told = tmp_path / "out", []

    def say(line):
        told.append(line)
        if line.startswith("1/"):
            shutil.rmtree(folder)

    line = f"the rows can no longer be written to {folder}: No such file or directory; once that is repaired, run the "
    with pytest.raises(RunFailed, match=f"^{line}same command again to continue$"):
        command.sweep(plan, folder, say=say)
    assert [text.split()[0] for text in told] == ["plan:", "1/6"]  # nothing is trained for a folder that is gone
    assert not folder.exists()


def test_a_folder_that_is_gone_is_not_made_again_by_the_runs_that_are_kept(plan, tmp_path, monkeypatch):
    folder = tmp_path / "out"

    class Deleted(command.Trainer):
        def row_of(self, run):
            if run.number == 2:
                shutil.rmtree(folder)
            return super().row_of(run)

    monkeypatch.setattr(command, "Trainer", Deleted)
    with pytest.raises(RunFailed, match=r"^the rows can no longer be written to .*: No such file or directory; once"):
        command.sweep(plan, folder, keep_runs=True)
    assert not (folder / "rows.jsonl").exists()


def test_a_folder_that_can_only_be_read_is_refused(plan, tmp_path, monkeypatch, capsys):
    """Its first file is a lock. Root may write everywhere, so the refusal is made up."""

    def refused(folder, part):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(command, "held", contextlib.contextmanager(refused))
    assert cli.main(["sweep", str(plan), "--out", str(tmp_path)]) == 2
    assert f"hyperbatch: --out {tmp_path} cannot be written: Permission denied; choose" in capsys.readouterr().err
