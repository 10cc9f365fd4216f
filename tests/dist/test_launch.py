"""The command with real workers under the elastic agent: results, exit codes, a killed rank, resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-m", "hyperbatch"]
SHORT = ["--max-steps", "6", "--eval-every-epochs", "0.25", "--device", "cpu"]


def hyperbatch(*arguments, **options):
    """Runs the command to its end."""
    words = [*COMMAND, *map(str, arguments)]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, check=False, **options)


def endless(run):
    """The arguments of a run that two ranks train until they are stopped."""
    flags = ["--nproc", "2", "--out", str(run), "--device", "cpu", "--epochs", "10000", "--no-stop-at-target"]
    return ["train", "digits", *flags]


def test_two_by_two_torus_then_eval_export_report_and_resume(tmp_path):
    """One run through every verb that reads it. Four ranks on a 2x2 grid, torus all-reduce, no target reached."""
    run = tmp_path / "run"
    flags = ["--nproc", 4, "--grid", "2x2", "--algorithm", "torus", "--out", run, *SHORT]
    done = hyperbatch("train", "digits", "--json", *flags)
    assert done.returncode == 3, done.stderr  # trained, missed its target
    record = json.loads(done.stdout)
    assert record == json.loads((run / "record.json").read_text())
    assert record["world_size"] == 4
    assert record["grid"] == "2x2"
    assert {group["algorithm"] for group in record["timing"]["groups"]} == {"torus"}
    assert record["result"]["steps"] == 6
    assert not record["result"]["reached"]
    assert {"record.json", "metrics.jsonl", "mllog.txt", "trace.json", "report.html"} <= {p.name for p in run.iterdir()}
    assert json.loads((run / "trace.json").read_text())["traceEvents"]

    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    evaluated = json.loads(hyperbatch("eval", run, "--device", "cpu", "--json").stdout)
    assert evaluated["samples"] == last["samples"]
    assert (last["event"], last["step"], evaluated["step"]) == ("eval", 6, 6)
    # One process and other batches than the run's, so that rounding may turn a close call: one image at most.
    assert evaluated["top1"] == pytest.approx(last["top1"], abs=1.5 / last["samples"])

    exported = json.loads(hyperbatch("export", run, "--json").stdout)
    assert Path(exported["weights"]).stat().st_size > 10_000

    other = hyperbatch("train", "digits", *flags, "--resume", "--momentum", "0.5", "--seed", "3")
    assert other.returncode == 2
    assert "momentum 0.9 -> 0.5" in other.stderr
    assert "seed 0 -> 3" in other.stderr
    again = hyperbatch("train", "digits", *flags)
    assert again.returncode == 2
    assert "already holds a run" in again.stderr
    flags[1], flags[3] = 2, "1x2"  # fewer ranks may go on
    flags[flags.index("--max-steps") + 1] = 9
    resumed = hyperbatch("train", "digits", "--json", *flags, "--resume")
    assert resumed.returncode == 3, resumed.stderr
    assert json.loads(resumed.stdout)["result"]["steps"] == 9


def test_the_default_reaches_its_target(tmp_path):
    """What `make train` runs, from a folder with a space in its name: exit code 0, the record says how."""
    folder = tmp_path / "some where"
    folder.mkdir()
    done = hyperbatch("train", "--json", "--device", "cpu", cwd=folder)
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["recipe"] == "digits"
    assert record["world_size"] == 2
    assert record["result"]["reached"]
    assert record["result"]["top1"] >= 0.99
    assert len(record["plan"]["groups"]) >= 2
    assert [phase["global_batch"] for phase in record["phases"]] == [64, 128]
    assert any(ratio != 1 for ratio in record["trust_ratios"].values())
    assert (folder / record["folder"] / "report.html").stat().st_size > 10_000


def test_stopped_run_says_so_and_can_go_on(tmp_path):
    run = tmp_path / "run"
    arguments = [*endless(run), "--eval-every-epochs", "0.1"]
    with subprocess.Popen([*COMMAND, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            wait_for_rank(process.pid, 0, run / "metrics.jsonl")
            meanwhile = hyperbatch(*arguments, "--resume")  # of a run that is thought dead
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert meanwhile.returncode == 2
    said = f"hyperbatch: --out {run} is in use by another run; choose another folder"
    assert meanwhile.stderr.splitlines()[-1] == said
    assert process.returncode == 1
    assert "Traceback" not in err
    last = err.strip().splitlines()[-1]
    assert last == f"hyperbatch: interrupted by SIGINT; --resume --out {run} continues from the newest checkpoint"


def test_killed_rank_takes_the_run_down_by_name(tmp_path):
    run = tmp_path / "run"
    with subprocess.Popen(
        [*COMMAND, *endless(run)], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            victim = wait_for_rank(process.pid, 1, run / "metrics.jsonl")
            os.kill(victim, signal.SIGKILL)
            killed = time.monotonic()
            _, err = process.communicate(timeout=60)
        finally:
            process.kill()
    assert process.returncode == 1
    assert time.monotonic() - killed < 60
    last = err.strip().splitlines()[-1]
    assert last.startswith(f"hyperbatch: rank 1 (pid {victim}) was killed by SIGKILL")
    assert "Traceback" not in err


def test_ranks_end_with_a_command_that_is_killed(tmp_path):
    """It cannot tell them any more; the folder is free again."""
    run = tmp_path / "run"
    with subprocess.Popen([*COMMAND, *endless(run)], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as process:
        try:
            ranks = [wait_for_rank(process.pid, rank, run / "metrics.jsonl") for rank in (0, 1)]
        finally:
            process.kill()
    deadline = time.monotonic() + 60
    while any(is_alive(rank) for rank in ranks):
        assert time.monotonic() < deadline, "ranks go on without their parent"
        time.sleep(0.1)


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for_rank(parent, rank, metrics):
    """The pid of a rank below `parent`, once the run has written steps."""
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline:
        if metrics.exists() and metrics.stat().st_size > 1000:
            for pid in children(parent):
                environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                if f"LOCAL_RANK={rank}".encode() in environ:
                    return pid
        time.sleep(0.2)
    raise AssertionError("the run did not start")


def children(pid):
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in listed]


def test_a_rank_whose_command_was_interrupted_ends_silently(tmp_path):
    """Ctrl-C may reach the command after it has started the rank, and before the agent knows of it."""
    command = [sys.executable, "-m", "hyperbatch.engine.worker", str(tmp_path / "config.json")]
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    done = subprocess.run(command, env={**os.environ, **place, **address}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_worker_only_mistake_is_still_one_line(tmp_path):
    """A model that cannot be built is found by the workers; the parent says so once."""
    done = hyperbatch("train", "digits", "--model", "resnet_8", "--nproc", 2, "--out", tmp_path / "run", *SHORT)
    assert done.returncode == 2, done.stderr
    *before, last = done.stderr.splitlines()
    assert "did you mean 'resnet8'" in last
    assert not [line for line in before if "hyperbatch: " in line]
    assert not (tmp_path / "run").exists()
