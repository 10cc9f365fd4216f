"""The cost for many ranks to join: CPU time of the store, which is a single thread, and open files of a rank.

    python -m benchmarks.many_ranks OUT.json [--ranks 16,64,256]

Each rank is a process of this host that opens a process group, creates the groups of an 8-wide grid and makes one
all-reduce in each. The store runs in a separate process, as torchrun's does.

    torch         init_process_group with the agent's store: gloo connects every pair of ranks
    hyperbatch    engine.ranks.join: the ranks meet in a fresh part of the store, and many ranks connect late

Afterwards hyperbatch's ranks send heartbeats and check for a preemption for ten seconds, as training ranks do. Then one
of them gets a signal, and all agree on a last step. Wall times depend on how many ranks share this host's cores, and
are not recorded.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import time
from datetime import timedelta
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

import hyperbatch
from hyperbatch.comm import GridComm, Heartbeat
from hyperbatch.engine import stores
from hyperbatch.engine.preempt import Preemption
from hyperbatch.engine.ranks import Ranks, join
from hyperbatch.plan.types import RankGrid

_COLUMNS = 8
_TIMEOUT_S = 300.0
_HEARTBEATS_S = 10.0

Row = dict[str, Any]


def rank_body(
    arm: str, rank: int, world_size: int, port: int, said: SimpleQueue[int], go_on: Any, preempt: Any
) -> None:
    """Runs one rank, which reports its open files after one exchange in every group."""
    torch.set_num_threads(1)
    ranks = Ranks(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_size=world_size,
        launcher="torchrun",
        master_addr=stores.LOOPBACK,
        master_port=port,
        agent_store=True,
    )
    store = dist.TCPStore(stores.LOOPBACK, port, timeout=timedelta(seconds=_TIMEOUT_S))
    if arm == "torch":
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=_TIMEOUT_S)
        )
        exchange_once(world_size)
        said.put(open_files())
    else:
        with join(ranks, "cpu", _TIMEOUT_S):
            exchange_once(world_size)
            said.put(open_files())
            go_on.wait()
            preemption, step = Preemption("USR1", ranks, timeout_s=_TIMEOUT_S), 0
            with (
                Heartbeat(store, rank, world_size, timeout_s=_TIMEOUT_S),
                preemption,
                preemption.watched(dist.PrefixStore("preempt", store)),
            ):
                time.sleep(_HEARTBEATS_S)
                said.put(0)
                preempt.wait()
                if rank == world_size // 2:
                    preemption.saw(signal.SIGUSR1)
                while preemption.may_begin(step := step + 1):
                    time.sleep(0.1)
                said.put(step)
    os._exit(0)  # the shutdown is not measured


def exchange_once(world_size: int) -> None:
    comm = GridComm(RankGrid(world_size // _COLUMNS, _COLUMNS))
    for group in (comm.world, comm.row, comm.column):
        ones = torch.ones(1000)
        dist.all_reduce(ones, group=group)
        if ones[0] != dist.get_world_size(group):
            raise SystemExit(f"a sum over {dist.get_world_size(group)} ranks is {ones[0]}")


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def cpu_s(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure(arm: str, world_size: int) -> Row:
    context = processes.get_context("fork")
    ports, said, go_on, preempt = context.SimpleQueue(), context.SimpleQueue(), context.Event(), context.Event()
    host = context.Process(target=host_store, args=(ports,))
    host.start()
    port, store = ports.get()
    started = cpu_s(store)
    ranks = [
        context.Process(target=rank_body, args=(arm, rank, world_size, port, said, go_on, preempt))
        for rank in range(world_size)
    ]
    for rank in ranks:
        rank.start()
    files = [said.get() for _ in ranks]
    row: Row = {"arm": arm, "ranks": world_size, "store_cpu_s": cpu_s(store) - started, "open_files": max(files)}
    if arm == "hyperbatch":
        before = cpu_s(store)
        go_on.set()
        for _ in ranks:
            said.get()
        row["heartbeats_store_cpu"] = (cpu_s(store) - before) / _HEARTBEATS_S
        before = cpu_s(store)
        preempt.set()
        if len({said.get() for _ in ranks}) != 1:
            raise SystemExit("preempted ranks have not agreed on a last step")
        row["preempted_store_cpu_s"] = round(cpu_s(store) - before, 2)
    for rank in ranks:
        rank.join()
    host.kill()
    host.join()
    return row


def host_store(ports: SimpleQueue[tuple[int, int]]) -> None:
    store = stores.listening_at(stores.LOOPBACK, 0, _TIMEOUT_S)
    ports.put((store.port, os.getpid()))
    signal.pause()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--ranks", default="16,64,256")
    args = parser.parse_args()
    rows: list[Row] = []
    for world_size in map(int, args.ranks.split(",")):
        pair = [measure(arm, world_size) for arm in ("torch", "hyperbatch")]
        rows += pair
        theirs, ours = pair
        print(
            f"{world_size} ranks: store {theirs['store_cpu_s']:.2f} s -> {ours['store_cpu_s']:.2f} s of CPU, open "
            f"files of a rank {theirs['open_files']} -> {ours['open_files']}, heartbeats "
            f"{ours['heartbeats_store_cpu']:.1%} of a core, a preemption {ours['preempted_store_cpu_s']:.2f} s"
        )
    result = {
        "bench": "many_ranks",
        "versions": {
            "hyperbatch": hyperbatch.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "cores": os.cpu_count(),
        "rows": rows,
    }
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
