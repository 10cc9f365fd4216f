"""Finds the rank of this process, alone or started by torchrun, Slurm or Open MPI, and joins it with the others.

`find_ranks` only reads environment variables, so it can be called before torch is loaded; `join` does the rest.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import threading
import time
import weakref
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from hyperbatch.cores import usable_cores
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.kernels import leave_processors
from hyperbatch.memory import freed_memory_kept
from hyperbatch.plan.types import RankGrid

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

RESOLVE_S = 60.0  # time for the name of rank 0's host to resolve
MANY_RANKS = 64  # from this number on, opening sockets between all pairs of ranks takes too long
FILES_PER_RANK = 4  # files per rank that a process may open: rank 0 may host the store, to which ranks connect twice
FILES = 4096  # other files that it may open


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """The rank of this process among all processes. `local_*` refers to the processes of this host."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_size: int = 1
    launcher: str = "none"
    master_addr: str = "127.0.0.1"
    master_port: int = 0
    agent_store: bool = False  # torchrun's agent runs the store at that address


def find_ranks(environ: Mapping[str, str] = os.environ) -> Ranks | None:
    """Returns the ranks as set by a launcher, or None if no launcher started this process (or Slurm only this one)."""
    for read in (_torchrun, _slurm, _open_mpi):
        ranks = read(environ)
        if ranks is not None:
            return ranks
    return None


def _torchrun(env: Mapping[str, str]) -> Ranks | None:
    if "RANK" not in env or "WORLD_SIZE" not in env:
        return None
    return Ranks(
        rank=_int(env, "RANK"),
        world_size=_int(env, "WORLD_SIZE"),
        local_rank=_int(env, "LOCAL_RANK", "0"),
        local_size=_int(env, "LOCAL_WORLD_SIZE", "1"),
        launcher="torchrun",
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_int(env, "MASTER_PORT", "29500"),
        agent_store=env.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
    )


