"""`hyperbatch doctor --collectives` under a launcher, and what ranks of unequal hosts agree on."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from harness import run_ranks

from hyperbatch.comm import doctor as comm_doctor
from hyperbatch.config import Config
from hyperbatch.engine import doctor as engine_doctor
from hyperbatch.engine.doctor import Diagnosis, doctor
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError

ROOT = Path(__file__).parents[2]
HOSTS = [4, 4, 4, 4, 2, 2]  # ranks on the host of each rank


def torchrun(*options: str, node: int = 0) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--node-rank", str(node), *options]
    command += ["-m", "hyperbatch", "doctor", "--collectives", "--json"]
    env = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    return subprocess.Popen(command, env=os.environ | env, stdout=subprocess.PIPE, text=True)


def answer(agent: subprocess.Popen) -> str:
    try:
        out, _ = agent.communicate(timeout=120)
    finally:
        agent.kill()
    assert agent.returncode == 0, out
    return out


def test_one_agent() -> None:
    values = json.loads(answer(torchrun("--standalone", "--nproc-per-node", "2")))
    assert values["ok"]
    assert {row["grid"] for row in values["collectives"]} == {"2x1"}
    assert len(values["collectives"]) == 18
    assert all(row["correct"] for row in values["collectives"])


def test_two_agents_of_two_are_a_grid_of_two_hosts() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    where = ("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", port)
    first, second = [answer(agent) for agent in [torchrun(*where, node=0), torchrun(*where, node=1)]]
    assert second == "", "rank 0 alone speaks"
    values = json.loads(first)
    assert values["ok"]
    assert {row["grid"] for row in values["collectives"]} == {"2x2"}
    assert {"name": "ranks", "ok": True, "detail": "4 ranks on 1 host meet"} in values["checks"]


# -- by parts ----------------------------------------------------------------------------------------------------


def as_torchrun(rank: int, world_size: int, local_size: int) -> None:
    values = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": rank % local_size, "LOCAL_WORLD_SIZE": local_size}
    os.environ.update({name: str(value) for name, value in values.items()})


def be_quick() -> None:
    check = comm_doctor.check_collectives
    comm_doctor.check_collectives = lambda device, grid: check(device, grid=grid, sizes_bytes=(4096,), rounds=1)


def one_rank_per_host(rank: int) -> list[str]:
    """As on hosts of one rank, and as on one GPU that several ranks share: LOCAL_RANK is 0 everywhere."""
    as_torchrun(rank, 4, 1)
    be_quick()
    values = doctor(collectives=True)
    assert values.ok, values
    return list(dict.fromkeys(row.grid for row in values.collectives))


def test_hosts_of_one_rank_are_checked_on_a_square_too() -> None:
    assert run_ranks(4, one_rank_per_host) == [["4x1", "2x2"]] * 4


def one_host_is_ill(rank: int) -> Diagnosis:
    as_torchrun(rank, 2, 1)
    engine_doctor.socket.gethostname = lambda: f"node{rank}"
    if rank == 1:
        engine_doctor._disk = lambda: engine_doctor.Check("disk", False, "0 GB free here: too little")
    return doctor()


def test_what_is_wrong_on_one_host_is_told_on_all() -> None:
    first, second = run_ranks(2, one_host_is_ill)
    assert not first.ok
    assert not second.ok
    ill = [check for check in first.to_dict()["checks"] if not check["ok"]]
    assert ill == [{"name": "node1 disk", "ok": False, "detail": "0 GB free here: too little"}]


def wrong_values(rank: int) -> Diagnosis:
    as_torchrun(rank, 2, 2)
    be_quick()
    original = comm_doctor.all_reduce

    def spoilt(tensor, comm, *, algorithm="flat", op="mean"):
        original(tensor, comm, algorithm=algorithm, op=op)
        if algorithm == "torus" and comm.rank == 1:
            tensor[-1] += 1

    comm_doctor.all_reduce = spoilt
    return doctor(collectives=True)


def test_wrong_values_on_one_rank_fail_on_all() -> None:
    for values in run_ranks(2, wrong_values):
        assert not values.ok
        detail = next(check.detail for check in values.checks if check.name == "collectives")
        assert detail == "wrong values: torus 2x1 float32 4096 bytes, torus 2x1 bfloat16 4096 bytes"


def test_one_process_is_told_to_start_more(monkeypatch: pytest.MonkeyPatch) -> None:
    values = doctor(collectives=True, nproc=1)
    assert not values.ok
    assert "a single rank has nothing to all-reduce" in values.checks[-1].detail
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    assert "a single rank has nothing to all-reduce" in doctor(collectives=True).checks[-1].detail
    with pytest.raises(InputError, match="--nproc"):
        doctor(collectives=True, nproc=2)


def test_an_installed_package_that_cannot_be_imported_is_not_ok(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torchvision-9.9.dist-info").mkdir()
    (tmp_path / "torchvision-9.9.dist-info" / "METADATA").write_text("Name: torchvision\nVersion: 9.9\n")
    (tmp_path / "torchvision.py").write_text("raise RuntimeError('operator torchvision::nms does not exist')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "torchvision", raising=False)
    check = next(check for check in doctor().checks if check.name == "torchvision")
    assert not check.ok
    assert check.detail.startswith("9.9 cannot be imported (operator torchvision::nms does not exist); install a build")


def test_ranks_of_this_host_are_started() -> None:
    values = doctor(collectives=True, nproc=2)
    assert values.ok
    assert len(values.collectives) == 18


# -- hosts of different sizes ------------------------------------------------------------------------------------


def grid_of_unequal_hosts(rank: int, hosts: list[int]) -> str:
    from hyperbatch.engine.learner import choose_grid  # most ranks here need none of it, and it takes seconds to load

    ranks = Ranks(rank=rank, world_size=len(hosts), local_size=hosts[rank], launcher="test")
    return str(choose_grid(Config(), ranks))


def test_hosts_of_different_sizes_make_one_row_on_every_rank() -> None:
    assert run_ranks(6, grid_of_unequal_hosts, HOSTS) == ["1x6"] * 6
    assert run_ranks(4, grid_of_unequal_hosts, [2] * 4) == ["2x2"] * 4


def profile_unequal_hosts(rank: int, output: Path) -> str:
    from hyperbatch.engine.profile import profile

    as_torchrun(rank, 3, [2, 2, 1][rank])
    torch.set_num_threads(1)
    try:
        profile("resnet8", device="cpu", output=output, batches=(1,), rounds=1)
    except InputError as error:
        return str(error)
    return "no error"


def test_a_profile_of_unequal_hosts_is_refused_on_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(3, profile_unequal_hosts, tmp_path / "here.toml"):
        assert "hosts have different numbers of ranks" in message


@pytest.mark.parametrize(
    ("address", "name", "said"),
    [
        ("10.0.0.7", None, "resolves to 10.0.0.7"),
        (
            "127.0.1.1",
            None,
            "resolves to 127.0.1.1, which other hosts cannot reach; set GLOO_SOCKET_IFNAME for runs over several hosts",
        ),
        ("127.0.1.1", "eth0", "resolves to 127.0.1.1"),
    ],
)
def test_an_address_that_other_hosts_cannot_reach_is_noticed(monkeypatch, address, name, said) -> None:
    """A run of one host needs no other, so the check passes."""
    monkeypatch.setattr(engine_doctor.socket, "gethostbyname", lambda host: address)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    if name is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
    check = engine_doctor._network()
    assert check.ok
    assert check.detail == f"{socket.gethostname()} {said}"
