"""Kernels compiled side by side: with Triton's compiler for a GPU that is only played, and in its interpreter.

Both are chosen when Triton is loaded, so this file runs itself once more in a process for each.
"""

# pyright: reportArgumentType=false, reportPossiblyUnboundVariable=false
# pyright: reportAttributeAccessIssue=false, reportCallIssue=false
from __future__ import annotations

import ast
import itertools
import os
import subprocess
import sys
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from fused_reference import CLASSES, residual

from hyperbatch.kernels import compile as kernels
from hyperbatch.kernels.compile import asking, compiling, is_compiling, without_launches

KIND = os.environ.get("HYPERBATCH_TEST_KERNELS")
played = pytest.mark.skipif(KIND != "played", reason="runs in the process with a GPU that is played")
interpreted = pytest.mark.skipif(KIND != "interpreted", reason="runs in the process with Triton's interpreter")

if KIND is not None:
    import triton
    import triton.language as tl
    from triton.runtime import driver

    from hyperbatch.kernels.compile import kernel
    from hyperbatch.models import fused

    @kernel
    def double(x, y, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

    @kernel(do_not_specialize=["n"])
    def halve(x, y, n, BLOCK: tl.constexpr):
        at = tl.arange(0, BLOCK)
        tl.store(y + at, tl.load(x + at, mask=at < n) / 2, mask=at < n)

    @kernel
    def wrong(x, BLOCK: tl.constexpr):
        tl.static_assert(BLOCK < 8, "a block of eight")
        tl.store(x, BLOCK)


@pytest.mark.skipif(KIND is not None, reason="starts the other processes")
@pytest.mark.parametrize("kind", ["played", "interpreted"])
def test_in_a_process_of_its_own(kind, tmp_path):
    pytest.importorskip("triton")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-x", __file__]
    env = {**os.environ, "HYPERBATCH_TEST_KERNELS": kind, "TRITON_CACHE_DIR": str(tmp_path)}
    env["TRITON_INTERPRET"] = "1" if kind == "interpreted" else "0"
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


class PlayedGpu:
    """A Hopper for Triton's compiler; it remembers what is launched."""

    def __init__(self):
        self.launched = []
        self.launchers = 0
        self.ahead = []  # threads that made a launcher before its kernel was there
        self.utils = SimpleNamespace(
            load_binary=lambda name, binary, shared, device: (name, name, 0, 0, 1024),
            get_device_properties=lambda device: {"max_shared_mem": 1 << 20},
        )

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, src, metadata):
        if metadata.name is None:
            self.ahead.append(threading.current_thread().name)
            raise OSError("no compiler")  # what goes wrong ahead is no matter
        self.launchers += 1
        return lambda *args: self.launched.append(metadata.name)


