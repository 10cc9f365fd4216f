"""The exchange against its peers on an emulated cluster: `python -m benchmarks.comm --json`, as root on Linux.

all-reduce   one message, each algorithm and precision, against the backend's own
wire         bytes that each NIC sent, against theory
step         ResNet-50's gradients after a replayed backward, against DDP; varies grouping, algorithm and precision
host         the time that a step takes on the host's main thread
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from benchmarks.cluster import emulated_cluster
from benchmarks.comm_host import host_cost_s
from benchmarks.comm_ranks import Settings, measure
from hyperbatch.bench.comm import MB, all_reduce_rows
from hyperbatch.bench.harness import Candidate, format_table, result, rows
from hyperbatch.errors import InputError
from hyperbatch.record import strict_json

STEP_PEERS = ("DDP default", "DDP, bf16 hook", "one group after backward")


def bench_emulated(
    *,
    hosts: int = 4,
    ranks: int = 2,
    mbit: float = 200.0,
    nic: str = "rank",
    size_mb: float = 25.0,
    rounds: int = 2,
    backward_shares: tuple[float, ...] | None = None,
    ablate: bool = False,
) -> dict[str, Any]:
    """ranks: per host. backward_shares: the length of backward, relative to the flat exchange of the same gradients.

    The default fraction, a quarter, takes under four minutes. ablate: varies grouping, algorithm and precision one at a
    time, and also measures a backward as long as the exchange.
    """
    if backward_shares is None:
        backward_shares = (1.0, 0.25) if ablate else (0.25,)
    if size_mb <= 0 or rounds < 1:
        raise InputError(f"{size_mb} MB in {rounds} rounds measures nothing; use positive numbers")
    settings = Settings(
        hosts=hosts,
        ranks_per_host=ranks,
        size_bytes=int(size_mb * MB),
        rounds=rounds,
        backward_shares=backward_shares,
        ablate=ablate,
    )
    load_before = os.getloadavg()[0]
    host_s = host_cost_s()
    with emulated_cluster(hosts=hosts, ranks_per_host=ranks, mbit=mbit, nic=nic) as cluster:
        per_rank = cluster.run(measure, settings, timeout_s=3600)
    found = per_rank[0]

    table = all_reduce_rows(found["all_reduce"], settings.size_bytes)
    for share, samples in found.get("step", {}).items():
        table += _step_rows(samples, share)
    host = Candidate(name="host time of a step, 161 tensors", run=list)
    table += rows([host], {host.name: host_s}, unit="s", part="host")
    wires = [per_rank[first]["wire"] for first in range(0, cluster.size, ranks)]
    return result(
        "comm",
        table,
        device=f"{hosts} emulated hosts x {ranks} ranks, a {mbit:g} Mbit/s NIC per {nic}, on {os.cpu_count()} cores",
        hosts=hosts,
        ranks_per_host=ranks,
        mbit=mbit,
        nic=nic,
        flat_exchange_s=found.get("flat_s"),
        wire=_wire_rows(wires, settings, nic),
        summary=_summary(found, table),
        load_before=load_before,
        note="bandwidth is shaped, delay is not: nothing here validates a switch point that depends on latency",
    )


def _step_rows(samples: dict[str, list[float]], share: float) -> list[dict[str, Any]]:
    candidates = [Candidate(name=name, run=list, peer=name in STEP_PEERS) for name in samples]
    table = rows(candidates, samples, unit="s", part="step", backward_share=share)
    for row in table:
        row["name"] = f"step, backward {share:g} of the exchange: {row['name']}"
    return table


def _wire_rows(wires: list[dict[str, list[int]]], settings: Settings, nic: str) -> list[dict[str, Any]]:
    """Returns for each algorithm the most that any host sent, by NIC, and the theoretical value."""
    ranks, size = settings.ranks_per_host, settings.hosts * settings.ranks_per_host
    table = []
    for name in wires[0]:
        itemsize = 2 if "bf16" in name else 4
        payload = settings.size_bytes // 4 // 4 * itemsize
        worst = max((wire[name] for wire in wires), key=sum)
        if name.startswith("torus"):
            theory = 2 * (settings.hosts - 1) / settings.hosts * payload  # per host, over all its NICs
        else:
            theory = 2 * (size - 1) / size * payload
        table.append(
            {
                "name": name,
                "message_bytes": payload,
                "nic_bytes": worst,
                "host_bytes": sum(worst),
                "theory_host_bytes": round(theory),
                "excess": sum(worst) / theory - 1 if theory else None,
                "nics": ranks if nic == "rank" else 1,
            }
        )
    return table


def _summary(found: dict[str, Any], table: list[dict[str, Any]]) -> dict[str, float]:
    """Returns the most important ratios."""
    median = {row["name"]: row["median"] for row in table}
    flat = median["dist.all_reduce"]
    ratios = {
        "torus over flat": flat / median["torus"],
        "torus with bf16 wire over fp32 flat": flat / median["torus, bf16 wire"],
    }
    for share in found.get("step", {}):
        start = f"step, backward {share:g} of the exchange: "
        ddp = median[start + "DDP default"]
        ratios[f"{start}cubic groups, flat over DDP default"] = ddp / median[start + "cubic groups, flat"]
        ratios[f"{start}all together over DDP default"] = ddp / median[start + "cubic groups, torus, bf16 wire"]
        ratios[f"{start}bound, DDP default over backward alone"] = ddp / (share * found["flat_s"])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.comm", description=(__doc__ or "").partition(":")[0])
    parser.add_argument("--hosts", type=int, default=4, help="emulated hosts [%(default)s]")
    parser.add_argument("--ranks", type=int, default=2, help="ranks on each host [%(default)s]")
    parser.add_argument("--mbit", type=float, default=200.0, help="Mbit/s of each NIC [%(default)s]")
    parser.add_argument("--nic", choices=("rank", "host"), default="rank", help="a NIC for each [%(default)s]")
    parser.add_argument("--size-mb", type=float, default=25.0, help="size of the message [%(default)s]")
    parser.add_argument("--rounds", type=int, default=2, help="[%(default)s]")
    parser.add_argument("--ablate", action="store_true", help="one change at a time, and a longer backward, too")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = vars(parser.parse_args())
    as_json = options.pop("json")
    report = bench_emulated(**options)
    print(strict_json(report) if as_json else format_table(report))


if __name__ == "__main__":
    main()
