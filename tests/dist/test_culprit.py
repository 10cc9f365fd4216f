"""The rank that failed first, or that is slow, is named to the user: real processes, exit codes and signals."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import run_ranks
from test_ending import free_port

from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.stragglers import Stragglers
from hyperbatch.plan.types import StepTiming
from hyperbatch.record import RunRecord

HERE = Path(__file__).parent


def train(out, fault, *arguments, **environment):
    """The whole command, three ranks, rank 1 of which fails in its fifth step; and how long it took."""
    words = [sys.executable, "-m", "hyperbatch", "train", "digits", "--model", "broken:model", "--nproc", "3"]
    words += ["--device", "cpu", "--out", str(out), "--global-batch", "96", "--eval-every-epochs", "0.1", *arguments]
    paths = os.pathsep.join((str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    environ = {**os.environ, "PYTHONPATH": paths, "FAULT": fault, **environment}
    began = time.monotonic()
    done = subprocess.run(words, capture_output=True, text=True, timeout=170, check=False, env=environ)
    return done, time.monotonic() - began


def last_line(done):
    return done.stderr.strip().splitlines()[-1]


@pytest.mark.parametrize("step", [1, 5])  # 1: no checkpoint yet
def test_an_exception_of_the_model_is_told_whichever_rank_ends_first(tmp_path, step):
    done, _ = train(tmp_path / "run", "raising", FAULT_STEP=str(step))
    assert done.returncode == 1
    cause = "rank 1: ValueError: the model has lost its head"
    resume = (
        f"--resume --out {tmp_path / 'run'} continues from the newest checkpoint"
        if step > 3
        else "the run can only be started from the beginning"
    )
    assert last_line(done).startswith(f"hyperbatch: {cause}; ")
    assert last_line(done).endswith(resume)
    assert "in raising" in done.stderr, "its traceback"
    assert "closed by peer" not in done.stderr
    record = RunRecord.load(tmp_path / "run")
    assert record.error == cause
    assert (record.failure["rank"], record.failure["step"]) == (1, step)
    assert record.failure["host"]
    assert "in raising" in record.failure["traceback"]


@pytest.mark.parametrize(("fault", "text"), [("leaving", "exited with 7"), ("terminated", "was killed by SIGTERM")])
def test_a_rank_that_ends_without_a_word_is_named_by_its_exit(tmp_path, fault, text):
    done, _ = train(tmp_path / "run", fault)
    assert done.returncode == 1
    assert last_line(done).startswith("hyperbatch: rank 1 (pid ")
    assert text in last_line(done)
    assert last_line(done).endswith(f"--resume --out {tmp_path / 'run'} continues from the newest checkpoint")
    record = RunRecord.load(tmp_path / "run")
    assert text in record.error
    assert record.failure["rank"] == 1
    assert record.failure["step"] == 5


def test_a_rank_that_is_stopped_ends_the_run_and_its_process_goes_with_it(tmp_path):
    """Nobody sends it a signal that it could hear: it is killed by the others once they have given it up."""
    plain, start_s = train(tmp_path / "first", "raising", FAULT_STEP="5")
    assert plain.returncode == 1
    done, seconds = train(tmp_path / "run", "stopped", "--timeout-s", "6")
    assert done.returncode == 1
    assert "rank 1 has not responded for" in last_line(done)
    assert "continues from the newest checkpoint" in last_line(done)
    assert RunRecord.load(tmp_path / "run").error.startswith("rank 1 has not responded")
    check_silent(tmp_path / "run", done, "rank 1: ")  # as of its last beat
    print(f"from the stop to the end: {seconds - start_s:.1f} s")  # for a person: 6 s, and less than 5 s more


def test_a_hang_shows_where_each_rank_is(tmp_path):
    """Its heart beats on, and it never comes to the exchange."""
    done, _ = train(tmp_path / "run", "hanging", "--timeout-s", "6")
    assert done.returncode == 1
    assert last_line(done).startswith("hyperbatch: rank 1 has made no progress for ")
    assert "(step and phase: step 5, forward pass)" in last_line(done)
    check_silent(tmp_path / "run", done, "rank 1: step 5, forward pass, for ")


@pytest.mark.parametrize(("where", "rank"), [("evaluation", 1), ("checkpoint", 1), ("write", 0)])
def test_a_rank_that_is_stopped_elsewhere_ends_the_run_too(tmp_path, where, rank):
    """write: in the thread that writes, while the others train. They tell what they wait in after 7 of the 10 s."""
    done, _ = train(tmp_path / "run", "stopped", "--timeout-s", "10", FAULT_IN=where, FAULT_RANK=str(rank))
    assert done.returncode == 1
    assert f"hyperbatch: rank {rank} has not responded for" in last_line(done)
    failure = RunRecord.load(tmp_path / "run").failure
    assert (failure["rank"], failure["host"]) == (rank, socket.gethostname())
    places = failure["places"]
    assert all(line in done.stderr for line in places)
    phase = "evaluation, exchange" if where == "evaluation" else ""
    others = [line for line in places if not line.startswith(f"rank {rank}")]
    assert len(others) == 2
    assert all(phase in line and "; waits in gloo:" in line for line in others)


@pytest.mark.parametrize(("where", "rank"), [("evaluation", 1), ("checkpoint", 0)])
def test_a_hang_in_an_evaluation_or_a_checkpoint_is_named(tmp_path, where, rank):
    """And torch's flight recorder says what the others wait in."""
    done, _ = train(tmp_path / "run", "hanging", "--timeout-s", "6", FAULT_IN=where, FAULT_RANK=str(rank))
    assert done.returncode == 1
    failure = RunRecord.load(tmp_path / "run").failure
    assert (failure["rank"], failure["host"]) == (rank, socket.gethostname())
    places = failure["places"]
    assert last_line(done).startswith(f"hyperbatch: rank {rank} has made no progress for ")
    assert f", {'evaluation, batch 1' if where == 'evaluation' else 'checkpoint'})" in last_line(done)
    assert "; its last collective was gloo:" in places[rank]
    assert all("; waits in gloo:" in line for other, line in enumerate(places) if other != rank)


