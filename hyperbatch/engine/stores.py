"""The key-value stores through which ranks find each other. If all ranks are on one host, they listen on loopback.

    torchrun's agent, or ours    hosts one store for all attempts; each attempt uses a new part of it (`meet`)
    srun, mpirun                 rank 0 hosts one (`own_store`)

torch itself would listen on every interface, and anyone who can connect to a store may write to it.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import contextlib
import ipaddress
import socket
import time
import uuid
from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)

from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import RunFailed

LOOPBACK = "127.0.0.1"
ONE_HOST = "hyperbatch"  # the name of the rendezvous of a single agent
AGENT_S = 300.0  # timeout of a request of the agent to its own store
JOIN_S = 60.0  # least time for all ranks to join: on a busy host, loading torch may take some ranks much longer


def listening_at(address: str, port: int, timeout_s: float) -> dist.TCPStore:
    """Returns a store that this process hosts. port: 0 means any free port."""
    with contextlib.ExitStack() as undo:
        listener = undo.enter_context(socket.create_server((address, port), family=_family(address)))
        port = listener.getsockname()[1]
        store = dist.TCPStore(
            address,
            port,
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=timeout_s),
            master_listen_fd=listener.fileno(),
        )
        listener.detach()  # the store closes it
    return store


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def own_store(ranks: Ranks, timeout_s: float) -> dist.Store:
    """Returns a store hosted by rank 0 once all ranks have connected. On several hosts it listens at rank 0's IP
    address. If a host name is given instead, it listens on every interface, because hosts may resolve the name
    differently."""
    store, wait = _opened(ranks, timeout_s), timedelta(seconds=max(timeout_s, JOIN_S))
    store.set(f"hyperbatch-joined-{ranks.rank}", "")
    if store.add("hyperbatch-joined", 1) == ranks.world_size:
        store.set("hyperbatch-all-joined", "")
    try:
        store.wait(["hyperbatch-all-joined"], wait)
    except dist.DistStoreError:
        raise _not_all(ranks, wait.total_seconds(), _missing(store, "hyperbatch-joined-", ranks)) from None
    return store


def _opened(ranks: Ranks, timeout_s: float) -> dist.TCPStore:
    address = LOOPBACK if ranks.local_size == ranks.world_size else ranks.master_addr
    if ranks.rank == 0 and _is_address(address):
        with contextlib.suppress(OSError):  # not an address of this host, for example that of a service in a cluster
            return listening_at(address, ranks.master_port, timeout_s)
    store = dist.TCPStore(
        address,
        ranks.master_port,
        is_master=ranks.rank == 0,
        wait_for_workers=False,
        timeout=timedelta(seconds=max(timeout_s, JOIN_S)),
    )
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _is_address(text: str) -> bool:
    with contextlib.suppress(ValueError):
        return bool(ipaddress.ip_address(text))
    return False


def meet(ranks: Ranks, timeout_s: float) -> dist.Store:
    """Returns a part of the agent's store that no earlier attempt has used.

    The agent's store outlives the ranks that it restarts, and entries of earlier ranks would lead new ones to dead
    addresses. The number of restarts does not identify an attempt, because each host counts its own. Rank 0 therefore
    chooses a name, and sends it to each rank that asks; requests left by dead ranks are answered too, without effect.

    The store has a single thread, and thousands of ranks may meet in it. A rank therefore sends only four requests, and
    blocks in the store instead of polling. Rank 0 reads and answers the requests of all ranks together.
    """
    timeout = timedelta(seconds=timeout_s)
    store = dist.TCPStore(
        ranks.master_addr, ranks.master_port, is_master=False, wait_for_workers=False, timeout=timeout
    )
    join_s = max(timeout_s, JOIN_S)
    meeting, deadline = dist.PrefixStore("hyperbatch-meet", store), time.monotonic() + join_s
    own = uuid.uuid4().hex

    if ranks.rank != 0:
        meeting.set(f"question-{ranks.rank}", own)
        try:
            meeting.wait([own], timedelta(seconds=join_s))
        except dist.DistStoreError:
            raise _not_all(ranks, join_s) from None
        name = meeting.get(own).decode()
        meeting.add(name, 1)
        return dist.PrefixStore(name, store)

    keys = [f"question-{rank}" for rank in range(1, ranks.world_size)]
    answered: set[bytes] = set()

    def all_have_come() -> bool:
        if meeting.check(keys) and (asked := set(meeting.multi_get(keys)) - answered):
            meeting.multi_set([question.decode() for question in asked], [own] * len(asked))  # pyright: ignore[reportAttributeAccessIssue]
            answered.update(asked)
        return meeting.add(own, 0) == len(keys)

    while not all_have_come():
        if time.monotonic() > deadline:
            raise _not_all(ranks, join_s, _missing(meeting, "question-", ranks))
        time.sleep(0.01)
    return dist.PrefixStore(own, store)


def _missing(store: dist.Store, prefix: str, ranks: Ranks) -> list[int]:
    """Returns the ranks that have not written to the store. Only rank 0 asks, since the store has a single thread."""
    others = range(1, ranks.world_size) if ranks.rank == 0 else ()
    return [rank for rank in others if not store.check([f"{prefix}{rank}"])]


def _not_all(ranks: Ranks, seconds: float, missing: Sequence[int] = ()) -> RunFailed:
    if not missing:
        failed = RunFailed(f"the ranks could not connect within {seconds:g} s; are all {ranks.world_size} running?")
        failed.on_all_ranks = ranks.rank > 0  # rank 0 knows who is missing
        return failed
    from hyperbatch.comm.place import ranges  # a command that only starts ranks does not need it

    return RunFailed(
        f"of {ranks.world_size} ranks, {ranges(missing)} did not connect to {ranks.master_addr}:{ranks.master_port} "
        f"within {seconds:g} s; see what their hosts have printed"
    )


class OneHost(RendezvousHandler):
    """The rendezvous of an agent whose ranks are all on this host."""

    def __init__(self, run_id: str) -> None:
        self._run_id, self._store = run_id, listening_at(LOOPBACK, 0, AGENT_S)

    def get_backend(self) -> str:
        return ONE_HOST

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        own = dist.PrefixStore(self._run_id, self._store)
        return RendezvousInfo(own, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        pass

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        return True


def _one_host(params: RendezvousParameters) -> RendezvousHandler:
    return OneHost(params.run_id)


rendezvous_handler_registry.register(ONE_HOST, _one_host)
