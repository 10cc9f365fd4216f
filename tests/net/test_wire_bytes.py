"""Bytes on every link of an emulated cluster against theory, and that nothing of it is left behind."""

from __future__ import annotations

import subprocess

import pytest
import torch
import torch.distributed as dist

from benchmarks.cluster import NAMESPACES, emulated_cluster, why_not
from benchmarks.comm import bench_emulated
from benchmarks.comm_ranks import sent_bytes
from hyperbatch.comm import GridComm, all_gather, all_reduce, reduce_scatter
from hyperbatch.comm.shards import own_shard
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.plan.types import RankGrid

pytestmark = pytest.mark.skipif(why_not() is not None, reason=f"no emulated cluster: {why_not()}")
HOSTS, RANKS = 3, 2
NUMEL = 6 << 20  # 24 MiB in fp32, more than one chunk of the pipeline


def sent(rank: int) -> dict[str, list[int]]:
    """Bytes each NIC of this rank's host sends for one collective: the least of three."""
    comm = GridComm(RankGrid(HOSTS, RANKS))
    tensor = torch.ones(NUMEL)
    shard = torch.empty(own_shard(NUMEL, comm, "torus")[1] - own_shard(NUMEL, comm, "torus")[0])
    calls = {
        "flat": lambda: all_reduce(tensor, comm),
        "hierarchical": lambda: all_reduce(tensor, comm, algorithm="hierarchical"),
        "torus": lambda: all_reduce(tensor, comm, algorithm="torus"),
        "torus bf16": lambda: all_reduce(tensor, comm, algorithm="torus", wire_dtype=torch.bfloat16),
        "reduce-scatter": lambda: reduce_scatter(shard, tensor, comm, algorithm="torus"),
        "all-gather": lambda: all_gather(tensor, shard, comm, algorithm="torus"),
    }
    table = {}
    for name, call in calls.items():
        times = []
        for _ in range(3):  # segments sent again, and answers one by one, on busy cores: they only ever add
            dist.barrier()  # nobody sends any more
            before = sent_bytes()
            dist.barrier()  # everybody has read
            call()
            dist.barrier()
            times.append([now - then for now, then in zip(sent_bytes(), before, strict=True)])
            assert torch.equal(tensor, torch.ones(NUMEL)), name
        table[name] = [min(nic) for nic in zip(*times, strict=True)]
    return table


def test_bytes_on_every_link_match_theory() -> None:
    with emulated_cluster(hosts=HOSTS, ranks_per_host=RANKS, mbit=2000) as cluster:
        tables = cluster.run(sent)[::RANKS]
        name = cluster.name
        assert len(list(NAMESPACES.glob(f"{name}-*"))) == HOSTS + 1
        counted = cluster.sent_bytes()
    assert list(NAMESPACES.glob(f"{name}-*")) == [], "taken down"
    assert all(total > 4 * NUMEL for host in counted for total in host)

    size = 4 * NUMEL
    torus = 2 * (HOSTS - 1) / HOSTS * size / RANKS  # on each link
    theory = {
        "flat": [2 * (HOSTS * RANKS - 1) / (HOSTS * RANKS) * size, 0],  # the ring enters a host by its first rank
        "hierarchical": [2 * (HOSTS - 1) / HOSTS * size, 0],
        "torus": [torus, torus],
        "torus bf16": [torus / 2, torus / 2],
        "reduce-scatter": [torus / 2, torus / 2],
        "all-gather": [torus / 2, torus / 2],
    }
    for table in tables:
        for algorithm, expected in theory.items():
            # Headers, and answers to what the others send; what a silent link carries is small against a busy one.
            for measured, wanted in zip(table[algorithm], expected):
                assert measured >= wanted, (algorithm, table[algorithm], expected)
                assert measured - wanted <= 0.01 * max(expected), (algorithm, table[algorithm], expected)


def test_bench_reports_rows_of_the_agreed_shape() -> None:
    report = bench_emulated(hosts=2, ranks=1, mbit=2000, size_mb=1, rounds=1, backward_shares=())
    assert report["bench"] == "comm"
    assert {"device", "versions", "commit", "rows"} <= report.keys()
    for row in report["rows"]:
        assert {"name", "median", "p20", "p80", "unit", "ratio_to_best_peer"} <= row.keys()
    ratios = {row["name"]: row["ratio_to_best_peer"] for row in report["rows"]}
    assert ratios["dist.all_reduce"] == ratios["dist.all_reduce, cast to bf16"] == 1.0
    assert {"flat", "hierarchical", "torus", "torus, bf16 wire"} <= ratios.keys()
    # A quarter of a megabyte of fp32, twice half of it over each of two hosts' links.
    assert [wire["theory_host_bytes"] for wire in report["wire"]] == [250_000, 125_000] * 2
    assert all(wire["excess"] >= 0 for wire in report["wire"])


def fails(rank: int) -> None:
    if rank == 1:
        raise ValueError("from rank one")


def test_a_failing_rank_is_named_and_the_cluster_is_gone() -> None:
    two = emulated_cluster(hosts=2, ranks_per_host=1, mbit=1000, nic="host")
    with two as cluster, pytest.raises(RunFailed, match=r"(?s)rank 1: .*from rank one"):
        cluster.run(fails, timeout_s=30)
    assert list(NAMESPACES.glob(f"{cluster.name}-*")) == []


def test_what_a_killed_run_left_is_swept_away() -> None:
    stale = "hyperbatch-4194303-abcdef-host0"  # no process has this id
    subprocess.run(["ip", "netns", "add", stale], check=True, capture_output=True)
    try:
        with emulated_cluster(hosts=1, ranks_per_host=1):
            assert not (NAMESPACES / stale).exists()
    finally:
        subprocess.run(["ip", "netns", "del", stale], check=False, capture_output=True)


def test_two_clusters_stand_side_by_side() -> None:
    with emulated_cluster(hosts=1, ranks_per_host=1) as one, emulated_cluster(hosts=1, ranks_per_host=1) as two:
        assert one.name != two.name
        assert len(one.sent_bytes()) == len(two.sent_bytes()) == 1


def test_wrong_clusters_are_refused_in_one_line() -> None:
    with pytest.raises(InputError, match="choose rank"), emulated_cluster(nic="both"):
        pass
    with pytest.raises(InputError, match="no cluster has 0 hosts"), emulated_cluster(hosts=0):
        pass
