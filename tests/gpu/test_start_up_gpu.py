"""How a run on a GPU starts: what is begun before torch is loaded, and which kernels are compiled when."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
import torch

from hyperbatch import get_recipe
from hyperbatch.config import BatchPhase, SizePhase
from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks
from hyperbatch.kernels import compile as kernels

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def test_torch_works_in_the_context_that_was_opened_before_it():
    script = """
import ctypes, sys
from hyperbatch.engine import context
context._open()
assert "torch" not in sys.modules
driver = ctypes.CDLL(context.LIBRARY)
flags, active = ctypes.c_uint(), ctypes.c_int()
assert driver.cuDevicePrimaryCtxGetState(0, ctypes.byref(flags), ctypes.byref(active)) == 0
assert active.value == 1
import torch
x = torch.ones(64, 64, device="cuda")
assert (x @ x).sum().item() == 64.0**3
primary, current = ctypes.c_void_p(), ctypes.c_void_p()
assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(primary), 0) == 0
assert driver.cuCtxGetCurrent(ctypes.byref(current)) == 0
assert primary.value is not None and primary.value == current.value
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


# Of the loader, whose thread compiles them meanwhile, and of graphs.
COMPILED_ELSEWHERE = {"draw_kernel", "cut_kernel", "views_kernel", "fill"}


def test_kernels_of_both_sizes_and_of_evaluation_are_compiled_side_by_side(tmp_path, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "kernels"))
    for one in kernels._kernels:
        one.fn.device_caches.clear()
    compiled = []

    def listen(*, src, cache_hit, **_):
        if not cache_hit:
            compiled.append((src.name, threading.current_thread().name))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    config = get_recipe(
        "cifar10",
        dataset="synthetic",
        train_samples=1024,
        eval_samples=256,
        whiten_samples=700,
        batch_phases=(BatchPhase(0, 128),),
        size_phases=(SizePhase(0, 24), SizePhase(1, 32)),
        epochs=2.0,
        device="cuda",
        out=str(tmp_path / "run"),
    )
    record = loop.run(config, Ranks())
    assert not [line for line in record.warnings if "compiled" in line]
    assert record.result.steps == 16
    side_by_side = {name for name, thread in compiled if thread.startswith("compile")}
    assert {"_conv_pool_kernel", "_whiten_kernel", "direction_kernel", "apply_kernel"} <= side_by_side
    assert {name for name, thread in compiled if not thread.startswith("compile")} <= COMPILED_ELSEWHERE


def test_what_launches_kernels_is_made_before_they_are_launched_and_once_for_all_of_the_same_types(
    tmp_path, monkeypatch
):
    """By a C compiler, in Triton 3.6; later versions need none."""
    pytest.importorskip("triton")
    from triton.runtime import build

    from hyperbatch.kernels import norm
    from hyperbatch.models.norm import BatchNorm2d

    layers = [(torch.randn(64, c, 32, 32, device="cuda").half(), BatchNorm2d(c).cuda()) for c in (64, 256)]
    layers = [(x.contiguous(memory_format=torch.channels_last), layer) for x, layer in layers]
    counters = norm.new_counters(torch.device("cuda"))
    norm.statistics(*layers[0], counters)  # Triton has its link to the driver
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for one in kernels._kernels:
        one.fn.device_caches.clear()
    built, make = [], build._build
    monkeypatch.setattr(
        build, "_build", lambda name, *args, **options: built.append(name) or make(name, *args, **options)
    )
    with kernels.compiling():
        for x, layer in layers:
            norm.statistics(x, layer, counters)
    assert len(built) <= 1
    before = list(built)
    for x, layer in layers:
        coef = norm.statistics(x, layer, counters)
        assert torch.allclose(coef[0], x.float().mean((0, 2, 3)), atol=1e-4)
    assert built == before
