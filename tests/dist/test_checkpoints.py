"""Checkpoints of running runs: written beside training, at the steps that were asked for, through kills and faults."""

import errno
import os
import random
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import run_ranks
from test_training import metrics, ranks_here, train, train_rank
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from toy import Masked, config, flat_weights, same_bits

from hyperbatch import checkpoint, durable
from hyperbatch.engine import loop, saver, snapshot
from hyperbatch.engine.loop import run
from hyperbatch.engine.saver import Deadline
from hyperbatch.errors import InputError
from hyperbatch.export import export_dcp, load_trained
from hyperbatch.record import RunRecord


def steps_kept(out):
    return [int(path.name[5:13]) for path in sorted((out / "checkpoints").glob("step-*.pt"))]


# Beside training


def test_training_goes_on_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    """The write of step 3 ends when step 5 has been trained, and that of step 6 begins after it."""
    trained, events = threading.Event(), []
    write, train_stride = checkpoint.save, loop.train_stride

    def slow(folder, saved, **options):
        events.append(f"begin {saved.progress.step}")
        assert trained.wait(60), "training waits for the write"
        path = write(folder, saved, **options)
        events.append(f"end {saved.progress.step}")
        return path

    def note(runner, stride, *rest):
        if stride[-1].index + 1 == 6:
            trained.set()
        return train_stride(runner, stride, *rest)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(loop, "train_stride", note)
    record, weights = train(1, tmp_path / "beside", max_steps=8, checkpoint_every_steps=3, keep_checkpoints=9)
    assert events == [f"{what} {step}" for step in (3, 6, 8) for what in ("begin", "end")]  # the run's end waits, too
    assert steps_kept(tmp_path / "beside") == [3, 6, 8]
    assert record["warnings"] == []
    monkeypatch.undo()
    # What was written is the run at step 3, not at step 5.
    _, at_3 = train(1, tmp_path / "short", max_steps=3)
    saved = checkpoint.load(tmp_path / "beside" / "checkpoints" / "step-00000003.pt")
    assert all(torch.equal(tensor, at_3[name]) for name, tensor in saved.model.items())
    assert not same_bits(weights, at_3)


