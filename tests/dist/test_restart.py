"""Runs that go on by themselves after a fault, and runs that make room: real commands, real signals, the same bits."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from harness import run_ranks
from test_ending import free_port
from toy import config, flat_weights, same_bits

from hyperbatch.config import Config
from hyperbatch.engine import loop
from hyperbatch.engine.preempt import Preemption
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.stores import meet
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.record import RunRecord, read_metrics

TRAIN = ["-m", "hyperbatch", "train", "faulty:recipe"]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
PREEMPTED = 75


def command(words, *, fault="", **environ):
    """Runs python with these words to its end, below the folder of `faulty` and `toy`."""
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    environ = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **environ}
    if fault:
        environ["FAULT"] = fault
    words = [sys.executable, *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, timeout=180, check=False, env=environ)


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory):
    """What a run of two ranks without a fault ends with."""
    out = tmp_path_factory.mktemp("unbroken") / "run"
    done = command([*TRAIN, "--nproc", "2", "--out", out])
    assert done.returncode == 0, done.stderr
    return flat_weights(out)


def check_whole(out, unbroken):
    """The run is over, its steps are there once each, and it ended with the bits of a run without a fault."""
    record = RunRecord.load(out)
    assert not record.error
    steps = [line["step"] for line in read_metrics(out) if line["event"] == "step"]
    assert steps == list(range(1, record.result.steps + 1))
    assert same_bits(flat_weights(out), unbroken)
    return record


@pytest.mark.parametrize("fault", ["KILL 0 30", "EXIT 1 2"])
def test_ranks_are_started_again_after_a_fault(tmp_path, unbroken, fault):
    """From the newest checkpoint, or from the start where there is none yet."""
    out = tmp_path / "run"
    done = command([*TRAIN, "--nproc", "2", "--out", out, "--max-restarts", "1"], fault=f"{fault} {tmp_path / 'once'}")
    assert done.returncode == 0, done.stderr
    assert "; restart 1 of 1" in done.stderr
    record = check_whole(out, unbroken)
    assert [line for line in record.warnings if line.startswith("the ranks were restarted")]


def test_a_fault_that_comes_again_ends_the_run(tmp_path):
    words = [*TRAIN, "--nproc", "2", "--out", tmp_path / "run", "--max-restarts", "1"]
    done = command(words, fault="KILL 1 8 never")
    assert done.returncode == 1
    first, last = (line for line in done.stderr.splitlines() if line.startswith("hyperbatch: rank"))
    assert "was killed by SIGKILL" in first
    assert first.endswith("restart 1 of 1")
    assert last.endswith(f"--resume --out {tmp_path / 'run'} continues from the newest checkpoint")


def test_a_mistake_in_the_input_is_not_tried_again(tmp_path):
    done = command([*TRAIN, "--model", "faulty:none", "--nproc", "2", "--out", tmp_path / "run", "--max-restarts", "3"])
    assert done.returncode == 2
    assert "restart" not in done.stderr


def test_torchrun_starts_again_with_resume_auto(tmp_path, unbroken):
    """Its agent keeps a store for all attempts, in which the ranks before have left their addresses."""
    out = tmp_path / "run"
    words = [*TORCHRUN, "--max-restarts", "1", *TRAIN, "--resume", "auto", "--out", out]
    done = command(words, fault=f"KILL 1 30 {tmp_path / 'once'}")
    assert done.returncode == 0, done.stderr
    check_whole(out, unbroken)


@pytest.mark.parametrize("fault", ["parentTERM 1 20", "USR1 1 20"])
def test_a_run_makes_room_with_a_checkpoint_and_goes_on(tmp_path, unbroken, fault):
    """The signal reaches the command, or one of its ranks."""
    out = tmp_path / "run"
    words = [*TRAIN, "--nproc", "2", "--out", out, "--resume", "auto"]
    done = command(words, fault=f"{fault} {tmp_path / 'once'}")
    assert done.returncode == PREEMPTED, done.stderr
    check_preempted(out, done.stderr, fault.split()[0].removeprefix("parent"))
    done = command(words)
    assert done.returncode == 0, done.stderr
    check_whole(out, unbroken)


def check_preempted(out, stderr, name):
    last = read_metrics(out)[-1]["step"]
    line = f"preempted by SIG{name} after step {last}"
    assert RunRecord.load(out).error == line
    assert stderr.strip().endswith(f"hyperbatch: {line}; --resume --out {out} continues from the newest checkpoint")
    assert sorted((out / "checkpoints").glob("step-*.pt"))[-1].name == f"step-{last:08d}.pt"
    assert 19 <= last < 50, "its 20th forward pass is that of step 19: the first one measures the order of gradients"


def test_one_process_makes_room(tmp_path):
    out = tmp_path / "run"
    words = [*TRAIN, "--nproc", "1", "--out", out]
    done = command(words, fault=f"TERM 0 20 {tmp_path / 'once'}")
    assert done.returncode == PREEMPTED, done.stderr
    check_preempted(out, done.stderr, "TERM")


def test_a_run_that_may_not_make_room_ends(tmp_path):
    out = tmp_path / "run"
    words = [*TRAIN, "--nproc", "2", "--out", out, "--preempt-signals", "none"]
    done = command(words, fault=f"parentTERM 0 20 {tmp_path / 'once'}")
    assert done.returncode == 1
    assert "hyperbatch: interrupted by SIGTERM" in done.stderr


def test_torchrun_makes_room_for_its_ranks(tmp_path, unbroken):
    """It passes SIGTERM on to them, and waits."""
    out = tmp_path / "run"
    words = [*TORCHRUN, *TRAIN, "--resume", "auto", "--out", out]
    done = command(words, fault=f"parentTERM 0 20 {tmp_path / 'once'}")
    assert done.returncode != 0
    assert RunRecord.load(out).error.startswith("preempted by SIGTERM after step")
    assert command(words).returncode == 0
    check_whole(out, unbroken)


def test_resume_auto_begins_continues_and_is_done(tmp_path):
    out = str(tmp_path / "run")

    def run(**values):
        return loop.run(config(out=out, resume="auto", **values), Ranks()).result.steps

    assert run(max_steps=12) == 12
    assert run(max_steps=20) == 20
    assert [line["step"] for line in read_metrics(tmp_path / "run") if line["event"] == "step"] == list(range(1, 21))
    before = (tmp_path / "run" / "record.json").stat().st_mtime_ns
    assert run(max_steps=20) == 20
    assert (tmp_path / "run" / "record.json").stat().st_mtime_ns == before
    with pytest.raises(InputError, match=r"differs from that of the saved run: seed 0 -> 3"):
        run(max_steps=20, seed=3)


def test_ctrl_c_ends_a_rank_that_waits_for_the_others(tmp_path):
    """Nobody else comes. The wait itself is in code that runs no handler, and would last for --timeout-s."""
    environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    words = [sys.executable, *TRAIN, "--out", str(tmp_path / "run")]
    with subprocess.Popen(words, env={**os.environ, **environ, "PYTHONPATH": path}) as process:
        try:
            port = f":{int(environ['MASTER_PORT']):04X} "
            while port not in Path(f"/proc/{process.pid}/net/tcp").read_text() + Path("/proc/net/tcp6").read_text():
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert process.wait(60) == -signal.SIGINT
        finally:
            process.kill()


# Ranks agree


def steps_until_preempted(rank, signalled):
    """Ranks that are held together by an exchange, as training ones are. One is signalled, and all leave together."""
    ranks = Ranks(rank=rank, world_size=dist.get_world_size())
    store = dist.distributed_c10d._get_default_store().clone()
    done = 0
    with Preemption("TERM,USR2", ranks, timeout_s=30) as preemption, preemption.watched(store):
        while preemption.may_begin(done + 4):  # a stride of four
            dist.barrier()
            done += 4
            if done == 40 and rank in signalled:
                os.kill(os.getpid(), signal.SIGUSR2 if rank % 2 else signal.SIGTERM)
            time.sleep(0.001 * rank)
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    return done, preemption.reason, {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize("signalled", [(1,), (0, 2), (0, 1, 2)])
def test_all_ranks_stop_after_the_same_step(signalled):
    results = run_ranks(3, steps_until_preempted, signalled)
    steps, reasons, threads = zip(*results, strict=True)
    assert len(set(steps)) == 1
    assert steps[0] >= 40
    assert set(reasons) <= {"SIGTERM", "SIGUSR2"}
    assert "hyperbatch-preempt" not in set().union(*threads)


def test_a_signal_that_comes_during_a_look_at_the_store_is_spread():
    """Ranks that have not heard of it would never answer."""
    preemption = Preemption("USR1", Ranks(rank=0, world_size=2), timeout_s=30)

    class Store:
        asked = ""

        def check(self, keys):
            preemption.saw(signal.SIGUSR1)  # now
            return False

        def set(self, key, value):
            self.asked = value

    store = Store()
    assert not preemption._spread(store), "nobody else knows of it yet"
    assert preemption._spread(store)
    assert store.asked == "SIGUSR1"


class Asked:
    """A store that notes which keys it is asked about."""

    def __init__(self, store):
        self._store, self.keys = store, set()

    def check(self, keys):
        self.keys.update(keys)
        return self._store.check(keys)

    def __getattr__(self, name):
        return getattr(self._store, name)


def wait_for(preemption, problem):
    while preemption._problem != problem:
        time.sleep(0.01)


def agreeing(store, ranks, world_size):
    """Some ranks that agree on a last step in threads of their own; each has begun the step of its number."""
    found = {}
    for rank in ranks:
        preemption = Preemption("USR1", Ranks(rank=rank, world_size=world_size), timeout_s=30)
        assert preemption.may_begin(rank)
        asked = Asked(store)
        thread = threading.Thread(target=preemption._agree, args=(asked,), daemon=True)
        found[rank] = preemption, asked, thread
        thread.start()
    return found


def test_only_rank_0_asks_the_store_about_every_rank():
    """It is a single thread: thousands of ranks that ask about each other would keep it busy past the time limit."""
    store, late = dist.HashStore(), 5
    found = agreeing(store, [rank for rank in range(20) if rank != late], 20)
    wait_for(found[0][0], "; no response from rank 5")
    found |= agreeing(store, [late], 20)
    for rank, (preemption, asked, thread) in found.items():
        thread.join()
        assert preemption.may_begin(19)
        assert not preemption.may_begin(20), "the latest step that any rank has begun is the last"
        assert rank == 0 or asked.keys <= {"latest", "missing"}


@pytest.mark.parametrize(("world_size", "seconds"), [(2, 0.25), (512, 0.25), (4096, 2.0)])
def test_thousands_of_ranks_look_less_often(world_size, seconds):
    assert Preemption("USR1", Ranks(world_size=world_size), timeout_s=30)._interval_s == seconds


def test_ranks_that_do_not_answer_are_named_on_every_other():
    found = agreeing(dist.HashStore(), [0, 1], 4)
    for preemption, _, _ in found.values():
        wait_for(preemption, "; no response from rank 2, 3")
        preemption._timeout_s = 0.0
        with pytest.raises(RunFailed, match="did not agree on a last step; no response from rank 2, 3"):
            preemption.may_begin(5)
        preemption._over.set()


def is_told_to_end(rank, folder, in_background):
    """By an agent, after a fault of the other rank: the command's file does not appear."""
    if in_background:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell has it
    preemption = Preemption("TERM", Ranks(rank=rank, world_size=2), timeout_s=30, parent_file=folder / "preempt")
    store = dist.distributed_c10d._get_default_store().clone()
    with preemption, preemption.watched(store), contextlib.suppress(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)
        return "was not ended"
    return "ended"


