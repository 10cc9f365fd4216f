"""The file of a checkpoint: written whole, checked when it is read, dropped when it is old."""

import errno
import json
import os
import random
import stat
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from hyperbatch import checkpoint, durable
from hyperbatch.arena import Arena
from hyperbatch.cli import main
from hyperbatch.config import Config
from hyperbatch.engine import saver
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.saver import Deadline
from hyperbatch.engine.snapshot import HostMemory
from hyperbatch.errors import InputError
from hyperbatch.plan.types import GroupPlan


def at_step(step, **progress):
    """A small checkpoint."""
    torch.manual_seed(step)
    return checkpoint.Checkpoint(
        config=Config(),
        progress=checkpoint.Progress(step=step, **progress),
        fixed=checkpoint.Fixed(order=[], plan=GroupPlan(strategy="single", groups=()), max_batch_per_rank=1),
        clock={},
        data_wait_s=0.0,
        model={"weight": torch.randn(20, 30), "bias": torch.randn(20)},
        norm={"mean": torch.randn(2, 20), "count": torch.tensor([3, 3])},
        optimizer={"momentum_buffer/weight": torch.randn(20, 30), "group0/last_lr": torch.tensor(0.5).double()},
        scaler={"scale": 1.0},
        train_samples=240,
        classes=["a", "b"],
        channels=1,
    )


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def saved_step(folder):
    return checkpoint.load(folder).progress.step


# Written whole


def test_a_checkpoint_that_cannot_be_written_leaves_the_one_of_its_name_whole(tmp_path, monkeypatch):
    path = checkpoint.save(tmp_path, at_step(3), keep=2)
    before = path.read_bytes()

    def full_disk(state, file):
        file.write(b"half of it")
        raise OSError("no space left on device")

    monkeypatch.setattr(torch, "save", full_disk)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(tmp_path, at_step(3), keep=2)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["step-00000003.pt"]  # nothing takes room on a disk that has none
    assert saved_step(tmp_path) == 3


def test_a_full_disk_is_called_that_whatever_torch_makes_of_it(tmp_path):
    """The kernel's own error, in the middle of torch's archive."""
    (tmp_path / "step-00000003.partial").symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as failed:
        checkpoint.save(tmp_path, at_step(3), keep=2)
    assert failed.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_a_checkpoint_gets_its_name_once_its_bytes_are_on_the_disk(tmp_path, monkeypatch):
    """After a power cut a name without bytes would be worse than no file. The old one stays until the new one has its
    name on the disk, too."""
    events, fsync, move, unlink = [], os.fsync, os.replace, Path.unlink

    def note_fsync(handle):
        status = os.fstat(handle)
        events.append("folder" if stat.S_ISDIR(status.st_mode) else status.st_size)
        fsync(handle)

    checkpoint.save(tmp_path, at_step(2), keep=1)
    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", lambda old, new: (events.append(new.name), move(old, new)))
    monkeypatch.setattr(Path, "unlink", lambda p, **how: (events.append(f"drop {p.name}"), unlink(p, **how)))
    path = checkpoint.save(tmp_path, at_step(3), keep=1)
    assert events[:4] == [path.stat().st_size, "step-00000003.pt", "folder", "drop step-00000002.pt"]
    assert saved_step(tmp_path) == 3


def test_a_new_folder_is_synced_into_its_parent(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(durable, "sync_folder", synced.append)
    checkpoint.save(tmp_path / "checkpoints", at_step(3), keep=1)
    assert synced == [tmp_path, tmp_path / "checkpoints"]


def test_a_file_system_that_cannot_sync_a_folder_is_no_error(tmp_path, monkeypatch):
    def refuse(number):
        def fsync(handle):
            if stat.S_ISDIR(os.fstat(handle).st_mode):
                raise OSError(number, "folder")

        return fsync

    monkeypatch.setattr(os, "fsync", refuse(errno.EINVAL))
    assert saved_step(checkpoint.save(tmp_path, at_step(3), keep=2)) == 3
    monkeypatch.setattr(os, "fsync", refuse(errno.EIO))
    with pytest.raises(OSError, match="folder"):
        checkpoint.save(tmp_path, at_step(4), keep=2)


# Checked


def test_of_300_flipped_bits_every_one_is_noticed(tmp_path):
    path = checkpoint.save(tmp_path, at_step(3), keep=2)
    good, draw = path.read_bytes(), random.Random(0)
    last = 8 * (len(good) - len(b"\nhyperbatch crc32 00000000\n"))
    bits = draw.sample(range(8 * len(good)), 300) + list(range(last, 8 * len(good)))
    for bit in bits:
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        with pytest.raises(InputError, match=r"is damaged|cannot be read"):
            checkpoint.load(path)
        with pytest.raises(InputError, match=r"is damaged|is not a weights file"):
            checkpoint.load_weights(path)
    path.write_bytes(good)
    assert saved_step(path) == 3


def test_a_tensor_that_is_not_the_one_that_was_taken_is_named(tmp_path):
    """The file is whole, but what was written had changed already."""
    values = at_step(3).to_dict()
    values["checksums"] = checkpoint.checksums(values)
    values["model"]["weight"][3, 4] += 1
    path = tmp_path / "step-00000003.pt"
    durable.write(path, lambda file: torch.save(values, file))
    with pytest.raises(InputError, match=r"step-00000003.pt is damaged: model/weight does not match its checksum"):
        checkpoint.load(path)
    del values["model"]["weight"]
    durable.write(path, lambda file: torch.save(values, file))
    with pytest.raises(InputError, match="model/weight does not match"):
        checkpoint.load(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool])
