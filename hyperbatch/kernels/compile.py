"""Compiles the variants of kernels in parallel, before their first launch.

    @kernel                     with compiling():     this thread     requests all kernels, then cuDNN's trials
    def add(x, y, N): ...           with asking():    other threads        add  add'  mul  ...   each variant once
    add[grid](x, y, n)                  step()
                                    step()
                                step()                                all variants are compiled

By itself, Triton compiles a variant (types, constants, alignment of pointers) at its first launch: half a second each,
one after the other. If worker processes are available (`kernels.workers`), each thread lets one of them do the work,
because much of it is Python.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from hyperbatch.cores import usable_cores
from hyperbatch.kernels import interpreted, workers

MAX_THREADS = 16
LAUNCHERS = 4  # most launchers that are built at once while kernels are compiled
_kernels: list[Kernel] = []
# Triton's compile mode belongs to one context. Backward runs in autograd's threads, so all threads enter this context.
_mode: contextvars.Context | None = None  # None: kernels are launched, not compiled
_launches = True
_asks = False
_preparation: threading.Thread | None = None


class Kernel:
    """A Triton function: kernel[grid](...) launches it, or requests its compilation inside `compiling`."""

    def __init__(self, fn: Any) -> None:
        self.fn = fn  # Triton's own wrappers use this name too
        self._is_hashed = False
        _kernels.append(self)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        if not _launches or (_mode is not None and interpreted()):
            return lambda *args, **options: None
        if not self._is_hashed:
            self._hash()
        if _mode is None:
            return self.fn[grid]
        context = _mode.copy()  # only one thread at a time can be in a context
        return lambda *args, **options: context.run(self.fn.warmup, *args, grid=grid, **options)

    def _hash(self) -> None:
        """Makes the kernel's key in Triton's cache the same in every run. Triton adds constants of a function to the
        keys of its callers only if it has hashed the function before them, so it is hashed first here."""
        if workers.has_key(self.fn):  # functions of the interpreter have no key
            for function in workers.functions_of(self.fn):
                _ = function.cache_key
        self._is_hashed = True


def kernel(function: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Replaces triton.jit, with its options, for kernels. Functions that kernels call still use triton.jit."""
    import triton

    if function is None:
        return lambda function: Kernel(triton.jit(function, **options))
    return Kernel(triton.jit(function, **options))


def is_compiling() -> bool:
    """Whether kernels are compiled and not launched; their results are then uninitialised memory."""
    return _mode is not None


def is_asking() -> bool:
    """Whether other results may be left uninitialised too, because a step runs only to request its kernels."""
    return _asks


