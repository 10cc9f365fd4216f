"""Processes that compile kernels: they fill Triton's cache, this process compiles nothing, and nothing is left behind.

With Triton's compiler for a GPU that is only played, which is chosen when Triton is loaded: this file runs itself once
more in a process of its own.
"""

# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false, reportArgumentType=false
from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from test_compile_kernel import KIND, PlayedGpu, compiled, played  # noqa: F401

from hyperbatch.kernels import compile as kernels
from hyperbatch.kernels import workers

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))


@pytest.mark.skipif(KIND is not None, reason="starts the other process")
def test_in_a_process_of_its_own(tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    env = {
        **os.environ,
        "HYPERBATCH_TEST_KERNELS": "played",
        "TRITON_CACHE_DIR": str(tmp_path),
        "TRITON_INTERPRET": "0",
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [ROOT, os.environ.get("PYTHONPATH")]))
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """With nothing compiled for it, here or on disk."""
    from triton.runtime import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    gpu = PlayedGpu()
    driver.set_active(gpu)
    for one in kernels._kernels:
        one.fn.device_caches.clear()
    return gpu


@pytest.fixture
def two_workers(gpu, monkeypatch):
    found = workers.Workers(2)
    monkeypatch.setattr(workers, "_running", found)
    yield found
    workers.stop()


def unit_step():
    """Launches of several kernels, in an order that gives their keys in Triton's cache another value than alone."""
    from unit_reference import make

    from hyperbatch.kernels import norm
    from hyperbatch.kernels.norm import unit

    x, layer = make(8, 16, 6, 6)
    counters = norm.new_counters(x.device)
    pooled, coef = unit.pool_statistics(x, layer, counters)
    unit.activate(pooled.value, coef, 0)
    norm.statistics(x, layer, counters)


def family(pid):
    """Processes that were started by this one, or by one of those."""
    found = subprocess.run(["ps", "-e", "-o", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    rows, known = [tuple(map(int, line.split())) for line in found.splitlines()], {pid}
    while more := {child for child, parent in rows if parent in known} - known:
        known |= more
    return known - {pid}


def wait_until(condition):
    for _ in range(600):
        if condition():
            return True
        time.sleep(0.05)
    return False


@played
def test_this_process_compiles_nothing_and_finds_all(two_workers, gpu, compiled):  # noqa: F811
    with kernels.compiling():
        unit_step()
    assert compiled == []
    assert gpu.launchers == 3
    unit_step()
    assert sorted(gpu.launched) == ["_activate_kernel", "_pool_statistics_kernel", "_statistics_kernel"]
    assert compiled == []


@played
def test_what_workers_cannot_do_is_done_here(two_workers, gpu, compiled):  # noqa: F811
    """A module that they cannot import; then workers that are gone."""
    from test_compile_kernel import double

    x, y = torch.zeros(64), torch.zeros(64)
    with kernels.compiling():
        double[(1,)](x, y, 5, BLOCK=64)
    assert [name for name, _ in compiled] == ["double"]
    for pid in family(two_workers._parent.pid):
        os.kill(pid, signal.SIGKILL)
    with kernels.compiling():
        unit_step()
    assert len(compiled) == 4
    assert gpu.launchers == 4


@played
def test_a_kernel_that_has_changed_is_not_compiled_from_its_old_source(monkeypatch):
    from hyperbatch.kernels.norm import unit

    function = unit._activate_kernel.fn
    before = workers._fingerprint(function)
    assert workers._fingerprint(function) == before
    monkeypatch.setattr(unit, "SILU", type(unit.SILU)(7))  # of a function that it calls
    assert workers._fingerprint(function) != before


@pytest.mark.skipif(KIND is not None, reason="needs no GPU")
def test_they_end_with_the_process_that_started_them():
    code = "import time; from hyperbatch.kernels.workers import Workers; w = Workers(2); print(1, flush=True); "
    code += "time.sleep(99)"
    env = {**os.environ, "PYTHONPATH": ROOT}
    process = subprocess.Popen([sys.executable, "-c", code], env=env, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    assert wait_until(lambda: len(family(process.pid)) == 3), "one that forks, and two"
    theirs = family(process.pid)
    for pid in theirs:
        os.kill(pid, signal.SIGINT)  # as Ctrl-C does, which they leave to the command
    time.sleep(0.2)
    assert family(process.pid) == theirs
    process.kill()
    process.wait()
    process.stdout.close()
    alive = lambda: [pid for pid in theirs if os.path.exists(f"/proc/{pid}")]  # noqa: E731
    assert wait_until(lambda: not alive())


@pytest.mark.skipif(KIND is not None, reason="needs no GPU")
def test_they_can_be_stopped_while_they_are_still_loading():
    found = workers.Workers(2)
    found.close()
    assert found._parent.returncode is not None
    assert not found.compile(lambda: None)


@pytest.mark.parametrize(("cores", "count"), [(2, 0), (4, 0), (5, 2), (16, 12), (64, 12)])
def test_as_many_as_there_are_cores_to_spare(monkeypatch, cores, count):
    pytest.importorskip("triton")
    started = []
    monkeypatch.setattr(workers, "Workers", lambda count: started.append(count))
    monkeypatch.setattr(workers, "usable_cores", lambda: cores)
    workers.start()
    assert started == ([count] if count else [])
    monkeypatch.setattr(workers, "_running", None)
