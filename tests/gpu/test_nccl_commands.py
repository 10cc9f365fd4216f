"""Real commands as NCCL ranks that share one GPU, as a launcher would start them.

A rank that fails, dies or stops ends a run on every rank, and the others say which one it was.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from harness import one_gpu
from PIL import Image

from hyperbatch.data.source import EncodedSource

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TIMEOUT_S = 10  # of the run: a rank that gives no sign of life for so long is missed
START_UP_S = 90
LEAVE_S = 30  # what an ending may take besides: interpreters, drivers, 2 to 4 processes on one GPU
RUN_FOLDER = "run"
RUN = [
    *("--dataset", "synthetic", "--train-samples", "4096", "--eval-samples", "64", "--classes", "10"),
    *("--model", "resnet8", "--image-size", "16", "--eval-size", "16", "--eval-resize", "16", "--augment", "none"),
    *("--batch-phases", "0:64", "--epochs", "10000", "--eval-every-epochs", "5000", "--device", "cuda"),
    *("--precision", "fp32", "--timeout-s", str(TIMEOUT_S)),
]


class Ranks:
    """The same command on every rank. `wait` gives exit codes; what they said is in `said`."""

    def __init__(self, folder: Path, world_size: int, *arguments: str) -> None:
        """arguments: of `hyperbatch`."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.out, self.logs = folder / RUN_FOLDER, [folder / f"rank{rank}.log" for rank in range(world_size)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            place = {"RANK": rank, "WORLD_SIZE": world_size, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
            place |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
            env = (
                os.environ | one_gpu(rank) | {name: str(value) for name, value in place.items()} | {"PYTHONPATH": path}
            )
            command = [sys.executable, "-m", "hyperbatch", *arguments]
            with log.open("w") as file:
                self.processes.append(subprocess.Popen(command, env=env, stdout=file, stderr=subprocess.STDOUT))

    def trained(self, steps: int) -> None:
        """Waits until so many steps are behind the run."""
        metrics, deadline = self.out / "metrics.jsonl", time.monotonic() + START_UP_S
        while not metrics.exists() or metrics.read_text().count('"step"') < steps:
            assert time.monotonic() < deadline, f"no step {steps}:\n{self.said()}"
            assert all(process.poll() is None for process in self.processes), f"ended early:\n{self.said()}"
            time.sleep(0.1)

    def wait(self, within_s: float, *, besides: int | None = None) -> list[int | None]:
        """Exit codes of all, or of all besides one that cannot end; a rank that hangs fails the test."""
        deadline = time.monotonic() + within_s
        for rank, process in enumerate(self.processes):
            if rank != besides:
                try:
                    process.wait(max(0.1, deadline - time.monotonic()))
                except subprocess.TimeoutExpired:
                    pytest.fail(f"rank {rank} still runs after {within_s} s:\n{self.said()}")
        return [process.poll() for process in self.processes]

    def said(self, rank: int | None = None) -> str:
        logs = self.logs if rank is None else [self.logs[rank]]
        return "\n".join(f"--- {log.stem}\n{log.read_text()}" for log in logs)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def ranks(folder, world_size, *arguments):
    """A training run."""
    run = Ranks(folder, world_size, "train", "digits", *RUN, "--out", str(folder / RUN_FOLDER), *arguments)
    try:
        yield run
    finally:
        run.end()


def test_the_doctor_checks_the_collectives_of_all_hosts(tmp_path):
    run = Ranks(tmp_path, 4, "doctor", "--collectives", "--json")
    try:
        assert run.wait(START_UP_S + TIMEOUT_S + LEAVE_S) == [0] * 4, run.said()
    finally:
        run.end()
    text = run.logs[0].read_text()
    rows = json.loads(text[text.index("{") : text.rindex("}") + 1])["collectives"]
    assert {row["grid"] for row in rows} == {"4x1", "2x2"}
    assert all(row["correct"] for row in rows), rows
    assert "correct" not in "".join(log.read_text() for log in run.logs[1:]), "rank 0 prints, and nobody else"


@pytest.mark.parametrize(("world_size", "graph"), [(2, "off"), (2, "on"), (4, "on")])
def test_a_loss_that_is_no_number_ends_all_ranks_with_its_message(tmp_path, world_size, graph):
    with ranks(tmp_path, world_size, "--graph", graph, "--lr", "1e30", "--warmup-epochs", "0") as run:
        codes = run.wait(START_UP_S + TIMEOUT_S + LEAVE_S)
        assert all(code not in (0, None) for code in codes), codes
        assert "the loss became nan" in run.said(0), run.said()
        assert "Traceback" not in run.said(0), run.said()