@contextlib.contextmanager
def asking() -> Iterator[None]:
    """Inside `compiling`: convolutions, in any thread, are not computed either (`kernels.conv`), so that all kernels
    of a step are requested at once, and not one by one between cuDNN's trials."""
    global _asks
    _asks = True
    try:
        yield
    finally:
        _asks = False


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Kernels called inside, by any thread, are neither compiled nor launched: to measure the memory of a step."""
    global _launches
    _launches = False
    try:
        yield
    finally:
        _launches = True


def prepare_triton() -> None:
    """Starts a thread that does what Triton would do with its first kernel: it hashes itself (0.4 s), builds its link
    to the driver with a C compiler unless it is cached, and imports more modules (0.1 s). `compiling` waits for it."""
    global _preparation

    def work() -> None:
        with contextlib.suppress(Exception):  # the first kernel would meet the same error again
            from triton.runtime import driver
            from triton.runtime.cache import triton_key

            triton_key()  # remembers it
            _ = driver.active
            import triton.experimental.gluon  # noqa: F401

    _preparation = threading.Thread(target=work, name="prepare-triton", daemon=True)
    _preparation.start()


@contextlib.contextmanager
def compiling(*, ranks: int = 1, count: Callable[[int, int], None] | None = None) -> Iterator[Callable[[], None]]:
    """Kernels called inside, by any thread, are compiled and not launched. Waits for all, and raises the first error.

    Yields a function that waits until most cores are idle again, so that times can be measured. ranks: the number of
    processes of this host that compile at the same time. count: is called with (variants compiled, variants known so
    far) whenever either changes, by the compiling threads, one call at a time.
    """
    import triton

    global _mode
    if _mode is not None:
        raise RuntimeError("compiling() inside of compiling()")
    _wait_for_preparation()
    _parse_one_at_a_time()
    helpers = workers.running()
    with _Pool(_threads(ranks) if helpers is None else helpers.count, count, helpers) as pool:
        mode = triton.AsyncCompileMode(pool)  # everything but the compilation itself happens in the calling thread
        context = contextvars.copy_context()
        context.run(mode.__enter__)
        _mode = context
        try:
            yield lambda: pool.wait(_cores(ranks) // 4)
        finally:
            _mode = None
            pool.shutdown()
            _settle(mode)
    for future in mode.raw_futures:
        future.result()


def _wait_for_preparation() -> None:
    if _preparation is not None:
        _preparation.join()


def _parse_one_at_a_time() -> None:
    """Threads that compile parse Triton's functions. CPython 3.11 and 3.12 count the depth of all trees under
    construction in one variable, and raise a SystemError if two threads build one at the same time (CPython's issue
    106905)."""
    from triton.runtime.jit import JITFunction

    owner = next((base for base in JITFunction.__mro__ if "parse" in vars(base)), None)
    if owner is None:  # an unknown version of Triton
        return
    parse, lock = owner.parse, threading.Lock()
    if not hasattr(parse, "__wrapped__"):

        @functools.wraps(parse)
        def locked(function: Any) -> Any:
            with lock:
                return parse(function)

        owner.parse = locked


class _Pool(ThreadPoolExecutor):
    """Builds launchers while their kernels are compiled: Triton 3.6 runs a C compiler for each combination of types,
    which takes half as long as a small kernel, and later finds the result in its cache."""

    def __init__(self, threads: int, count: Callable[[int, int], None] | None, helpers: workers.Workers | None) -> None:
        super().__init__(max_workers=threads, thread_name_prefix="compile")
        self._helpers = helpers
        makers = max(1, min(LAUNCHERS, threads // 3))
        self._makers = ThreadPoolExecutor(max_workers=makers, thread_name_prefix="launcher")
        self._launchers: dict[str, Future[None]] = {}  # by types
        self._count, self._counting = count, threading.Condition()
        self._done = self._known = 0

    def _note(self, *, done: int = 0, known: int = 0) -> None:
        with self._counting:
            self._done, self._known = self._done + done, self._known + known
            self._counting.notify_all()
            if self._count is not None:
                self._count(self._done, self._known)

    def wait(self, left: int) -> None:
        """Waits until at most `left` of the submitted variants are not compiled yet."""
        with self._counting:
            self._counting.wait_for(lambda: self._known - self._done <= left)

    def submit(self, compile: Callable[[], Any]) -> Future[Any]:
        from triton.runtime import driver

        launcher = self._launcher(compile)

        def work() -> Any:
            try:
                if self._helpers is not None:
                    self._helpers.compile(compile)  # writes to Triton's cache, where the next line finds the result
                compiled = compile()
                if launcher is not None:
                    launcher.result()
                driver.active.launcher_cls(compiled.src, compiled.metadata)  # type: ignore[attr-defined]
            finally:
                self._note(done=1)
            return compiled

        self._note(known=1)
        return super().submit(work)

    def _launcher(self, compile: Callable[[], Any]) -> Future[None] | None:
        """Returns a future that is done when this kernel's launcher is in Triton's cache; None if it is built later."""
        try:
            source = inspect.getclosurevars(compile).nonlocals["src"]
        except (TypeError, KeyError):  # an unknown version of Triton
            return None
        types = re.sub(r"\*\w+", "*", str(list(source.signature.values())))  # all pointers have the same type
        if types not in self._launchers:
            self._launchers[types] = self._makers.submit(_make_launcher, source)
        return self._launchers[types]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        super().shutdown(wait, cancel_futures=cancel_futures)
        self._makers.shutdown(wait, cancel_futures=cancel_futures)


class _Unknown:
    """A placeholder for a kernel's metadata, on which its launcher's code does not depend."""

    def __getattr__(self, name: str) -> None:
        return None


def _make_launcher(source: Any) -> None:
    """Builds a launcher in Triton's cache. Errors are ignored: the compiled kernel's own launcher raises them again."""
    from triton.runtime import driver

    with contextlib.suppress(Exception):
        driver.active.launcher_cls(source, _Unknown())  # type: ignore[attr-defined]


def _cores(ranks: int) -> int:
    """The number of cores that each rank of this host may use."""
    return usable_cores() // ranks


def _threads(ranks: int) -> int:
    """The number of compiling threads; one core is left for the main thread."""
    return max(2, min(MAX_THREADS, _cores(ranks) - 1))


def _settle(mode: Any) -> None:
    """Enters compiled kernels into Triton's tables. Failed kernels are skipped, and a launch compiles them again."""
    from triton import FutureKernel

    for future in mode.future_kernels.values():
        future.result(ignore_errors=True)
    # Triton 3.7 keeps futures in the tables for kernels that failed, or that share a compilation with others.
    for kernel in _kernels:
        for table, *_ in getattr(kernel.fn, "device_caches", {}).values():  # functions of the interpreter have none
            for key, entry in list(table.items()):
                if isinstance(entry, FutureKernel):
                    table[key] = entry.kernel
                    if entry.kernel is None:
                        del table[key]