def test_every_tensor_has_a_checksum_of_its_own(dtype):
    tensor = torch.tensor([[0, 1, 1], [1, 0, 1]]).to(dtype)
    other = tensor.clone()
    other[1, 1] = 1
    whole, changed, turned, empty, number = (
        checkpoint.checksums({"model": {"w": t}})["model/w"]
        for t in (tensor, other, tensor.t().contiguous().t(), tensor[:0], tensor[0, 1])
    )
    assert whole != changed
    assert whole == turned  # the values count, not how they lie in memory
    assert empty == 0
    assert number != empty


def test_a_damaged_checkpoint_is_passed_over_on_resume_and_refused_when_named(tmp_path, capsys):
    checkpoint.save(tmp_path, at_step(3), keep=2)
    path = checkpoint.save(tmp_path, at_step(5), keep=2)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)
    saved = checkpoint.load(tmp_path)
    assert saved.progress.step == 3
    assert saved.skipped == (f"{path} is damaged: its bytes do not match its checksum",)
    for words in (["eval", str(path), "--device", "cpu"], ["export", str(path)]):
        assert main(words) == 2
        assert capsys.readouterr().err == f"hyperbatch: {saved.skipped[0]}\n"


def test_a_checkpoint_without_checksums_is_read(tmp_path):
    torch.save(at_step(3).to_dict(), tmp_path / "step-00000003.pt")
    saved = checkpoint.load(tmp_path)
    assert saved.progress.step == 3
    assert torch.equal(saved.model["weight"], at_step(3).model["weight"])


def test_a_checkpoint_that_lacks_something_is_not_continued_or_started_from(tmp_path):
    path = tmp_path / "step-00000003.pt"
    torch.save(at_step(3).to_dict() | {"fixed": {}}, path)
    with pytest.raises(InputError, match=r"step-00000003.pt is not complete: 'plan'"):
        checkpoint.load(tmp_path)
    with pytest.raises(InputError, match=r"step-00000003.pt is not complete: 'plan'"):
        checkpoint.load_weights(path)


# Kept and dropped


def save_all(folder, scores, *, keep, keep_best=True):
    """A checkpoint for each evaluation; None: one without. As a run does it."""
    progress = checkpoint.Progress()
    for step, score in enumerate(scores, start=1):
        progress.step = step
        if score is not None:
            progress.top1, progress.evaluated_step = score, step
        progress.note_best()
        saved = replace(at_step(step), progress=replace(progress))
        checkpoint.save(folder, saved, keep=keep, keep_best=keep_best)
    return [int(name[5:13]) for name in names(folder) if name != "best.pt"]


def test_the_newest_and_the_best_are_kept(tmp_path):
    scores = [0.1, 0.6, 0.3, 0.6, None, 0.5]
    assert save_all(tmp_path / "both", scores, keep=2) == [2, 5, 6]
    assert (tmp_path / "both" / "best.pt").readlink() == Path("step-00000002.pt")
    assert checkpoint.load(tmp_path / "both" / "best.pt").progress.top1 == 0.6
    assert save_all(tmp_path / "newest", scores, keep=2, keep_best=False) == [5, 6]
    assert not (tmp_path / "newest" / "best.pt").is_symlink()
    assert save_all(tmp_path / "last", [0.1, 0.2], keep=1) == [2]
    assert save_all(tmp_path / "none", [None, None, None], keep=1) == [3]


def test_a_run_that_went_back_forgets_what_came_later(tmp_path):
    save_all(tmp_path, [0.1, 0.2, 0.9], keep=3)
    saved = at_step(2, top1=0.2, evaluated_step=2, best_step=2, best_top1=0.2)
    checkpoint.save(tmp_path, saved, keep=3)
    assert names(tmp_path) == ["best.pt", "step-00000001.pt", "step-00000002.pt"]
    assert saved_step(tmp_path / "best.pt") == 2


def test_what_a_cut_short_write_has_left_is_removed(tmp_path):
    checkpoint.save(tmp_path, at_step(3), keep=2)
    (tmp_path / "step-00000004.partial").write_bytes(b"half")
    durable.remove_partials(tmp_path)
    durable.remove_partials(tmp_path / "nowhere")
    assert names(tmp_path) == ["step-00000003.pt"]


