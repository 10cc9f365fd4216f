"""Worker processes that compile kernels, because Triton's compiler holds Python's lock half of the time.

    command     start ──> one process imports torch and the kernels' modules, hashes Triton, then forks workers
    compiling   job ────> a worker: triton.compile, into Triton's cache on disk ──> done
                          the requesting thread compiles too, and finds the result in the cache

Workers are started before this process loads torch, so that they are ready when the first kernel is requested. They end
with this process, however it ends, because their sockets are closed. A thread compiles the kernels that a worker
cannot. This module imports neither torch nor Triton.
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import importlib
import importlib.util
import inspect
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from hyperbatch.cores import usable_cores

MAX_WORKERS = 12
SPARED_CORES = 3  # for the process, which sets up a run meanwhile
PATIENCE_S = 60.0  # for one kernel; the largest kernels take a few seconds
MODULES = (
    "torch",
    "triton",
    "triton.compiler.code_generator",  # Triton imports it with the first kernel
    "triton.experimental.gluon",
    "hyperbatch.kernels.norm.conv_pool",
    "hyperbatch.kernels.norm.pool",
    "hyperbatch.kernels.norm.product",
    "hyperbatch.kernels.whiten",
    "hyperbatch.kernels.loss",
    "hyperbatch.kernels.layerwise",
    "hyperbatch.kernels.muon",
)
_LENGTH = struct.Struct("<I")

_running: Workers | None = None


class Workers:
    """A number of worker processes, and the process that forked them."""

    def __init__(self, count: int) -> None:
        pairs = [socket.socketpair() for _ in range(count)]
        theirs = [pair[1].fileno() for pair in pairs]
        command = [sys.executable, "-m", "hyperbatch.kernels.workers", *map(str, theirs)]
        quiet = subprocess.DEVNULL  # this process raises the same errors when it compiles the kernel itself
        env = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # no threads, because it forks
        self._parent = subprocess.Popen(command, pass_fds=theirs, env=env, stdin=quiet, stdout=quiet, stderr=quiet)
        self.count = count
        self._sockets = [pair[0] for pair in pairs]
        self._idle: queue.SimpleQueue[socket.socket] = queue.SimpleQueue()
        for ours, other in pairs:
            other.close()
            ours.settimeout(PATIENCE_S)
            self._idle.put(ours)

    def compile(self, compile: Callable[[], Any]) -> bool:
        """Lets an idle worker compile what Triton's closure would compile. Returns whether it did."""
        with contextlib.suppress(queue.Empty):
            job = _job_of(compile)
            if job is None:
                return False
            worker = self._idle.get_nowait()
            try:
                _send(worker, job)
                done = _receive(worker) == b"done"
            except OSError:  # the worker has ended or is too slow, and gets no more jobs
                worker.close()
                return False
            self._idle.put(worker)
            return done
        return False

    def close(self) -> None:
        """Ends the workers without waiting for them, at once or after their current kernel.

        The parent is killed, because with warm caches it may still be importing.
        """
        for worker in self._sockets:
            worker.close()
        self._parent.kill()
        self._parent.wait()


def start() -> None:
    """Starts workers if there are enough cores, for a process that trains on a GPU as the only rank. Call `stop` at the
    end."""
    global _running
    count = min(MAX_WORKERS, usable_cores() - SPARED_CORES)
    if _running is None and count > 1 and importlib.util.find_spec("triton") is not None:
        with contextlib.suppress(OSError):
            _running = Workers(count)


def stop() -> None:
    """Ends the workers. This process then compiles later kernels itself."""
    global _running
    if _running is not None:
        _running.close()
        _running = None


def running() -> Workers | None:
    return _running


def _job_of(compile: Callable[[], Any]) -> bytes | None:
    """Returns all that a call of triton.compile depends on, from Triton's closure. None: its form is unknown to us."""
    try:
        found = inspect.getclosurevars(compile).nonlocals
        source, options = found["src"], found["options"]
        function = source.fn
        name = function.fn.__module__, function.fn.__qualname__, function.cache_key, _fingerprint(function)
        parts = source.signature, source.constants, source.attrs
        return pickle.dumps((name, parts, found["target"], dict(options.__dict__), found["env_vars"]))
    except Exception:
        return None