@pytest.fixture
def gpu(tmp_path, monkeypatch):
    """With nothing compiled for it."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(kernels, "usable_cores", lambda: 4)
    gpu = PlayedGpu()
    driver.set_active(gpu)
    for one in kernels._kernels:
        one.fn.device_caches.clear()
    return gpu


@pytest.fixture
def compiled(monkeypatch):
    """(name, thread) of all that is compiled anew."""
    seen = []

    def listen(*, src, cache_hit, **_):
        if not cache_hit:
            seen.append((src.name, threading.current_thread().name))

    monkeypatch.setattr(triton.knobs.compilation, "listener", listen)
    return seen


def tables():
    found = [table for one in kernels._kernels for table, *_ in one.fn.device_caches.values()]
    return [entry for table in found for entry in table.values()]


@played
def test_functions_are_parsed_by_one_thread_at_a_time(gpu, monkeypatch):
    """Python 3.11 raises a SystemError where trees are built side by side."""
    parse, inside, seen = ast.parse, [], []

    def watched(*args, **options):
        inside.append(threading.current_thread().name)
        seen.append(tuple(inside))
        time.sleep(0.01)
        try:
            return parse(*args, **options)
        finally:
            inside.pop()

    monkeypatch.setattr(ast, "parse", watched)
    x, y = torch.zeros(64), torch.zeros(64)
    with compiling():
        for block in (16, 32, 64, 128, 256):
            double[(1,)](x, y, 5, BLOCK=block)
    assert len({names[0] for names in seen}) > 1, "threads parse"
    assert {len(names) for names in seen} == {1}


@played
def test_each_variant_is_compiled_once_and_not_launched(gpu, compiled):
    x, y, counts = torch.zeros(64), torch.zeros(64), []
    with compiling(count=lambda *numbers: counts.append(numbers)):
        assert is_compiling()
        for _ in range(2):
            double[(1,)](x, y, 5, BLOCK=64)
        double[(1,)](x, y, 7, BLOCK=64)  # the same to Triton
        double[(1,)](x, y, 16, BLOCK=64)  # divisible by 16
        double[(1,)](x[1:], y, 5, BLOCK=64)  # not aligned
        double[(1,)](x.half(), y, 5, BLOCK=64)
        double[(1,)](x, y, 5, BLOCK=32, num_warps=1)
        for n in (5, 16, 32):
            halve[(1,)](x, y, n, BLOCK=64)
    assert not is_compiling()
    assert sorted(name for name, _ in compiled) == ["double"] * 5 + ["halve"]
    assert counts[0] == (0, 1)
    assert counts[-1] == (6, 6)
    assert all(sum(after) == sum(before) + 1 for before, after in itertools.pairwise(counts))
    assert all(thread.startswith("compile") for _, thread in compiled)
    assert not gpu.launched
    assert gpu.launchers == 6
    assert len(gpu.ahead) == 1, "all take two pointers and a number"
    assert all(thread.startswith("launcher") for thread in gpu.ahead)
    assert len(tables()) == 6
    halve[(1,)](x, y, 48, BLOCK=64)
    double[(1,)](x, y, 9, BLOCK=64)
    assert gpu.launched == ["halve", "double"]
    assert len(compiled) == 6
    double[(1,)](x, y, 1, BLOCK=64)  # one that nobody foresaw
    assert len(compiled) == 7


@played
def test_threads_have_no_influence_on_what_is_compiled(gpu, monkeypatch, tmp_path):
    x, y = torch.zeros(64), torch.zeros(64)
    with compiling():
        double[(1,)](x, y, 5, BLOCK=64)
        halve[(1,)](x, y, 5, BLOCK=64)
    beside = [entry.asm["ptx"] for entry in tables()]
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "other"))
    for one in kernels._kernels:
        one.fn.device_caches.clear()
    double[(1,)](x, y, 5, BLOCK=64)
    halve[(1,)](x, y, 5, BLOCK=64)
    assert [entry.asm["ptx"] for entry in tables()] == beside


@played
def test_a_kernel_is_found_in_the_cache_whatever_else_was_compiled_before_it(gpu):
    from hyperbatch.kernels.norm import two_pass
    from hyperbatch.kernels.workers import functions_of

    one = two_pass._reduce_kernel
    *called, itself = functions_of(one.fn)
    assert itself is one.fn
    assert {"add_partials", "finish_backward", "own_rows"} <= {function.fn.__name__ for function in called}

    def forget():
        for function in (*called, itself):
            function.hash, function.used_global_vals = None, {}
        one._is_hashed = False

    forget()
    for function in called:  # by other kernels
        _ = function.cache_key
    expected = itself.cache_key
    forget()
    _ = one[(1,)]
    assert itself.cache_key == expected
    assert {name for name, _ in itself.used_global_vals} == {"PARTIALS", "PARTIALS_AHEAD"}


@played
def test_the_first_kernel_waits_for_what_prepares_triton(gpu, monkeypatch):
    from triton.runtime import cache

    begun, prepared = threading.Event(), threading.Event()

    def key():
        begun.wait()
        prepared.set()

    monkeypatch.setattr(cache, "triton_key", key)
    monkeypatch.setattr(kernels, "_preparation", None)
    kernels.prepare_triton()
    assert not prepared.is_set()
    threading.Timer(0.05, begun.set).start()
    with compiling():
        assert prepared.is_set()


@played
def test_a_measurement_waits_until_most_cores_are_idle(gpu):
    x, counts = torch.zeros(64), [(0, 0)]
    with compiling(count=lambda *numbers: counts.append(numbers)) as wait_for_cores:
        wait_for_cores()  # for nothing
        for size in (8, 16, 32, 64):
            double[(1,)](x, x, 5, BLOCK=size)
        wait_for_cores()
        done, known = counts[-1]
        assert known == 4
        assert done >= 3, "one of four cores may be busy"
    assert counts[-1] == (4, 4)


@played
def test_other_threads_compile_too(gpu, compiled):
    """Backward runs in threads of autograd's."""
    x = torch.zeros(64)
    with compiling():
        thread = threading.Thread(target=lambda: double[(1,)](x, x, 5, BLOCK=64))
        thread.start()
        thread.join()
        double[(1,)](x, x, 5, BLOCK=64)
    assert [name for name, _ in compiled] == ["double"]
    assert not gpu.launched