@pytest.mark.parametrize(("world_size", "graph", "victim"), [(2, "off", 1), (2, "on", 0), (2, "on", 1), (4, "on", 2)])
def test_a_killed_rank_is_named_by_the_others(tmp_path, world_size, graph, victim):
    with ranks(tmp_path, world_size, "--graph", graph) as run:
        run.trained(steps=20)
        run.processes[victim].kill()
        codes = run.wait(TIMEOUT_S + LEAVE_S)
        assert all(code not in (0, None) for code in codes), codes
        if victim != 0:  # rank 0 keeps the store that the others would hear of it from
            assert any(f"rank {victim}" in run.said(rank) for rank in range(world_size) if rank != victim), run.said()


@pytest.mark.parametrize(("world_size", "graph", "victim"), [(2, "on", 1), (4, "on", 1), (2, "off", 0), (2, "on", 0)])
def test_a_stopped_rank_is_missed_within_the_timeout(tmp_path, world_size, graph, victim):
    """Rank 0 keeps the store of all."""
    with ranks(tmp_path, world_size, "--graph", graph) as run:
        run.trained(steps=20)
        run.processes[victim].send_signal(signal.SIGSTOP)
        codes = run.wait(TIMEOUT_S + LEAVE_S, besides=victim)
        assert all(code not in (0, None) for rank, code in enumerate(codes) if rank != victim), codes
        who = "rank 0, which hosts the store," if victim == 0 else "rank 1"
        assert f"{who} has not responded" in run.said(1 - victim), run.said()


@pytest.mark.parametrize("graph", ["off", "on"])
def test_a_rank_that_hangs_is_named_with_the_place_of_each(tmp_path, graph):
    """Its heart beats on. In a captured step nothing else would ever end the others."""
    with ranks(tmp_path, 2, "--graph", graph, "--dataset", "test_nccl_commands:stuck", "--cache", "none") as run:
        codes = run.wait(START_UP_S + TIMEOUT_S + LEAVE_S)
        assert all(code not in (0, None) for code in codes), codes
        said = run.said()
        assert "rank 1 has made no progress for" in said, said
        assert "waiting for data" in said, said
        assert "rank 0: step " in said, said
        if graph == "off":  # torch's flight recorder sees no captured collective
            assert "; waits in nccl:" in said, said


@pytest.mark.parametrize("graph", ["off", "on"])
def test_control_c_ends_a_run(tmp_path, graph):
    with ranks(tmp_path, 2, "--graph", graph) as run:
        run.trained(steps=20)
        for process in run.processes:
            process.send_signal(signal.SIGINT)
        codes = run.wait(TIMEOUT_S + LEAVE_S)
        assert all(code not in (0, None) for code in codes), codes
        assert "interrupted" in (run.out / "record.json").read_text()


@pytest.mark.parametrize("graph", ["off", "on"])
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "test_nccl_commands:Fragile", "--eval-every-epochs", "1"], "the glass broke on rank 1"),
        (["--dataset", "test_nccl_commands:rotten", "--max-bad-samples", "0", "--cache", "none"], "repair the data"),
    ],
    ids=["in evaluation", "in the loader"],
)
def test_an_error_of_one_rank_ends_the_others_and_is_told(tmp_path, graph, arguments, words):
    with ranks(tmp_path, 2, "--graph", graph, *arguments) as run:
        codes = run.wait(START_UP_S + TIMEOUT_S + LEAVE_S)
        assert all(code not in (0, None) for code in codes), codes
        assert words in run.said(1), run.said()
        assert (run.out / "metrics.jsonl").read_text().count('"step"') > 10, "it was training by then"


class Fragile(torch.nn.Module):
    """Breaks on rank 1 at the first image it evaluates, while rank 0 goes on. Blank ones are there before the run."""

    def __init__(self, classes: int, in_channels: int) -> None:
        super().__init__()
        self.body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(in_channels * 256, classes))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if not self.training and os.environ["RANK"] == "1" and images.any():
            raise RuntimeError("the glass broke on rank 1")
        return self.body(images)


class Rotten(EncodedSource):
    """PNG files. On rank 1 the later ones cannot be read."""

    def __init__(self, name: str, count: int) -> None:
        super().__init__(name, ("a", "b"), np.arange(count) % 2)
        self.reads = 0

    def read(self, index: int) -> bytes:
        self.reads += 1
        if os.environ["RANK"] == "1" and self.reads > 1500:
            return b"not an image"
        file = io.BytesIO()
        Image.new("RGB", (16, 16), (200 * int(self.labels[index]), 0, 0)).save(file, "PNG")
        return file.getvalue()


def rotten(_) -> tuple[Rotten, Rotten]:
    return Rotten("train", 4096), Rotten("val", 64)


class Stuck(Rotten):
    """PNG files. On rank 1 the later ones are never read to their end."""

    def read(self, index: int) -> bytes:
        parent = os.getppid()
        while os.environ["RANK"] == "1" and self.reads == 1500 and os.getppid() == parent:
            time.sleep(0.1)
        return super().read(index)


def stuck(_) -> tuple[Stuck, Stuck]:
    return Stuck("train", 4096), Stuck("val", 64)