def _slurm(env: Mapping[str, str]) -> Ranks | None:
    # A batch script has SLURM_PROCID too; only a step started by srun has SLURM_STEP_ID.
    if "SLURM_STEP_ID" not in env or "SLURM_PROCID" not in env or _int(env, "SLURM_NTASKS", "1") == 1:
        return None
    node = _int(env, "SLURM_NODEID", "0")
    per_node = _tasks_per_node(env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE", "1"))
    nodes = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST", "127.0.0.1")
    port = _port_of(f"{_int(env, 'SLURM_JOB_ID', '0')}.{env['SLURM_STEP_ID']}")
    return Ranks(
        rank=_int(env, "SLURM_PROCID"),
        world_size=_int(env, "SLURM_NTASKS"),
        local_rank=_int(env, "SLURM_LOCALID", "0"),
        local_size=per_node[min(node, len(per_node) - 1)],
        launcher="slurm",
        master_addr=env.get("MASTER_ADDR") or first_host(nodes),
        master_port=_int(env, "MASTER_PORT", str(port)),
    )


def _open_mpi(env: Mapping[str, str]) -> Ranks | None:
    if "OMPI_COMM_WORLD_RANK" not in env:
        return None
    world_size, local_size = _int(env, "OMPI_COMM_WORLD_SIZE"), _int(env, "OMPI_COMM_WORLD_LOCAL_SIZE", "1")
    if world_size > local_size and "MASTER_ADDR" not in env:
        raise InputError("mpirun over several hosts: pass the first host's address, -x MASTER_ADDR=HOST")
    return Ranks(
        rank=_int(env, "OMPI_COMM_WORLD_RANK"),
        world_size=world_size,
        local_rank=_int(env, "OMPI_COMM_WORLD_LOCAL_RANK", "0"),
        local_size=local_size,
        launcher="openmpi",
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_int(env, "MASTER_PORT", str(_mpi_port(env))),
    )


def _mpi_port(env: Mapping[str, str]) -> int:
    """Returns a port for this job, so that two jobs on one host do not connect to each other. Open MPI 5 stores the
    job's name in PMIX_NAMESPACE, version 4 in the other variable."""
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    return 29_500 if job is None else _port_of(job)


def _port_of(job: str) -> int:
    """Returns a port that is the same on all ranks of a job, and mostly differs between jobs. It is below the range of
    ports that the kernel assigns by itself."""
    return 20_000 + zlib.crc32(job.encode()) % 12_000


def _int(env: Mapping[str, str], name: str, default: str | None = None) -> int:
    text = env.get(name, default)
    if text is None or not text.isdigit():
        raise InputError(f"environment variable {name}={text!r} is not a whole number; check the launcher")
    return int(text)


def _tasks_per_node(text: str) -> list[int]:
    """Parses Slurm's run-length form: "4(x2),3" means 4, 4, 3."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if match is None:
            raise InputError(f"environment variable SLURM_TASKS_PER_NODE={text!r} cannot be parsed; check the launcher")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def first_host(nodes: str) -> str:
    """Returns the first host of Slurm's compressed list: "rack[1-2]node[03-07,9],login1" gives rack1node03."""
    match = re.match(r"((?:[^,\[\]]|\[\d[\d,-]*\])+)(?:,|$)", nodes)
    if match is None:
        raise InputError(f"the Slurm node list {nodes!r} cannot be parsed; set MASTER_ADDR")
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", match[1])


@contextlib.contextmanager
def join(ranks: Ranks, device: str, timeout_s: float) -> Iterator[torch.device]:
    """A context that chooses this rank's device and keeps the process group open."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here; use --device cpu or check the driver")
    chosen = (
        torch.device("cuda", _gpu_index(ranks, torch.cuda.device_count())) if device == "cuda" else torch.device("cpu")
    )
    if chosen.type == "cuda":
        torch.cuda.set_device(chosen)
    elif ranks.local_size > 1 and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, usable_cores() // ranks.local_size))
    memory = freed_memory_kept() if chosen.type == "cpu" else contextlib.nullcontext()
    with memory, open_group(ranks, chosen, timeout_s):
        yield chosen


@contextlib.contextmanager
def open_group(ranks: Ranks, device: torch.device, timeout_s: float) -> Iterator[None]:
    """A context that opens the process group of all ranks. It opens none if this rank is alone, or if the caller has
    already opened one, which the caller then closes."""
    import torch.distributed as dist

    if ranks.world_size == 1 or dist.is_initialized():
        if ranks.world_size > 1:
            host_group(timeout_s)
        _leave_processors_to_nccl(ranks)
        yield
        return
    from hyperbatch.engine import stores  # imports torch's rendezvous, which a single rank does not need

    os.environ.setdefault("NCCL_MAX_CTAS", "32")
    if ranks.world_size >= MANY_RANKS:  # gloo then connects two ranks at their first message
        os.environ.setdefault("TORCH_GLOO_LAZY_INIT", "1")
    _allow_files(FILES_PER_RANK * ranks.world_size + FILES)
    _leave_processors_to_nccl(ranks)
    resolve(ranks.master_addr, min(timeout_s, RESOLVE_S))
    # Other ranks may never join, and no signal handler runs while this rank waits.
    with signals_kill(), _connection_told(ranks):
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=stores.meet(ranks, timeout_s) if ranks.agent_store else stores.own_store(ranks, timeout_s),
            rank=ranks.rank,
            world_size=ranks.world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    try:
        yield
    except BaseException:
        leave_group(device)
        raise
    dist.destroy_process_group()


@contextlib.contextmanager
def _connection_told(ranks: Ranks) -> Iterator[None]:
    """A context in which this rank connects to the others; an error of torch becomes a RunFailed of one line."""
    import torch.distributed as dist

    try:
        yield
    except RunFailed:
        raise
    except (dist.DistError, RuntimeError) as error:  # gloo raises plain RuntimeError
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        advice = (
            "check that the hosts reach each other; if they have several networks, set GLOO_SOCKET_IFNAME and "
            "NCCL_SOCKET_IFNAME to the interface that they share"
        )
        if "EADDRINUSE" in reason:
            advice = f"set MASTER_PORT to a free port instead of {ranks.master_port}"
        raise RunFailed(f"this rank could not connect to the others: {reason}; {advice}") from error


def resolve(host: str, timeout_s: float) -> None:
    """Raises InputError if the name of rank 0's host cannot be resolved. The name may take a while to appear, for
    example that of a pod."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            socket.getaddrinfo(host, None)
            return
        except socket.gaierror as error:
            if time.monotonic() > deadline:
                raise InputError(
                    f"the host of rank 0, {host!r}, cannot be found: {error.strerror}; set MASTER_ADDR to a name or "
                    f"address that every host can reach"
                ) from None
        time.sleep(min(1.0, timeout_s / 10))


@contextlib.contextmanager
def signals_kill() -> Iterator[None]:
    """A context in which Ctrl-C and SIGTERM end this process at once, wherever it waits. There is nothing to save
    yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _allow_files(wanted: int) -> None:
    """Raises the limit of open files as far as the administrator allows. It is often 1,024, and sockets count as
    files."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < enough:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough, hard))


def _leave_processors_to_nccl(ranks: Ranks) -> None:
    """Reserves one multiprocessor for each thread block of NCCL, so that fused norms need not wait for an
    all-reduce."""
    limit = os.environ.get("NCCL_MAX_CTAS", "")
    leave_processors(int(limit) if ranks.world_size > 1 and limit.isdigit() else None)


def leave_group(device: torch.device) -> None:
    """Leaves the process group after an error. Other ranks may be gone, so NCCL must not wait for its collectives."""
    import torch.distributed as dist

    if device.type != "cuda":
        dist.destroy_process_group()
        return
    with contextlib.suppress(Exception):  # the original error is the one to report
        dist.distributed_c10d._abort_process_group()


_host_groups: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()


def host_group(timeout_s: float = 300.0) -> dist.ProcessGroup | None:
    """Returns the process group for Python objects and CPU tensors: None for the default group, or an additional gloo
    group if the caller opened the default one for GPUs only. The first call, by `join` on all ranks, creates it."""
    import torch
    import torch.distributed as dist

    world = dist.group.WORLD
    assert world is not None
    if torch.device("cpu") in world._device_types:
        return None
    if world not in _host_groups:
        _host_groups[world] = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    return _host_groups[world]


def _gpu_index(ranks: Ranks, gpus: int) -> int:
    """Returns the index of this rank's GPU among those it sees: all of the host's, or only its own (srun
    --gpus-per-task=1, torchrun --virtual-local-rank)."""
    if gpus == 1 and ranks.launcher == "slurm":
        return 0
    if ranks.local_rank >= gpus:
        error = InputError(
            f"there is no GPU for local rank {ranks.local_rank} on {socket.gethostname()}, where torch sees {gpus}; "
            "start one process per GPU"
        )
        error.on_host = ranks.local_rank > gpus  # the first rank without a GPU prints it
        raise error
    return ranks.local_rank


@contextlib.contextmanager
def errors_shared(ranks: Ranks) -> Iterator[None]:
    """A context for work that each rank does alone. An InputError on one rank is raised on all, so that none waits
    forever."""
    problem = None
    try:
        yield
    except InputError as error:
        if ranks.world_size == 1:
            raise
        problem = str(error)
    problems = gather(problem, ranks)
    found = {text: rank for rank, text in reversed(list(enumerate(problems))) if text is not None}
    if found:
        text, rank = min(found.items(), key=lambda item: item[1])
        raise InputError(text if None not in problems else f"rank {rank}: {text}")


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """A context in which SIGTERM ends the run as Ctrl-C does, so that its folder stays readable. It has an effect in
    the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Terminated(KeyboardInterrupt):
    """Raised by SIGTERM, which then ends a run as Ctrl-C does."""


def interrupt(*_: object) -> None:
    """The handler of `ended_by_sigterm`."""
    raise Terminated


def host_grid(ranks: Ranks) -> RankGrid:
    """Returns the grid of hosts x ranks per host, or one row if the numbers of ranks per host differ. Every rank must
    call it: a rank knows only its own host, and the grid must be the same on all ranks.
    """
    sizes = gather(ranks.local_size, ranks)
    return RankGrid.of_hosts(ranks.world_size, sizes[0] if len(set(sizes)) == 1 else ranks.world_size)


def gather(value: Any, ranks: Ranks) -> list[Any]:
    """Returns the values of all ranks, on every rank."""
    if ranks.world_size == 1:
        return [value]
    import torch.distributed as dist

    values = [None] * ranks.world_size
    dist.all_gather_object(values, value, group=host_group())
    return values


def gather_on_first(value: Any, ranks: Ranks) -> list[Any]:
    """Returns the values of all ranks on rank 0, and [] on the others. For values that are too large for `gather`."""
    if ranks.world_size == 1:
        return [value]
    import torch.distributed as dist

    values = [None] * ranks.world_size if ranks.rank == 0 else None
    dist.gather_object(value, values, dst=0, group=host_group())
    return values or []


def share(value: Any, ranks: Ranks) -> Any:
    """Returns rank 0's value on every rank."""
    if ranks.world_size == 1:
        return value
    import torch.distributed as dist

    box = [value]
    dist.broadcast_object_list(box, src=0, group=host_group())
    return box[0]