def test_a_rank_whose_command_was_not_asked_ends(tmp_path):
    assert run_ranks(2, is_told_to_end, tmp_path, False, may_die=[1]) == ["ended", None]


def test_a_rank_in_the_background_whose_command_was_not_asked_ends(tmp_path):
    assert run_ranks(2, is_told_to_end, tmp_path, True, may_die=[0, 1], timeout_s=30) == [None, None]


def test_ranks_meet_in_a_store_of_dead_ones():
    """Several attempts, each in what the ones before it have left, the last of them with fewer ranks."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("hyperbatch-meet/question-1", "a dead rank's")
    seen = []
    for world_size in (3, 3, 2):
        stores = {}

        def come(rank, world_size=world_size, stores=stores):
            ranks = Ranks(rank=rank, world_size=world_size, master_port=server.port)
            stores[rank] = meet(ranks, 30.0)

        threads = [threading.Thread(target=come, args=(rank,)) for rank in reversed(range(world_size))]
        for thread in threads:
            thread.start()
            time.sleep(0.05)
        for thread in threads:
            thread.join()
        stores[0].set("here", "of this attempt")
        assert all(store.get("here") == b"of this attempt" for store in stores.values())
        seen.append(stores[1])
    seen[0].set("there", "of the first")
    assert not seen[1].check(["there"])


# What the config says


def test_older_records_say_true_or_false():
    values = Config().to_dict()
    for old, new in ((True, "yes"), (False, "no")):
        values["run"]["resume"] = old
        assert Config.from_dict(values).run.resume == new


@pytest.mark.parametrize("names", ["KILL", "SIGTERM", "TERM,", "STOP,USR1", "INT"])
def test_signals_that_no_run_can_handle_are_refused(names):
    with pytest.raises(InputError, match="--preempt-signals"):
        Config().override(preempt_signals=names)