@played
def test_what_cannot_be_compiled_is_told_and_the_rest_is_there(gpu, compiled):
    x = torch.zeros(64)

    def step():
        with compiling():
            wrong[(1,)](x, BLOCK=8)
            wrong[(1,)](x, BLOCK=4)
            double[(1,)](x, x, 5, BLOCK=64)

    with pytest.raises(triton.CompilationError, match="a block of eight"):
        step()
    assert not is_compiling()
    assert sorted(name for name, _ in compiled) == ["double", "wrong"]
    with pytest.raises(triton.CompilationError, match="a block of eight"):
        wrong[(1,)](x, BLOCK=8)
    wrong[(1,)](x, BLOCK=4)
    double[(1,)](x, x, 5, BLOCK=64)
    assert gpu.launched == ["wrong", "double"]
    assert len(compiled) == 2


@played
def test_a_step_that_breaks_off_leaves_nothing_half_done(gpu):
    x = torch.zeros(64)

    def step():
        with compiling():
            double[(1,)](x, x, 5, BLOCK=64)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        step()
    assert not is_compiling()
    assert not any(isinstance(entry, triton.FutureKernel) for entry in tables())
    double[(1,)](x, x, 5, BLOCK=64)
    assert gpu.launched == ["double"]
    with compiling(), pytest.raises(RuntimeError, match="inside"), compiling():
        pass


@played
def test_a_fused_network_finds_all_its_kernels(gpu, compiled, monkeypatch):
    monkeypatch.setattr(fused, "interpreted", lambda: True)  # a CPU will do
    model = residual(blocks=(1,), widths=(16,)).to(torch.float16, memory_format=torch.channels_last)
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.float()
    fused.fuse(model)
    images = torch.zeros(2, 3, 32, 32, dtype=torch.float16)

    def step():
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images), torch.arange(2) % CLASSES).backward()

    known = []
    with compiling(count=lambda done, count: known.append(count)):
        with asking(), monkeypatch.context() as patched:
            patched.setattr(torch.ops.aten, "convolution", None)  # not even asked
            patched.setattr(torch.ops.aten, "convolution_backward", None)
            step()
        asked = max(known)
        step()
    assert max(known) == asked, "a step whose convolutions are computed needs no other kernels"
    names = [name for name, _ in compiled]
    assert len(names) == asked
    of_norms = {"_statistics_kernel", "_one_pass_kernel", "_one_pass_join_backward_kernel"}
    assert of_norms | {"_pool_kernel", "_pool_apply_kernel"} <= set(names)
    assert not gpu.launched
    step()
    assert set(gpu.launched) == set(names)
    assert len(compiled) == len(names)


@interpreted
def test_the_interpreter_launches_nothing_meanwhile():
    x, y = torch.arange(8.0), torch.full((8,), torch.nan)
    with compiling():
        assert is_compiling()
        double[(1,)](x, y, 8, BLOCK=8)
    assert y.isnan().all()
    double[(1,)](x, y, 8, BLOCK=8)
    assert torch.equal(y, 2 * x)


@interpreted
def test_interpreted_networks_are_as_before():
    def outcome(first):
        torch.manual_seed(0)
        model = residual(blocks=(1,), widths=(16,), small_stem=True)
        fused.fuse(model)
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        images = torch.randn(2, 3, 4, 4)
        if first:
            with compiling():
                model(images).sum().backward()
            model.zero_grad()
            model.load_state_dict(buffers, strict=False)
        (model(images) ** 2).sum().backward()
        return [param.grad for param in model.parameters()] + list(model.buffers())

    for got, expected in zip(outcome(first=True), outcome(first=False), strict=True):
        assert torch.equal(got, expected)


def test_threads_are_shared_by_the_ranks_of_a_host(monkeypatch):
    monkeypatch.setattr(kernels, "usable_cores", lambda: 64)
    assert [kernels._threads(ranks) for ranks in (1, 4, 8, 64)] == [16, 15, 7, 2]


def test_all_kernels_that_are_launched_in_a_step_are_covered():
    """A plain triton.jit would be launched on the rubbish that the others leave."""
    pytest.importorskip("triton")
    from hyperbatch.kernels import layerwise, loss
    from hyperbatch.kernels.norm import moments, one_pass, pool, product, two_pass

    for module in (layerwise, loss, moments, one_pass, pool, product, two_pass):
        found = [value for name, value in vars(module).items() if name.endswith("_kernel")]
        assert found
        assert all(isinstance(value, kernels.Kernel) for value in found)


@interpreted
def test_without_launches_kernels_do_nothing():
    x, y = torch.ones(8), torch.zeros(8)
    with without_launches():
        double[(1,)](x, y, 8, BLOCK=8)
    assert not y.any()
    double[(1,)](x, y, 8, BLOCK=8)
    assert (y == 2).all()


@interpreted
def test_without_launches_a_fused_step_takes_its_memory_and_runs_through():
    model, images = residual(blocks=(1,), widths=(16,)), torch.randn(4, 3, 16, 16)
    fused.fuse(model)
    with without_launches():
        model(images).sum().backward()
    assert all(param.grad is not None for param in model.parameters())
