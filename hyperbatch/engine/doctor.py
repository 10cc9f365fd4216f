"""Checks whether this machine can train: packages, devices, and whether every all-reduce gives the right values."""

from __future__ import annotations

import importlib
import importlib.metadata
import ipaddress
import json
import os
import platform
import shutil
import socket
import sys
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hyperbatch.engine.agent import check_nproc, default_nproc, start_ranks
from hyperbatch.engine.ranks import Ranks, find_ranks
from hyperbatch.engine.scratch import scratch_folder
from hyperbatch.errors import InputError, first_line
from hyperbatch.tables import text_table

if TYPE_CHECKING:
    from hyperbatch.comm.doctor import CollectiveCheck

OPTIONAL = ("triton", "torchvision", "timm", "simplejpeg", "tensorboard", "safetensors")
TIMEOUT_S = 60  # of a collective; a link that takes longer is considered broken


@dataclass(frozen=True, slots=True)
class Check:
    """One requirement of training. If it is not ok, the detail says what to do."""

    name: str
    ok: bool
    detail: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    checks: tuple[Check, ...]
    collectives: tuple[CollectiveCheck, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def doctor(*, collectives: bool = False, nproc: int | None = None) -> Diagnosis:
    """Runs all checks on this machine.

    Under torchrun, srun or mpirun every process must call it: the ranks join, and all get the same `ok`. Otherwise
    `collectives` starts `nproc` ranks on this host.
    """
    if nproc is not None:
        check_nproc(nproc)
    checks = [_python(), _torch(), *_packages(), _devices(), _network(), _disk()]
    rows: list[CollectiveCheck] = []
    ranks = find_ranks()
    if ranks is not None and nproc is not None:
        raise InputError("--nproc starts processes on one host; leave it out if a launcher has started the ranks")
    if ranks is not None and ranks.world_size > 1:
        rows, others = _join_and_check(ranks, collectives, [check for check in checks if not check.ok])
        checks += others
    elif collectives:
        count = nproc or default_nproc("auto")
        if ranks is not None or count == 1:
            detail = "a single rank has nothing to all-reduce; start two or more with --nproc 2 or a launcher"
            checks.append(Check("collectives", False, detail))
        else:
            rows = _start_and_check(count)
    if rows:
        wrong = [row.name for row in rows if not row.correct]
        detail = f"wrong values: {', '.join(wrong)}" if wrong else f"all {len(rows)} cases are correct"
        checks.append(Check("collectives", not wrong, detail))
    return Diagnosis(checks=tuple(checks), collectives=tuple(rows))


def _python() -> Check:
    return Check("python", sys.version_info >= (3, 11), platform.python_version())


def _torch() -> Check:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    detail = torch.__version__ + ("" if version >= (2, 11) else ": hyperbatch needs 2.11 or newer")
    return Check("torch", version >= (2, 11), detail)


def _packages() -> list[Check]:
    return [_package(name) for name in OPTIONAL]


def _package(name: str) -> Check:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return Check(name, True, "not installed (optional)")
    try:
        importlib.import_module(name)
    except Exception as error:  # a build for another torch fails in many ways at import
        reason = first_line(error)
        detail = (
            f"{version} cannot be imported ({reason}); install a build that fits torch and Python here, or remove it"
        )
        return Check(name, False, detail)
    return Check(name, True, version)


def _devices() -> Check:
    import torch

    if not torch.cuda.is_available():
        return Check("device", True, f"CPU, {os.cpu_count()} cores; torch sees no GPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    from torch.cuda import nccl as torch_nccl

    nccl = ".".join(map(str, torch_nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return Check("device", True, f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}, NCCL {nccl}")


def _network() -> Check:
    """gloo listens at the address of the host's name, which other hosts must be able to reach."""
    host, advice = socket.gethostname(), "set GLOO_SOCKET_IFNAME for runs over several hosts"
    try:
        address = socket.gethostbyname(host)
    except OSError:
        return Check("network", True, f"{host} has no address; {advice}")
    is_own = ipaddress.ip_address(address).is_loopback and "GLOO_SOCKET_IFNAME" not in os.environ
    return Check(
        "network",
        True,
        f"{host} resolves to {address}" + (f", which other hosts cannot reach; {advice}" if is_own else ""),
    )


def _disk() -> Check:
    free = shutil.disk_usage(".").free
    return Check("disk", free > 1e9, f"{free / 1e9:.0f} GB free here" + ("" if free > 1e9 else ": too little"))


def _start_and_check(nproc: int) -> list[CollectiveCheck]:
    from hyperbatch.comm.doctor import CollectiveCheck

    with scratch_folder() as scratch:
        answer = scratch / "collectives.json"
        start_ranks(nproc, "hyperbatch.engine.doctor", answer)
        return [CollectiveCheck(**row) for row in json.loads(answer.read_text())]


def _started_rank(answer: Path) -> None:
    from hyperbatch.engine.ranks import join

    ranks = find_ranks()
    assert ranks is not None, "started by `start_ranks`"
    with join(ranks, "auto", timeout_s=TIMEOUT_S) as device:
        rows = _check_grids(ranks, device)
    if ranks.rank == 0:
        answer.write_text(json.dumps([row.to_dict() for row in rows]))


def _join_and_check(ranks: Ranks, collectives: bool, failed: list[Check]) -> tuple[list[CollectiveCheck], list[Check]]:
    """Returns the rows of the collectives and further checks: whether the ranks can connect, and the failed checks of
    other hosts."""
    import torch.distributed as dist

    from hyperbatch.engine.ranks import join

    everyone: list[Any] = [None] * ranks.world_size
    try:
        with join(ranks, "auto", timeout_s=TIMEOUT_S) as device:
            dist.all_gather_object(everyone, (socket.gethostname(), failed))
            rows = _check_grids(ranks, device) if collectives else []
    except (InputError, RuntimeError) as error:
        line = first_line(error)
        return [], [Check("ranks", False, f"rank {ranks.rank} of {ranks.world_size}: {line}")]
    others = {f"{host} {check.name}": check for host, checks in everyone for check in checks if check not in failed}
    hosts = len({host for host, _ in everyone})
    met = Check("ranks", True, f"{ranks.world_size} ranks on {hosts} host{'s' if hosts > 1 else ''} meet")
    return rows, [met, *(replace(check, name=name) for name, check in others.items())]


def _check_grids(ranks: Ranks, device: Any) -> list[CollectiveCheck]:
    """Checks the collectives on the grid of hosts x ranks per host.

    On a grid with a single direction a torus would be a ring. A square grid is then checked, too; it replaces a grid
    of one row.
    """
    from hyperbatch.comm.doctor import check_collectives
    from hyperbatch.engine.ranks import host_grid
    from hyperbatch.plan.types import RankGrid

    hosts, square = host_grid(ranks), RankGrid.square(ranks.world_size)
    grids = [hosts] if min(hosts.rows, hosts.columns) > 1 else [square] if hosts.rows == 1 else [hosts, square]
    return [row for grid in dict.fromkeys(grids) for row in check_collectives(device, grid=grid)]


def format_doctor(diagnosis: Diagnosis) -> str:
    rows = [("ok" if check.ok else "NO", check.name, check.detail) for check in diagnosis.checks]
    lines = text_table(("", "check", "found"), rows, left=3)
    if diagnosis.collectives:
        verdicts = ("WRONG", "right")
        timed = [
            (
                *(row.algorithm, row.grid, row.dtype, verdicts[row.correct]),
                *(f"{row.bytes / 1e6:.3f}", f"{row.median * 1e3:.2f}", f"{row.gb_per_s:.2f}"),
            )
            for row in diagnosis.collectives
        ]
        titles = ("all-reduce", "grid", "dtype", "result", "MB", "median ms", "GB/s")
        lines += ["", *text_table(titles, timed, left=4)]
    return "\n".join(lines)


if __name__ == "__main__":
    _started_rank(Path(sys.argv[1]))