def functions_of(function: Any) -> list[Any]:
    """Returns a kernel and all functions that it calls, each after those that it calls itself."""
    found, seen = [], set()

    def visit(one: Any) -> None:
        if (place := _place(one)) not in seen:
            seen.add(place)
            for _, value in _globals_of(one):
                if has_key(value):
                    visit(value)
            found.append(one)

    visit(function)
    return found


def has_key(value: Any) -> bool:
    """Whether a value is a function of Triton. Its key is only computed when it is first read."""
    return hasattr(type(value), "cache_key") and hasattr(value, "src")


def _place(function: Any) -> tuple[str, str]:
    return function.fn.__module__, function.fn.__qualname__


def _globals_of(function: Any) -> list[tuple[str, Any]]:
    return [(name, function.fn.__globals__.get(name)) for name in function.fn.__code__.co_names]


def _fingerprint(function: Any) -> str:
    """A hash of the source of a kernel and of all functions that it calls, and of the constants that they use."""
    parts = {}
    for one in functions_of(function):
        module, name = _place(one)
        parts[module, name] = one.src
        constants = [(name, value) for name, value in _globals_of(one) if type(value).__name__ == "constexpr"]
        parts |= {(module, name): repr(value) for name, value in constants}
    return hashlib.sha256(repr(sorted(parts.items())).encode()).hexdigest()


def _compile(job: bytes) -> None:
    """Compiles a job, in a worker."""
    import triton
    from triton.compiler import ASTSource

    (module, name, cache_key, fingerprint), (signature, constants, attrs), *rest = pickle.loads(job)
    target, options, env_vars = rest
    found = getattr(importlib.import_module(module), name)
    function = found if has_key(found) else found.fn  # without our wrapper
    if _fingerprint(function) != fingerprint:
        raise ValueError(f"{module}.{name} has changed since it was asked for")
    # The cache is looked up with the requesting process's key, even if the key is different here.
    _ = function.cache_key
    function.hash = cache_key
    source = ASTSource(fn=function, signature=signature, constexprs=constants, attrs=attrs)
    triton.compile(source, target=target, options=options, _env_vars=env_vars)


def _serve(asked: socket.socket) -> None:
    """Serves jobs until the other end of the socket is closed."""
    while True:
        job = _receive(asked)
        try:
            _compile(job)
            answer = b"done"
        except Exception as error:
            answer = repr(error).encode()
        _send(asked, answer)


def _send(to: socket.socket, data: bytes) -> None:
    to.sendall(_LENGTH.pack(len(data)) + data)


def _receive(source: socket.socket) -> bytes:
    """Raises OSError if the other end is closed."""
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size))
    return _exactly(source, length)


def _exactly(source: socket.socket, length: int) -> bytes:
    data = b""
    while len(data) < length:
        part = source.recv(length - len(data))
        if not part:
            raise ConnectionResetError
        data += part
    return data


def prepare() -> None:
    """Does once what each worker would otherwise do before its first kernel."""
    for module in MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    with contextlib.suppress(Exception):
        from triton import knobs
        from triton.runtime.cache import triton_key

        triton_key()  # hashes Triton itself and caches the result
        _ = knobs.nvidia.ptxas  # asks the assembler for its version and caches the result


def main(descriptors: list[int]) -> None:
    """Prepares and then forks. There are no other threads yet, and no device is in use."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the command; the workers end with it
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    gc.disable()  # objects created here are never freed, and the workers share their memory
    prepare()
    gc.freeze()
    for own in sockets:
        if os.fork() == 0:
            gc.enable()
            for other in sockets:
                if other is not own:
                    other.close()
            with contextlib.suppress(OSError):
                _serve(own)
            os._exit(0)
    for each in sockets:
        each.close()
    with contextlib.suppress(ChildProcessError):
        while True:
            os.wait()


if __name__ == "__main__":
    main([int(text) for text in sys.argv[1:]])
