"""The stores at which ranks meet listen no wider than the ranks need."""

from __future__ import annotations

import json
import os
import socket
import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from listening import addresses
from test_ending import free_port

from hyperbatch.engine import stores
from hyperbatch.engine.agent import start_ranks
from hyperbatch.engine.ranks import Ranks, open_group
from hyperbatch.errors import RunFailed

WIDE = ("0.0.0.0", "::")


def test_the_agent_of_one_host_listens_for_this_host_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", os.path.dirname(__file__))
    start_ranks(2, "listening", tmp_path / "argument")
    for rank in range(2):
        said = json.loads((tmp_path / f"seen-{rank}.json").read_text())
        assert said["address"] == "127.0.0.1"
        assert said["agent"][said["port"]] == "127.0.0.1"
        assert not set(said["agent"].values()) & set(WIDE)


@pytest.mark.parametrize(
    ("host", "per_host", "found"),
    [
        ("a.name.that.is.not.asked.for", 2, "127.0.0.1"),  # all on one host
        ("127.0.0.1", 1, "127.0.0.1"),
        (socket.gethostname(), 1, "everywhere"),
        ("198.51.100.7", 1, "everywhere"),  # a service's, say
    ],
)
def test_the_store_of_rank_0_listens_where_the_ranks_are(monkeypatch, host, per_host, found):
    port, met = free_port(), {}
    if found == "everywhere":  # rank 1 finds it there, too
        connect = stores.dist.TCPStore
        monkeypatch.setattr(stores.dist, "TCPStore", lambda host, *args, **named: connect("127.0.0.1", *args, **named))

    def come(rank):
        ranks = Ranks(rank=rank, world_size=2, local_size=per_host, master_addr=host, master_port=port)
        met[rank] = stores.own_store(ranks, 30.0)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (1, 0)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    address = addresses(os.getpid())[port]
    assert address in WIDE if found == "everywhere" else address == found
    met[0].set("key", "value")
    assert met[1].get("key") == b"value"
    assert met[0].timeout == met[1].timeout == timedelta(seconds=30)


@pytest.mark.parametrize("enter", [stores.own_store, stores.meet])
def test_ranks_that_do_not_come_are_named(monkeypatch, enter):
    """Of four, ranks 0 and 2 come. Which host is missing is what the user must know."""
    monkeypatch.setattr(stores, "JOIN_S", 0.0)
    port, said = free_port(), {}
    if enter is stores.meet:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        port = server.port

    def come(rank):
        with pytest.raises(RunFailed) as failed:
            enter(Ranks(rank=rank, world_size=4, local_size=4, master_port=port), 2.0)
        said[rank] = str(failed.value)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in (0, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert said[0] == (
        f"of 4 ranks, 1, 3 did not connect to 127.0.0.1:{port} within 2 s; see what their hosts have printed"
    )
    assert said[2] == "the ranks could not connect within 2 s; are all 4 running?"


def test_a_port_that_is_taken_is_told_in_one_line():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ranks = Ranks(rank=0, world_size=2, local_size=2, master_port=port)
        with pytest.raises(RunFailed) as failed, open_group(ranks, torch.device("cpu"), 2.0):
            pass
    assert str(failed.value).startswith("this rank could not connect to the others: ")
    assert str(failed.value).endswith(f"; set MASTER_PORT to a free port instead of {port}")


def test_an_address_that_other_hosts_do_not_reach_is_told_in_one_line(monkeypatch):
    """As on a host whose own name resolves to 127.0.1.1, where gloo then listens."""

    def fails(*_, **__):
        raise RuntimeError("Gloo connectFullMesh failed with [pair.cc:152] timed out connecting\nand more")

    monkeypatch.setattr(stores, "own_store", lambda *_: None)
    monkeypatch.setattr(dist, "init_process_group", fails)
    line = "Gloo connectFullMesh failed with .* timed out connecting; check that .* set GLOO_SOCKET_IFNAME"
    with pytest.raises(RunFailed, match=line), open_group(Ranks(world_size=2, local_size=2), torch.device("cpu"), 2.0):
        pass


def test_a_store_that_listens_at_one_address_works_as_others_do():
    store = stores.listening_at("127.0.0.1", 0, 5.0)
    other = dist.TCPStore("127.0.0.1", store.port, is_master=False)
    other.set("key", "value")
    assert store.get("key") == b"value"
    assert store.clone().get("key") == b"value"


def test_ranks_that_meet_do_not_ask_again_and_again(monkeypatch):
    """Thousands may meet in one store: a rank sends four requests, and rank 0 none for a single rank."""
    prefixed, sent = stores.dist.PrefixStore, {}

    class Counted:
        def __init__(self, name, store):
            self._store, self._sent = prefixed(name, store), sent.setdefault(threading.current_thread().name, [])

        def __getattr__(self, name):
            self._sent.append(name)
            return getattr(self._store, name)

    monkeypatch.setattr(stores.dist, "PrefixStore", Counted)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def come(rank):
        stores.meet(Ranks(rank=rank, world_size=6, master_port=server.port), 30.0)

    threads = [threading.Thread(target=come, args=(rank,), name=str(rank)) for rank in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(sent[str(rank)] == ["set", "wait", "get", "add"] for rank in range(1, 6))
    assert set(sent["0"]) == {"check", "multi_get", "multi_set", "add"}
