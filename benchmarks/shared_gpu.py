"""A sweep over numbers of ranks that share one GPU, which `hyperbatch sweep` cannot start: NCCL refuses it on one host.

    python -m benchmarks.shared_gpu benchmarks/plans/nccl_ranks.toml --out records/DATE_nccl_ranks [--until SECONDS]

To NCCL each rank is a separate host. Ranks communicate over sockets on loopback, so speeds mean nothing, but everything
else is as with several GPUs. Ranks are started once for each `nproc` of the plan and train its runs in turn, in one
process group. The folder is like that of `hyperbatch sweep`: rows are written as runs end, and existing rows are not
repeated. Without a GPU the ranks communicate through gloo.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from hyperbatch.config import Config
from hyperbatch.engine.loop import run as train
from hyperbatch.engine.ranks import Ranks
from hyperbatch.record import RunRecord
from hyperbatch.sweep.command import check_runs, format_sweep, prepare_folder, progress_line, result_of, run_label
from hyperbatch.sweep.missing import confirming
from hyperbatch.sweep.page import write_page
from hyperbatch.sweep.plan import PlannedRun, load_plan
from hyperbatch.sweep.rows import REPORT, append_row, note_environment, read_rows
from hyperbatch.sweep.trainer import Trainer, ranks_of

OWN_HOST = {
    **dict.fromkeys(("NCCL_IB_DISABLE", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"), "1"),
    **dict.fromkeys(("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"), "lo"),
}


class RankTrainer(Trainer):
    """Trains as one rank of an open process group."""

    def __init__(self, rank: int, world_size: int, scratch: Path) -> None:
        super().__init__(None)
        self._ranks = Ranks(rank=rank, world_size=world_size, launcher="shared GPU")
        self._scratch = scratch

    def _train(self, config: Config, out: Path | None) -> RunRecord:
        return train(config.override(out=str(self._scratch), keep_checkpoints=0), self._ranks)


def rank_main(
    rank: int,
    world_size: int,
    meeting: str,
    plan_file: str,
    data: str | None,
    folder: str,
    numbers: list[int],
    end: float,
) -> None:
    """Runs one rank. numbers: those of the runs to train, one after another, until `end`."""
    os.environ.update(OWN_HOST, NCCL_HOSTID=f"host{rank}")
    torch.set_num_threads(1)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    place: dict[str, Any] = {"rank": rank, "world_size": world_size, "timeout": timedelta(seconds=120)}
    dist.init_process_group(backend, init_method=f"file://{meeting}/store", **place)
    plan = load_plan(Path(plan_file), data=data)
    runs = {run.number: run for run in plan.every_run}
    for number in numbers:
        in_time = torch.tensor([time.time() < end])
        dist.broadcast(in_time, src=0)  # the clock of rank 0 decides
        if not in_time.item():
            break
        trainer = RankTrainer(rank, world_size, Path(meeting) / str(number))
        row = trainer.row_of(runs[number])
        if rank == 0:
            append_row(Path(folder), row)
            if trainer.environment is not None:
                note_environment(Path(folder), trainer.environment)
            print(f"{run_label(plan, runs[number])}  {progress_line(row)}", flush=True)
        if row.error is not None:
            raise SystemExit(f"rank {rank}: {row.error}; the process group may be broken, run the same command again")
        dist.barrier()
    dist.destroy_process_group()


def sweep_ranks(plan_file: Path, folder: Path, *, data: str | None = None, until_s: float = 1e9) -> str:
    """Trains the missing runs. Returns the table."""
    plan, end = load_plan(plan_file, data=data), time.time() + until_s
    check_runs(plan)
    prepare_folder(folder, plan)

    def make(runs: Sequence[PlannedRun]) -> None:
        done = {row.digest for row in read_rows(folder)}
        for world_size in sorted({ranks_of(run.config) for run in runs}):
            missing = [run.number for run in runs if ranks_of(run.config) == world_size and run.digest not in done]
            if missing and time.time() < end:
                with tempfile.TemporaryDirectory(prefix="hyperbatch-ranks-") as meeting:
                    args = (world_size, meeting, str(plan_file), data, str(folder), missing, end)
                    processes.spawn(rank_main, args=args, nprocs=world_size)  # pyright: ignore[reportPrivateImportUsage]

    make(plan.runs)
    rows = read_rows(folder)
    make([run for search in plan.searches for run in confirming(search, rows) or ()])
    result = result_of(plan, folder)
    write_page(folder / REPORT, plan, result.points)
    return format_sweep(result)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows and the report")
    parser.add_argument("--data", help="folder of the data set")
    parser.add_argument("--until", type=float, default=1e9, help="begin no run after this many seconds")
    args = parser.parse_args(arguments)
    print(sweep_ranks(args.plan, args.out, data=args.data, until_s=args.until))


if __name__ == "__main__":
    main()
