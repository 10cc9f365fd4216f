"""An emulated cluster on one Linux machine: a network namespace per host, shaped links, ranks as processes inside.

    host 0   eth0 eth1        host 1   eth0 eth1       nic="rank": one NIC for each rank of a host, a switch per rail
              |    |                    |    |         nic="host": eth0 only, shared by the host's ranks
    switch    +----|--------------------+    |
                   +-------------------------+

Bandwidth is shaped on both ends of every link (tc tbf). Delay is not: tbf delays only traffic that exceeds the rate, so
switch points that depend on latency cannot be validated here. Ranks of one host communicate over its loopback, which is
not shaped.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import multiprocessing
import multiprocessing.connection
import os
import pickle
import re
import secrets
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from hyperbatch.errors import InputError, RunFailed

NAMESPACES = Path("/run/netns")
CLONE_NEWNET = 0x40000000
STORE_PORT = 29517  # in a namespace of our own, which no other program uses
BURST_KB = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class EmulatedCluster:
    """A running cluster. Rank r is on host r // ranks_per_host."""

    hosts: int
    ranks_per_host: int
    mbit: float
    nic: str  # "rank" or "host"
    name: str  # the first part of the names of its namespaces

    @property
    def size(self) -> int:
        return self.hosts * self.ranks_per_host

    @property
    def rails(self) -> int:
        return self.ranks_per_host if self.nic == "rank" else 1

    def namespace(self, host: int) -> str:
        return f"{self.name}-host{host}"

    def address(self, host: int, rail: int) -> str:
        return f"10.77.{rail}.{host + 1}"

    def sent_bytes(self) -> list[list[int]]:
        """[host][rail]: the bytes sent so far, including headers."""
        table = []
        for host in range(self.hosts):
            links = json.loads(_ip("-n", self.namespace(host), "-s", "-j", "link", "show"))
            sent = {link["ifname"]: link["stats64"]["tx"]["bytes"] for link in links}
            table.append([sent[f"eth{rail}"] for rail in range(self.rails)])
        return table

    def run(self, fn: Callable[..., Any], *args: Any, timeout_s: float = 120) -> list[Any]:
        """Returns [fn(rank, *args) for each rank]; each runs in a process on its host, with gloo as the default
        backend.

        fn is passed by name; args and results are pickled. RunFailed names the ranks that raised an error or did not
        answer.
        """
        # Not a plain fork: autograd does not survive one after backward has run. The server imports torch once.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch._dynamo", "hyperbatch.comm", "benchmarks.replay"])
        waiting, processes, results = {}, [], [None] * self.size
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # there is no name server, about which c10d warns
        try:
            for rank in range(self.size):
                mine, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_rank_main, args=(self, rank, fn, args, theirs), daemon=True)
                process.start()
                theirs.close()
                processes.append(process)
                waiting[mine] = rank
            return _collect(waiting, results, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()
            for connection in waiting:
                connection.close()


@contextlib.contextmanager
def emulated_cluster(
    *, hosts: int = 4, ranks_per_host: int = 2, mbit: float = 200.0, nic: str = "rank"
) -> Iterator[EmulatedCluster]:
    """Builds the cluster and removes it at the end. InputError says in one line why it cannot be built."""
    if nic not in ("rank", "host"):
        raise InputError(f"nic {nic!r} is unknown; choose rank (one NIC for each rank) or host (one for each host)")
    if not (1 <= hosts <= 250 and 1 <= ranks_per_host <= 250 and mbit > 0):
        raise InputError(f"no cluster has {hosts} hosts of {ranks_per_host} ranks with links of {mbit} Mbit/s")
    reason = why_not()
    if reason:
        raise InputError(f"the emulated cluster cannot be built here: {reason}")
    _sweep()
    name = f"hyperbatch-{os.getpid()}-{secrets.token_hex(3)}"
    cluster = EmulatedCluster(hosts=hosts, ranks_per_host=ranks_per_host, mbit=mbit, nic=nic, name=name)
    try:
        _build(cluster)
        yield cluster
    finally:
        for path in NAMESPACES.glob(f"{name}-*"):
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def why_not() -> str | None:
    """Returns why this machine cannot emulate a cluster, or None."""
    if sys.platform != "linux":
        return "network namespaces exist on Linux only"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"there is no `{tool}` command; install iproute2"
    probe = f"hyperbatch-{os.getpid()}-{secrets.token_hex(3)}-probe"
    try:
        _ip("netns", "add", probe)
    except RunFailed as error:
        return f"network namespaces may not be made ({error}); run as root, in a container with --privileged"
    try:
        _ip("-n", probe, "link", "add", "eth0", "type", "veth", "peer", "name", "eth1")
        _run("tc", "-n", probe, *_shape("eth0", 100.0))
    except RunFailed as error:
        return f"links may not be shaped ({error})"
    finally:
        subprocess.run(["ip", "netns", "del", probe], capture_output=True, check=False)
    return None


def _build(cluster: EmulatedCluster) -> None:
    switch = f"{cluster.name}-switch"
    _ip("netns", "add", switch)
    for rail in range(cluster.rails):
        _ip("-n", switch, "link", "add", f"br{rail}", "type", "bridge")
        _ip("-n", switch, "link", "set", f"br{rail}", "up")
    for host in range(cluster.hosts):
        home = cluster.namespace(host)
        _ip("netns", "add", home)
        _ip("-n", home, "link", "set", "lo", "up")
        # With several NICs an answer may arrive at another one than the request left by.
        filters = "for f in all default; do echo 0 > /proc/sys/net/ipv4/conf/$f/rp_filter; done"
        _ip("netns", "exec", home, "sh", "-c", filters)
        for rail in range(cluster.rails):
            near, far = f"eth{rail}", f"h{host}r{rail}"
            _ip("link", "add", near, "netns", home, "type", "veth", "peer", "name", far, "netns", switch)
            _ip("-n", home, "addr", "add", f"{cluster.address(host, rail)}/24", "dev", near)
            _ip("-n", switch, "link", "set", far, "master", f"br{rail}")
            for namespace, device in ((home, near), (switch, far)):
                _ip("-n", namespace, "link", "set", device, "up")
                _run("tc", "-n", namespace, *_shape(device, cluster.mbit))


def _shape(device: str, mbit: float) -> list[str]:
    rate = f"{round(mbit * 1e6)}bit"
    return ["qdisc", "add", "dev", device, "root", "tbf", "rate", rate, "burst", f"{BURST_KB}kb", "latency", "50ms"]


def _sweep() -> None:
    """Removes what killed runs left behind. The process id in a name tells whether its run is still alive."""
    for path in NAMESPACES.glob("hyperbatch-*"):
        match = re.match(r"hyperbatch-(\d+)-", path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            subprocess.run(["ip", "netns", "del", path.name], capture_output=True, check=False)


def _ip(*words: str) -> str:
    return _run("ip", *words)


def _run(*words: str) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=30)
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise RunFailed(f"{' '.join(words[:4])}: {said[-1] if said else f'exit code {done.returncode}'}")
    return done.stdout


# -- ranks -------------------------------------------------------------------------------------------------------


def _rank_main(cluster: EmulatedCluster, rank: int, fn: Callable, args: tuple, connection: Any) -> None:
    import torch
    import torch.distributed as dist

    try:
        host, local = divmod(rank, cluster.ranks_per_host)
        _enter(cluster.namespace(host))
        os.environ["GLOO_SOCKET_IFNAME"] = f"eth{local if cluster.nic == 'rank' else 0}"
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"tcp://{cluster.address(0, 0)}:{STORE_PORT}",
            rank=rank,
            world_size=cluster.size,
            timeout=timedelta(seconds=120),
        )
        answer = pickle.dumps((True, fn(rank, *args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    connection.send_bytes(answer)
    connection.close()
    os._exit(0)  # no orderly shutdown: it would wait for ranks that may be gone


def _enter(namespace: str) -> None:
    """Enters the namespace. Call it before any thread is started, because threads inherit the namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = os.open(NAMESPACES / namespace, os.O_RDONLY)
    try:
        if libc.setns(descriptor, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"setns {namespace}")
    finally:
        os.close(descriptor)


def _collect(waiting: dict[Any, int], results: list[Any], timeout_s: float) -> list[Any]:
    """Returns the results of all ranks. `waiting`, pipe -> rank, keeps the ranks that did not answer."""
    deadline, failures = time.monotonic() + timeout_s, {}
    while waiting:
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                good, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                good, value = False, "died without a word"
            connection.close()  # type: ignore[union-attr]
            if good:
                results[rank] = value
            else:
                failures[rank] = value
                deadline = min(deadline, time.monotonic() + 5)  # the other ranks may be waiting for it
    lines = [f"rank {rank}: {text}" for rank, text in sorted(failures.items())]
    lines += [f"rank {rank} did not come back" for rank in sorted(waiting.values())]
    if lines:
        raise RunFailed("\n".join(lines))
    return results
