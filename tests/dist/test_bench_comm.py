"""`bench comm` on the ranks at hand: under a launcher, and started on this host. No timing decides anything here."""

import json
import os

import pytest
from harness import run_ranks

from hyperbatch import cli
from hyperbatch.bench.comm import bench_comm
from hyperbatch.bench.harness import format_table
from hyperbatch.errors import InputError


def launched(rank, options):
    """As a rank of torchrun, on two hosts of two."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2), "LOCAL_WORLD_SIZE": "2"}
    with pytest.raises(InputError, match="--nproc starts processes on one host"):
        bench_comm(nproc=2)
    return bench_comm(**options)


@pytest.mark.parametrize(("options", "grid"), [({}, "2x2"), ({"grid": "4x1"}, "4x1")])
def test_under_a_launcher_every_rank_gets_the_same_rows(options, grid):
    reports = run_ranks(4, launched, {"size_mb": 0.1, "rounds": 2, **options})
    report = reports[0]
    assert all(other["rows"] == report["rows"] for other in reports)
    assert (report["bench"], report["grid"], report["world_size"]) == ("comm", grid, 4)
    assert report["device"].startswith("4 ranks on 2 hosts, ")
    ratios = {row["name"]: row["ratio_to_best_peer"] for row in report["rows"]}
    assert ratios["dist.all_reduce"] == ratios["dist.all_reduce, cast to bf16"] == 1.0
    assert {"flat", "hierarchical", "torus", "torus, bf16 wire"} <= ratios.keys()
    for row in report["rows"]:
        assert row["unit"] == "s"
        assert row["bytes"] == 100_000
        assert 0 < row["p20"] <= row["median"] <= row["p80"]
    assert "torus, bf16 wire" in format_table(report)


def launched_on_unequal_hosts(rank):
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "3", "LOCAL_RANK": str(rank % 2)}
    os.environ["LOCAL_WORLD_SIZE"] = "221"[rank]
    return bench_comm(size_mb=0.1, rounds=1)


def test_hosts_of_different_sizes_make_one_row():
    for report in run_ranks(3, launched_on_unequal_hosts):
        assert report["grid"] == "1x3"
        assert report["device"].startswith("3 ranks on hosts of different sizes, ")


def test_the_command_starts_ranks_of_its_own(capfd):
    assert cli.main(["bench", "comm", "--nproc", "2", "--size-mb", "1", "--rounds", "1", "--json"]) == 0
    report = json.loads(capfd.readouterr().out)
    assert report["world_size"] == 2
    assert report["device"].startswith("2 ranks on 1 host, ")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"nproc": 1}, "a single rank has nothing to all-reduce"),
        ({"nproc": 2, "grid": "3x1"}, "grid 3x1 holds 3 ranks, but there are 2"),
        ({"size_mb": 0}, "measures nothing"),
    ],
)
def test_what_cannot_be_measured_is_told(options, message):
    with pytest.raises(InputError, match=message):
        bench_comm(**options)