# On the host


def test_an_arena_is_copied_buffer_by_buffer(monkeypatch):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)).to(memory_format=torch.channels_last)
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=torch.bfloat16)
    tables = {"model": arena.named_masters() | {"1.bias": model[1].bias.detach()}, "other": arena.named_masters()}
    wanted = {table: {name: t.clone() for name, t in tensors.items()} for table, tensors in tables.items()}
    memory, copies = HostMemory(tables), []
    copy = torch.Tensor.copy_
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "copy_", lambda *args, **how: (copies.append(1), copy(*args, **how))[1])
        found = memory.copy()
    assert len(copies) == 2  # the masters, and the fp32 arena of norm parameters
    assert memory.covers(arena.masters)
    assert not memory.covers(arena.weights[torch.bfloat16])
    for buffer in arena.flat_weights():
        buffer.add_(1)  # as the next step does
    assert found["model"]["0.weight"].stride() == tables["model"]["0.weight"].stride()
    for table, tensors in wanted.items():
        assert all(torch.equal(found[table][name], tensor) for name, tensor in tensors.items())
    again = memory.copy()  # to the same place
    assert again["model"]["0.weight"].data_ptr() == found["model"]["0.weight"].data_ptr()
    assert torch.equal(again["model"]["0.weight"], wanted["model"]["0.weight"] + 1)


# By the clock


def taken_by(every_s, durations, monkeypatch):
    """The times at which a checkpoint was taken, and how often the ranks met."""
    met, now, taken = [], [0.0], []
    monkeypatch.setattr(saver, "share", lambda value, ranks: met.append(value) or value)
    deadline = Deadline(every_s, Ranks(), step=0, now=lambda: now[0])
    for step, duration in enumerate(durations, start=1):
        now[0] += duration
        if deadline.passed(step):
            taken.append(now[0])
            deadline.restart(step)
    return taken, len(met)


def test_minutes_between_checkpoints_are_kept_with_few_meetings(monkeypatch):
    taken, met = taken_by(60.0, [0.01] * 60_000, monkeypatch)
    assert len(taken) == 10
    gaps = [after - before for before, after in zip([0.01, *taken], taken, strict=False)]
    assert all(58.7 <= gap <= 60.0 for gap in gaps)
    assert met <= 10 * 9


def test_slow_first_steps_do_not_make_checkpoints_late(monkeypatch):
    """What came before the first stride's end does not count, however long it was."""
    taken, _ = taken_by(60.0, [100.0] + [5.0] * 3 + [0.01] * 5_000, monkeypatch)
    assert 158.7 <= taken[0] <= 160.0


def test_steps_longer_than_the_interval_are_each_followed_by_a_checkpoint(monkeypatch):
    assert taken_by(1.0, [2.0] * 4, monkeypatch) == ([4.0, 6.0, 8.0], 3)


def test_without_minutes_ranks_never_meet(monkeypatch):
    assert taken_by(0.0, [100.0] * 50, monkeypatch) == ([], 0)


# For others


def test_the_converted_folder_says_what_it_is_and_replaces_nothing(tmp_path, capsys):
    path = checkpoint.save(tmp_path / "run" / "checkpoints", at_step(3), keep=2)
    assert main(["export", str(tmp_path / "run"), "--format", "dcp"]) == 0
    folder = tmp_path / "run" / "model.dcp"
    assert capsys.readouterr().out == f"weights: {folder}\n"
    about = json.loads((folder / "hyperbatch.json").read_text())
    assert (about["progress"]["step"], about["classes"], about["weights"]) == (3, ["a", "b"], "trained")
    assert main(["export", str(path), "--format", "dcp", "--output", str(folder)]) == 2
    assert capsys.readouterr().err == f"hyperbatch: {folder} exists already; remove it or choose another --output\n"
    assert main(["export", str(path), "--format", "dcp", "--output", str(path / "x")]) == 2
    assert "cannot be written" in capsys.readouterr().err
    (exported := tmp_path / "model.safetensors").touch()
    assert main(["export", str(exported), "--format", "dcp"]) == 2
    told = f"{exported} has no optimizer state; give the folder of the run or a checkpoint for --format dcp"
    assert capsys.readouterr().err == f"hyperbatch: {told}\n"
    assert names(tmp_path / "run") == ["checkpoints", "model.dcp"]


def test_a_full_disk_is_told_in_one_line_by_the_converter(tmp_path, monkeypatch, capsys):
    path = checkpoint.save(tmp_path / "run", at_step(3), keep=2)

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
    assert main(["export", str(path), "--format", "dcp", "--output", str(tmp_path / "other")]) == 2
    told = f"{tmp_path / 'other'} cannot be written: [Errno 28] No space left on device; choose another --output"
    assert capsys.readouterr().err == f"hyperbatch: {told}\n"
    assert names(tmp_path) == ["run"]