def test_a_fault_of_the_writer_ends_the_run_at_the_next_checkpoint(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(checkpoint, "save", broken)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        train(1, tmp_path, max_steps=8, checkpoint_every_steps=3)
    assert RunRecord.load(tmp_path).result.steps == 6


def test_a_run_that_fails_finishes_the_write_that_is_under_way(tmp_path, monkeypatch):
    failed, write, train_stride = threading.Event(), checkpoint.save, loop.train_stride

    def slow(*args, **options):
        failed.wait(60)
        return write(*args, **options)

    def fails(runner, stride, *rest):
        if stride[-1].index == 4:
            failed.set()
            raise MemoryError("out of memory")
        return train_stride(runner, stride, *rest)

    monkeypatch.setattr(checkpoint, "save", slow)
    monkeypatch.setattr(loop, "train_stride", fails)
    with pytest.raises(MemoryError):
        train(1, tmp_path, checkpoint_every_steps=3)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000003.pt"]


def waits(rank, values, fails):
    """What each wait answered, and the files that were there then."""
    write, found = checkpoint.save, []

    def slow(folder, saved, **options):
        time.sleep(0.2)  # rank 1 comes first
        if fails:
            raise OSError(5, "Input/output error")
        return write(folder, saved, **options)

    def wait(self):
        answer = saver.Saver.wait_on_all_ranks(self)
        found.append((answer, sorted(path.name for path in (self._folder or Path()).glob("step-*"))))
        return answer

    checkpoint.save = slow
    save = saver.Saver.save
    saver.Saver.save = lambda self: (save(self), wait(self))
    run(config(**values), ranks_here())
    return found


@pytest.mark.parametrize("fails", [False, True])
def test_every_rank_can_wait_until_a_checkpoint_is_on_the_disk(tmp_path, fails):
    first, second = run_ranks(2, waits, {"out": str(tmp_path), "max_steps": 2}, fails)
    assert first == second == [(not fails, [] if fails else ["step-00000002.pt"])]


# Many ranks


def reads_on_rank_0_alone(rank, values):
    if rank != 0:
        checkpoint.load = checkpoint._read = None
    return run(config(**values), ranks_here()).to_dict()


def test_a_run_goes_on_from_what_rank_0_reads(tmp_path):
    """Thousands of ranks would otherwise read the same file at the same time. Each gets its own statistics."""
    values = {"model": "toy:normed", "averaging": "ema", "averaging_decay": 0.9, "max_steps": 12}
    _, unbroken = train(2, tmp_path / "whole", **values)
    train(2, tmp_path / "parts", **{**values, "max_steps": 7})
    run_ranks(2, reads_on_rank_0_alone, {**values, "out": str(tmp_path / "parts"), "resume": "yes"})
    saved, resumed = checkpoint.load(tmp_path / "whole"), checkpoint.load(tmp_path / "parts")
    assert same_bits(unbroken, flat_weights(tmp_path / "parts"))
    for table in snapshot.STATISTICS:
        assert same_bits(getattr(saved, table), getattr(resumed, table))
        assert any(not torch.equal(rows[0], rows[1]) for rows in getattr(saved, table).values())


def fetches_on_rank_0_alone(rank, values):
    if rank != 0:
        checkpoint.load_weights = None
    return train_rank(rank, values)


def test_a_run_starts_from_the_weights_that_rank_0_reads(tmp_path):
    """Those of a hub may be fetched once, and not by thousands of ranks."""
    train(1, tmp_path / "base", max_steps=2)
    values = {"out": str(tmp_path / "run"), "init_from": str(tmp_path / "base"), "lr": 1e-30, "max_steps": 1}
    run_ranks(2, fetches_on_rank_0_alone, values)
    before, after = (checkpoint.load(tmp_path / name).model for name in ("base", "run"))
    assert same_bits(before, after)


ODD = {
    "mean": torch.tensor([0.1, -2.0, 1e-40]),
    "count": torch.tensor((1 << 60) + 1),  # which fp64 cannot hold
    "flag": torch.tensor([True, False, True]),
    "half": torch.randn(3, 5, generator=torch.Generator().manual_seed(1)).bfloat16(),
    "none": torch.empty(0, 4),
    "waves": torch.tensor([1 + 2j], dtype=torch.complex128),
    "turned": torch.arange(6.0).reshape(2, 3).T,
}


def there_and_back(rank, merged):
    """What rank 0 has gathered, and what each rank gets of it."""
    ranks = ranks_here()
    mine = {name: tensor if tensor.dtype == torch.bool else tensor * (rank + 1) for name, tensor in ODD.items()}
    gathered = snapshot.gather_rows(mine, ranks)
    like = {name: tensor[None] for name, tensor in ODD.items()}
    rows = {name: tensor[-1:] if merged else tensor for name, tensor in gathered.items()}
    return mine, gathered, snapshot.scatter_rows(rows if rank == 0 else {}, like, ranks)


@pytest.mark.parametrize("merged", [False, True])
def test_statistics_travel_as_the_bytes_that_they_are(merged):
    answers = run_ranks(3, there_and_back, merged)
    gathered = answers[0][1]
    for rank, (mine, _, scattered) in enumerate(answers):
        for name, tensor in mine.items():
            assert torch.equal(gathered[name][rank], tensor)
            assert torch.equal(scattered[name][0], answers[2 if merged else rank][0][name])
            assert scattered[name].dtype == gathered[name].dtype == tensor.dtype


# Full disks


def disk_is_full(rank, values, step):
    """The kernel says so when the checkpoint of this step is written."""
    write = checkpoint.save

    def save(folder, saved, **options):
        if saved.progress.step == step:
            folder.mkdir(exist_ok=True)
            (folder / f"step-{step:08d}.partial").symlink_to("/dev/full")
        return write(folder, saved, **options)

    checkpoint.save = save
    return run(config(**values), ranks_here()).to_dict()


@pytest.mark.parametrize("step", [10, 30])
def test_a_full_disk_costs_a_checkpoint_and_not_the_run(tmp_path, step):
    """Step 30 is the last: the run's end waits for the write and tells of it."""
    _, whole = train(2, tmp_path / "whole")
    values = {"out": str(tmp_path / "full"), "keep_checkpoints": 9}
    record = run_ranks(2, disk_is_full, values, step, timeout_s=120)[0]
    told = f"the checkpoint of step {step} could not be written: No space left on device; the run continues without it"
    assert record["warnings"] == RunRecord.load(tmp_path / "full").warnings == [told]
    assert steps_kept(tmp_path / "full") == [other for other in (10, 20, 25, 30) if other != step]
    assert not list((tmp_path / "full" / "checkpoints").glob("*.partial"))
    if step == 10:
        assert same_bits(whole, {**whole, **checkpoint.load(tmp_path / "full").model})
    assert record["result"]["top1"] == RunRecord.load(tmp_path / "whole").result.top1


def test_a_checkpoint_that_is_deleted_as_soon_as_it_is_written_is_no_fault(tmp_path, monkeypatch):
    train(1, tmp_path / "run")
    write = durable.write

    def deleted(path, put):
        write(path, put)
        path.unlink()

    monkeypatch.setattr(durable, "write", deleted)
    checkpoint.save(tmp_path / "other", checkpoint.load(tmp_path / "run"), keep=2)
    assert not list((tmp_path / "other").iterdir())


# Kills


def killed_while_writing(rank, values, step, after_bytes):
    """SIGKILL of this process when so many bytes of a checkpoint have gone to its file."""
    put, wanted = durable._Summed.write, threading.Event()
    write, written = checkpoint.save, []

    def save(folder, saved, **options):
        if saved.progress.step == step:
            wanted.set()
        return write(folder, saved, **options)

    def count(self, data):
        if wanted.is_set():
            written.append(len(data))
            if sum(written) > after_bytes:
                self._file.flush()
                os.kill(os.getpid(), signal.SIGKILL)
        return put(self, data)

    checkpoint.save, durable._Summed.write = save, count
    run(config(**values), ranks_here())


@pytest.mark.parametrize("seed", range(3))
def test_a_run_that_is_killed_while_it_writes_goes_on_from_the_checkpoint_before(tmp_path, seed):
    """At a random byte of a random checkpoint; rank 1 loses rank 0 and fails."""
    draw = random.Random(seed)
    step, after_bytes = draw.choice([20, 25, 30]), draw.randrange(20_000)
    values = {"out": str(tmp_path / "killed"), "model": "toy:normed", "timeout_s": 20.0}
    with pytest.raises(AssertionError, match="rank 1: "):
        run_ranks(2, killed_while_writing, values, step, after_bytes, may_die=[0], timeout_s=60)
    left = tmp_path / "killed" / "checkpoints"
    assert [path.name for path in left.glob("*.partial")] == [f"step-{step:08d}.partial"]
    assert steps_kept(tmp_path / "killed")[-1] == {20: 10, 25: 20, 30: 25}[step]
    record, resumed = train(2, tmp_path / "killed", model="toy:normed", resume=True)
    _, whole = train(2, tmp_path / "whole", model="toy:normed")
    assert same_bits(whole, resumed)
    assert metrics(tmp_path / "killed") == metrics(tmp_path / "whole")
    assert not list(left.glob("*.partial"))
    assert record["warnings"] == []


def test_a_flipped_bit_of_the_newest_costs_its_steps_and_nothing_else(tmp_path):
    _, whole = train(2, tmp_path / "whole", model="toy:normed")
    train(2, tmp_path / "parts", model="toy:normed", max_steps=22)
    newest = tmp_path / "parts" / "checkpoints" / "step-00000022.pt"
    data = bytearray(newest.read_bytes())
    data[len(data) // 2] ^= 1
    newest.write_bytes(data)
    record, resumed = train(2, tmp_path / "parts", model="toy:normed", resume=True)
    assert record["warnings"] == [f"{newest} is damaged: its bytes do not match its checksum"]
    assert same_bits(whole, resumed)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def test_with_resume_auto_a_run_whose_only_checkpoint_is_damaged_begins_again(tmp_path):
    """Nobody is there to decide otherwise. The file is kept beside, and one who asked to continue is refused."""
    _, whole = train(2, tmp_path / "whole", model="toy:normed")
    train(2, tmp_path / "torn", model="toy:normed", max_steps=8)
    folder = tmp_path / "torn" / "checkpoints"
    only = folder / "step-00000008.pt"
    os.truncate(only, only.stat().st_size // 2)
    with pytest.raises(AssertionError, match=r"step-00000008.pt cannot be read: it is damaged"):
        train(2, tmp_path / "torn", model="toy:normed", resume=True)
    record, again = train(2, tmp_path / "torn", model="toy:normed", resume="auto")
    assert len(record["warnings"]) == 1
    assert record["warnings"][0].endswith("there is no other checkpoint, so the run starts again from the beginning")
    assert same_bits(whole, again)
    assert metrics(tmp_path / "torn") == metrics(tmp_path / "whole")
    assert (folder / "step-00000008.pt.damaged").exists()


def test_a_checkpoint_that_cannot_be_read_just_now_is_no_damaged_one(tmp_path, monkeypatch):
    """A run that began again would drop it."""
    train(1, tmp_path, max_steps=8)

    def refused(*args, **kwargs):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(torch, "load", refused)
    with pytest.raises(InputError, match=r"step-00000008.pt cannot be read: Input/output error"):
        train(1, tmp_path, resume="auto")
    assert steps_kept(tmp_path) == [8]


# When


@pytest.mark.parametrize("steps_per_launch", [1, 4])
def test_checkpoints_every_so_many_steps_come_beside_those_by_epochs(tmp_path, steps_per_launch):
    """Ten steps are an epoch. Strides end where a checkpoint follows."""
    values = {"max_steps": 20, "keep_checkpoints": 99, "steps_per_launch": steps_per_launch}
    _, weights = train(1, tmp_path / "steps", checkpoint_every_steps=7, **values)
    assert steps_kept(tmp_path / "steps") == [7, 10, 14, 20]
    train(1, tmp_path / "only", checkpoint_every_steps=7, checkpoint_every_epochs=0.0, **values)
    assert steps_kept(tmp_path / "only") == [7, 14, 20]
    _, same = train(1, tmp_path / "none", **values)
    assert same_bits(weights, same)


def by_the_clock(rank, values):
    """A step takes a minute by rank 0's clock; rank 1's stands still."""
    minutes, train_stride = [0.0], loop.train_stride

    def later(runner, stride, *rest):
        minutes[0] += len(stride) if rank == 0 else 0
        return train_stride(runner, stride, *rest)

    class Clocked(Deadline):
        def __init__(self, every_s, ranks, *, step):
            super().__init__(every_s, ranks, step=step, now=lambda: 60 * minutes[0])

    loop.train_stride, saver.Deadline = later, Clocked
    taken, save = [], saver.Saver.save

    def note(self):
        taken.append(self._run.progress.step)
        save(self)

    saver.Saver.save = note
    run(config(**values), ranks_here())
    return taken


def test_checkpoints_by_the_minute_are_taken_by_all_ranks_at_once(tmp_path):
    """Rank 0's clock says when. A checkpoint for another reason (step 20) begins the time anew."""
    values = {"out": str(tmp_path), "max_steps": 23, "checkpoint_every_minutes": 4.0}
    taken = run_ranks(2, by_the_clock, {**values, "keep_checkpoints": 99})
    assert taken[0] == taken[1] == steps_kept(tmp_path)
    assert taken[0] == [4, 7, 10, 13, 16, 19, 20, 23]


def test_no_clock_is_looked_at_when_no_checkpoint_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "share", lambda *_: pytest.fail("ranks met"))
    record = loop.run(
        config(out=str(tmp_path), max_steps=3, keep_checkpoints=0, checkpoint_every_minutes=1e-9), ranks_here()
    )
    assert record.result.steps == 3
    assert not (tmp_path / "checkpoints").exists()


def test_the_best_of_a_run_is_kept_through_a_resume(tmp_path, monkeypatch):
    scores = iter([0.2, 0.9, 0.3, 0.9])
    evaluate = loop.evaluate_run

    def scored(run, journal):
        evaluate(run, journal)
        run.progress.top1 = next(scores)
        return False

    monkeypatch.setattr(loop, "evaluate_run", scored)
    train(1, tmp_path, keep_checkpoints=1, max_steps=22, final_eval=False)
    assert steps_kept(tmp_path) == [20, 22]
    train(1, tmp_path, keep_checkpoints=1, resume=True)
    assert steps_kept(tmp_path) == [20, 30]
    assert checkpoint.load(tmp_path / "checkpoints" / "best.pt").progress.step == 20


# For others


@pytest.mark.parametrize("averaging", ["none", "ema"])
def test_a_checkpoint_holds_what_the_models_state_dict_does(tmp_path, averaging):
    values = {"model": "toy:Masked", "averaging": averaging, "keep_checkpoints": 1}
    _, whole = train(1, tmp_path / "whole", max_steps=6, **values)
    train(1, tmp_path / "parts", max_steps=3, **values)
    _, resumed = train(1, tmp_path / "parts", max_steps=6, resume=True, **values)
    assert same_bits(whole, resumed)
    weights = checkpoint.load(tmp_path / "parts").weights()
    assert weights.keys() == Masked(4, 1).state_dict().keys()
    load_trained(tmp_path / "parts").build(trust_code=True)


def read_by_dcp(rank, folder, shapes):
    """Sharded over the ranks there are, as FSDP would ask for it."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def empty(shape, dtype):
        places = [Shard(0)] if shape and shape[0] >= dist.get_world_size() else [Replicate()]
        return distribute_tensor(torch.zeros(shape, dtype=dtype), mesh, places)

    found = {name: empty(*spec) for name, spec in shapes.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        dcp.load(found, checkpoint_id=folder)
    return {name: tensor.full_tensor() for name, tensor in found.items()}


def test_a_converted_checkpoint_is_read_by_torch_distributed_on_any_number_of_ranks(tmp_path):
    train(2, tmp_path, model="toy:normed", max_steps=5)
    saved = checkpoint.load(tmp_path)
    folder = export_dcp(tmp_path)
    wanted = {f"model.{name}": tensor for name, tensor in saved.weights().items()}
    momentum = {name: tensor for name, tensor in saved.optimizer.items() if name.startswith("momentum_buffer/")}
    assert len(momentum) == len(saved.model)
    for name, tensor in momentum.items():
        key, _, parameter = name.partition("/")
        wanted[f"optimizer.state.{parameter}.{key}"] = tensor
    shapes = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in wanted.items()}
    for world_size in (1, 3):
        for found in run_ranks(world_size, read_by_dcp, str(folder), shapes):
            assert same_bits(found, wanted)
    listed = dcp.FileSystemReader(Path(folder)).read_metadata().state_dict_metadata
    assert set(listed) == set(wanted)
