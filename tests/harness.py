"""Runs a function on several ranks: forked processes that share one import of torch and meet at a file.

On CPUs they talk through gloo, one thread each. With `cuda=True` they share the first GPU and talk through NCCL, each
as a host of its own (see `one_gpu`). A rank that raises fails the test with its traceback; ranks that are stuck are
named with their stacks and killed.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

# Not plain fork: the test process may have run backward already, and autograd does not survive a fork after that.
# The fork server imports torch once (dynamo too, which every DDP asks for), does nothing else, and every rank is a fork
# of it.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "torch._dynamo", "hyperbatch.comm", "hyperbatch.arena", "pytest"])


class RankFailed(AssertionError):
    """A rank raised, died or got stuck."""


def one_gpu(rank: int) -> dict[str, str]:
    """What lets several NCCL ranks share a GPU, which NCCL refuses to ranks of one host: each is a host of its own.

    They talk over sockets on loopback. Values, order, capture, hangs and faults are those of several GPUs; speeds are
    not.
    """
    off = dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1")
    return {"NCCL_HOSTID": f"host{rank}", "NCCL_SOCKET_IFNAME": "lo", "GLOO_SOCKET_IFNAME": "lo", **off}


def run_ranks(
    world_size: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout_s: float = 60,
    collective_timeout_s: float = 30,
    may_die: Sequence[int] = (),
    cuda: bool = False,
    backend: str | None = None,
) -> list[Any]:
    """[fn(rank, *args) for each rank], each in a process of its own with the default process group initialised.

    fn is a function of a test module (it travels by name); args and results are pickled. collective_timeout_s: of the
    process group. may_die: ranks that may be killed; their result is None. backend: "gloo", or with `cuda`
    "cpu:gloo,cuda:nccl", unless given.
    """
    backend = backend or ("cpu:gloo,cuda:nccl" if cuda else "gloo")
    with tempfile.TemporaryDirectory() as folder:
        group = (backend, cuda, world_size, folder, collective_timeout_s)
        ranks = [_start(rank, fn, args, group) for rank in range(world_size)]
        try:
            return _collect(ranks, timeout_s, set(may_die), Path(folder))
        finally:
            for process, connection in ranks:
                process.kill()
                process.join()
                process.close()
                connection.close()


def _start(rank: int, fn: Callable, args: tuple, group: tuple):
    mine, theirs = _context.Pipe(duplex=False)
    process = _context.Process(
        target=_rank_main, args=(rank, fn, args, *group, theirs, list(sys.path)), name=f"rank {rank}", daemon=True
    )
    process.start()
    theirs.close()
    return process, mine


def _collect(ranks: list, timeout_s: float, may_die: set[int], folder: Path) -> list[Any]:
    deadline = time.monotonic() + timeout_s
    results: list[Any] = [None] * len(ranks)
    failures: dict[int, str] = {}
    waiting = {connection: rank for rank, (_, connection) in enumerate(ranks)}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                if rank not in may_die:
                    ranks[rank][0].join()
                    failures[rank] = f"died with exit code {ranks[rank][0].exitcode}"
                continue
            if ok:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + 5)  # the others may be waiting for it in vain
    if waiting or failures:
        stuck = sorted(waiting.values())
        lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
        lines += [f"rank {rank} was stuck at:\n{_stack(ranks[rank][0].pid, folder / f'stack{rank}')}" for rank in stuck]
        raise RankFailed("\n".join(lines))
    return results


def _stack(pid: int, file: Path) -> str:
    os.kill(pid, signal.SIGUSR1)  # faulthandler then writes all threads' stacks
    time.sleep(0.2)
    return file.read_text() if file.exists() else "(unknown)"


def _rank_main(
    rank: int,
    fn: Callable,
    args: tuple,
    backend: str,
    cuda: bool,
    world_size: int,
    folder: str,
    collective_timeout_s: float,
    connection: Any,
    path: list[str],
) -> None:
    import torch
    import torch.distributed as dist

    sys.path[:] = path
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which a shell's background job would ignore
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    if cuda:
        os.environ.update(one_gpu(rank))
        torch.cuda.set_device(0)
    with open(f"{folder}/stack{rank}", "w") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=True)
        try:
            dist.init_process_group(
                backend,
                init_method=f"file://{folder}/store",
                rank=rank,
                world_size=world_size,
                timeout=timedelta(seconds=collective_timeout_s),
            )
            answer = pickle.dumps((True, fn(rank, *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
        connection.close()
        # No tidy shutdown: it would wait for ranks that are gone, and each test's groups die with their processes.
        os._exit(0)
