"""Is this machine fit to train? What is installed and seen, and whether every all-reduce gives the right values."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

from hyperbatch.engine.agent import default_nproc, start_ranks
from hyperbatch.engine.ranks import Ranks, find_ranks
from hyperbatch.errors import InputError

OPTIONAL = ("triton", "torchvision", "timm", "simplejpeg", "tensorboard", "safetensors")
TIMEOUT_S = 60  # of a collective: a link that takes longer is broken


def doctor(*, collectives: bool = False, nproc: int | None = None) -> dict[str, Any]:
    """{"ok", "checks": [{"name", "ok", "detail"}], "collectives": rows}; a check that is not ok says what to do.

    Under torchrun, srun or mpirun every process calls it: the ranks join, and all get the same "ok". Elsewhere
    `collectives` starts `nproc` ranks on this host.
    """
    checks = [_python(), _torch(), *_packages(), _devices(), _network(), _disk()]
    rows: list[dict[str, Any]] = []
    ranks = find_ranks()
    if ranks is not None and nproc is not None:
        raise InputError("--nproc starts processes on one host; leave it out where a launcher has started them")
    if ranks is not None and ranks.world_size > 1:
        rows, others = _join_and_check(ranks, collectives, [check for check in checks if not check["ok"]])
        checks += others
    elif collectives:
        count = nproc or default_nproc("auto")
        if ranks is not None or count == 1:
            detail = "one process exchanges nothing; start two or more, with --nproc 2 or a launcher"
            checks.append(_check("collectives", False, detail))
        else:
            rows = _start_and_check(count)
    if rows:
        wrong = [row["name"] for row in rows if not row["correct"]]
        detail = f"wrong values: {', '.join(wrong)}" if wrong else f"all {len(rows)} cases are right"
        checks.append(_check("collectives", not wrong, detail))
    return {"ok": all(check["ok"] for check in checks), "checks": checks, "collectives": rows}


def _check(name: str, ok: bool, detail: str) -> dict[str, Any]:
    return {"name": name, "ok": ok, "detail": detail}


def _python() -> dict[str, Any]:
    return _check("python", sys.version_info >= (3, 11), platform.python_version())


def _torch() -> dict[str, Any]:
    import torch

    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    detail = torch.__version__ + ("" if version >= (2, 11) else ": hyperbatch needs 2.11 or newer")
    return _check("torch", version >= (2, 11), detail)


def _packages() -> list[dict[str, Any]]:
    checks = []
    for name in OPTIONAL:
        try:
            detail = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            detail = "not installed (optional)"
        checks.append(_check(name, True, detail))
    return checks


def _devices() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return _check("device", True, f"CPU, {os.cpu_count()} cores; no GPU is seen by torch")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    from torch.cuda import nccl as torch_nccl

    nccl = ".".join(map(str, torch_nccl.version())) if torch.distributed.is_nccl_available() else "none"
    return _check("device", True, f"{len(names)} x {names[0]}, CUDA {torch.version.cuda}, NCCL {nccl}")


def _network() -> dict[str, Any]:
    host = socket.gethostname()
    try:
        return _check("network", True, f"{host} is {socket.gethostbyname(host)}")
    except OSError:
        # Gloo looks the host name up; without an entry it cannot start over several hosts.
        return _check("network", True, f"{host} has no address; set GLOO_SOCKET_IFNAME for runs over several hosts")


def _disk() -> dict[str, Any]:
    free = shutil.disk_usage(".").free
    return _check("disk", free > 1e9, f"{free / 1e9:.0f} GB free here" + ("" if free > 1e9 else ": too little"))


def _start_and_check(nproc: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory(prefix="hyperbatch-") as scratch:
        answer = Path(scratch) / "collectives.json"
        start_ranks(nproc, "hyperbatch.engine.doctor", answer)
        return json.loads(answer.read_text())


def _started_rank(answer: Path) -> None:
    from hyperbatch.engine.ranks import join

    ranks = find_ranks()
    assert ranks is not None, "started by `start_ranks`"
    with join(ranks, "auto", timeout_s=TIMEOUT_S) as device:
        rows = _check_grids(ranks, device)
    if ranks.rank == 0:
        answer.write_text(json.dumps(rows))


def _join_and_check(
    ranks: Ranks, collectives: bool, failed: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the collectives, and what else is wrong: the failed checks of other hosts, or that ranks do not meet."""
    import torch.distributed as dist

    from hyperbatch.engine.ranks import join

    everyone: list[Any] = [None] * ranks.world_size
    try:
        with join(ranks, "auto", timeout_s=TIMEOUT_S) as device:
            dist.all_gather_object(everyone, (socket.gethostname(), failed))
            rows = _check_grids(ranks, device) if collectives else []
    except (InputError, RuntimeError) as error:
        line = (str(error).strip() or type(error).__name__).splitlines()[0]
        return [], [_check("ranks", False, f"rank {ranks.rank} of {ranks.world_size}: {line}")]
    others = {f"{host} {check['name']}": check for host, checks in everyone for check in checks if check not in failed}
    met = _check("ranks", True, f"{ranks.world_size} ranks of {len({host for host, _ in everyone})} hosts meet")
    return rows, [met, *(check | {"name": name} for name, check in others.items())]


def _check_grids(ranks: Ranks, device: Any) -> list[dict[str, Any]]:
    """On hosts x ranks per host; on a square too where those have one direction only and a torus would be a ring."""
    from hyperbatch.comm.doctor import check_collectives
    from hyperbatch.engine.ranks import host_grid
    from hyperbatch.plan.types import RankGrid

    hosts, square = host_grid(ranks), RankGrid.square(ranks.world_size)
    grids = [hosts] if min(hosts.rows, hosts.columns) > 1 else [square] if hosts.rows == 1 else [hosts, square]
    return [row for grid in dict.fromkeys(grids) for row in check_collectives(device, grid=grid)]


def format_doctor(values: dict[str, Any]) -> str:
    lines = [f"{'ok ' if check['ok'] else 'NO '} {check['name']:12} {check['detail']}" for check in values["checks"]]
    for row in values["collectives"]:
        verdict = "right" if row["correct"] else "WRONG"
        lines.append(f"    {row['name']:42} {verdict}  {row['median'] * 1e3:8.2f} ms  {row['gb_per_s']:6.2f} GB/s")
    return "\n".join(lines)


if __name__ == "__main__":
    _started_rank(Path(sys.argv[1]))