@pytest.mark.parametrize(
    ("fault", "line"),
    [
        ("stopped", "has not responded for 6."),
        ("leaving", "has ended or cannot be reached: communication failed on rank 1: "),
    ],
)
def test_rank_0_that_is_lost_with_the_store_of_all_ends_the_run(tmp_path, fault, line):
    """Without an agent rank 0 keeps it: no request to it returns any more, or each fails."""
    words = [sys.executable, "-m", "hyperbatch", "train", "digits", "--model", "broken:model", "--device", "cpu"]
    words += ["--out", str(tmp_path / "run"), "--timeout-s", "6"]
    paths = os.pathsep.join((str(HERE), str(HERE.parents[1]), os.environ.get("PYTHONPATH", "")))
    world = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environ = {**os.environ, "PYTHONPATH": paths, "FAULT": fault, "FAULT_RANK": "0", **world}
    ranks = [
        subprocess.Popen(words, env={**environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}, stderr=subprocess.PIPE)
        for rank in range(2)
    ]
    try:
        _, said = ranks[1].communicate(timeout=120)
        assert [
            text.startswith(f"hyperbatch: rank 0, which hosts the store, {line}") for text in said.decode().splitlines()
        ] == [True]
        assert ranks[0].wait(60) == (-9 if fault == "stopped" else 7), "its neighbour has killed it, or it ended itself"
    finally:
        for rank in ranks:
            rank.kill()
            rank.communicate()
    assert ranks[1].returncode == 1


def check_silent(run, done, second):
    failure = RunRecord.load(run).failure
    assert [failure[name] for name in ("rank", "host", "step")] == [1, socket.gethostname(), 5]
    places = failure["places"]
    assert [place.partition(":")[0] for place in places] == ["rank 0", "rank 1", "rank 2"]
    assert places[0].startswith("rank 0: step 5, gradient exchange, group ")
    assert places[1].startswith(second)
    assert all(place in done.stderr for place in places)


def compares_steps(rank):
    """What each comparison of ten steps has found here; rank 2 is slow."""
    dist.all_gather = dist.all_gather_object = None
    stragglers = Stragglers(Ranks(rank=rank, world_size=3))
    forward_s = 0.5 if rank == 2 else 0.1
    found = []
    for _ in range(3):
        for _ in range(10):
            stragglers.add(
                StepTiming(step_s=0.6, forward_s=forward_s, backward_s=0.1, exposed_comm_s=0.0, update_s=0.0)
            )
        found.append([(slow.rank, slow.phase) for slow in stragglers.look()])
    return found, len(stragglers.means())


def test_rank_0_alone_learns_how_long_the_steps_of_others_took():
    """Of thousands of ranks each would otherwise pass on and keep the times of all."""
    assert run_ranks(3, compares_steps) == [([[], [(2, "forward")], []], 3), ([[]] * 3, 0), ([[]] * 3, 0)]


def test_a_slow_rank_is_named_in_output_record_and_report(tmp_path):
    """By the phase in which it loses its time: to the others it looks like communication."""
    run = tmp_path / "run"
    done, _ = train(run, "sleeping", "--max-steps", "30", "--eval-every-epochs", "0.5")
    assert done.returncode == 3, done.stderr  # trained, missed its target
    line = "rank 1 (host "
    slow = "is slow: its forward pass takes "
    assert any(text.startswith(f"note: {line}") and slow in text for text in done.stderr.splitlines())
    (found,) = RunRecord.load(run).stragglers
    assert (found["rank"], found["phase"]) == (1, "forward")
    assert slow in (run / "report.html").read_text()
