"""What a run loads before its first step: seconds that every user waits for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from hyperbatch import get_recipe, launch
from hyperbatch.callbacks import NO_HOOKS
from hyperbatch.engine import context
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import Preempted, notes_of


def test_training_does_not_load_torch_compile_nor_decoders_that_it_does_not_need(tmp_path):
    script = f"""
import gc, sys
from hyperbatch.cli import main
frozen, unfreeze = [], gc.unfreeze
gc.unfreeze = lambda: (frozen.append(gc.get_freeze_count()), unfreeze())
run = ["--nproc", "1", "--max-steps", "2", "--precision", "bf16", "--out", {str(tmp_path / "run")!r}]
code = main(["train", "digits", *run])
assert code in (0, 3), code
assert "torch" in sys.modules
unneeded = ("torch._dynamo", "torch._inductor", "torch.distributed.elastic", "sympy", "torchvision")
loaded = [name for name in unneeded if name in sys.modules]
assert not loaded, loaded
assert gc.isenabled()
assert frozen[0] > 100_000, frozen
assert gc.get_freeze_count() == 0
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


class Driver:
    """Answers `error` to its `failing` function, and remembers what it was asked."""

    def __init__(self, failing: str = "", error: int = 100) -> None:
        self.failing, self.error, self.asked = failing, error, []

    def __getattr__(self, name: str):
        def function(*args):
            self.asked.append(name)
            return self.error if name == self.failing else 0

        return function


@pytest.mark.parametrize(
    ("failing", "asked"),
    [
        ("", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
        ("cuInit", ["cuInit"]),
        ("cuDeviceGet", ["cuInit", "cuDeviceGet"]),
        ("cuDevicePrimaryCtxRetain", ["cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain"]),
    ],
)
def test_a_context_is_opened_as_far_as_the_driver_goes(monkeypatch, failing, asked):
    driver = Driver(failing)
    monkeypatch.setattr(context.ctypes, "CDLL", lambda name: driver)
    context._open()
    assert driver.asked == asked


def test_without_a_driver_there_is_no_context_and_no_noise(monkeypatch, capfd):
    monkeypatch.setattr(context, "LIBRARY", "libno-such-library.so.1")
    monkeypatch.setenv("CUDA_MODULE_LOADING", "EAGER")  # a user's own wish
    before = set(threading.enumerate())
    context.open_context()
    for thread in set(threading.enumerate()) - before:
        thread.join()
    assert capfd.readouterr() == ("", "")
    assert os.environ["CUDA_MODULE_LOADING"] == "EAGER"


@pytest.mark.parametrize(
    ("device", "gpus", "world_size", "opened"),
    [("auto", 1, 1, True), ("cuda", 8, 1, True), ("cpu", 1, 1, False), ("auto", 0, 1, False), ("auto", 2, 2, False)],
)
def test_a_run_of_one_process_on_a_gpu_begins_with_its_context_and_helpers(
    monkeypatch, device, gpus, world_size, opened
):
    begun = []
    monkeypatch.setattr(launch, "count_gpus", lambda: gpus)
    monkeypatch.setattr(launch, "open_context", lambda: begun.append("context"))
    monkeypatch.setattr(launch.workers, "start", lambda: begun.append("workers"))
    monkeypatch.setattr(launch, "_train_as", lambda *args: "record")
    config = get_recipe("digits", device=device)
    assert launch._train_here(config, Ranks(world_size=world_size), NO_HOOKS) == "record"
    assert begun == (["context", "workers"] if opened else [])


def test_sigterm_before_the_first_step_is_a_preemption(tmp_path, monkeypatch):
    """A scheduler that starts jobs with exit code 75 again would lose those that it stops while they start."""

    def begins(*args, **options):
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(launch, "_train_here", begins)
    config, before = get_recipe("digits", nproc=1, out=str(tmp_path / "run")), signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted, match="preempted by SIGTERM; no checkpoint had been saved yet"):
        launch.train(config)
    with pytest.raises(KeyboardInterrupt) as ended:
        launch.train(config.override(preempt_signals=None))
    assert notes_of(ended.value)[0].startswith("no checkpoint had been saved yet")
    # A launcher ends the other ranks by it when one has failed: to start that again would not help.
    monkeypatch.setattr(launch, "find_ranks", lambda: Ranks(rank=1, world_size=2))
    with pytest.raises(KeyboardInterrupt):
        launch.train(config)
    assert signal.getsignal(signal.SIGTERM) is before
