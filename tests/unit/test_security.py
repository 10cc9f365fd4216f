"""Files that somebody else has made, and names of files to write: one line, and nothing else happens."""

from __future__ import annotations

import gzip
import io
import json
import os
import struct
import threading
import zlib
from pathlib import Path

import pytest
import torch

from hyperbatch import memory
from hyperbatch.cli import main
from hyperbatch.config import Config
from hyperbatch.data import decode, folders
from hyperbatch.data.layouts.archives import open_archive
from hyperbatch.data.source import BadSample
from hyperbatch.durable import replace_text
from hyperbatch.engine import evaluate, loop
from hyperbatch.engine.agent import check_nproc
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError
from hyperbatch.export import TrainedModel, export
from hyperbatch.recipes import get_recipe
from hyperbatch.report import write_report

# Code that a config names


@pytest.mark.parametrize("field", [{"model": "evil:model"}, {"dataset": "evil:data"}])
def test_a_checkpoint_that_names_code_runs_none_of_it(tmp_path, monkeypatch, field):
    """Its config comes from whoever wrote it."""
    (tmp_path / "evil.py").write_text("raise SystemExit('code of a checkpoint was run')")
    monkeypatch.syspath_prepend(tmp_path)
    saved = TrainedModel(
        config=Config().override(**field),
        classes=("a", "b"),
        channels=1,
        mean=(0.5,),
        std=(0.5,),
        whole=True,
        step=1,
        which="trained",
        weights={},
        path="x.pt",
    )
    monkeypatch.setattr(evaluate, "load_trained", lambda path, **_: saved)
    with pytest.raises(
        InputError, match=r"names evil:(model|data) as its (model|data set), which is Python code .* use --trust-code"
    ):
        evaluate.evaluate_checkpoint(tmp_path)


# Files with other values than a run writes

GARBAGE = (None, 5, "<script>alert(1)</script>", [], {"a": "b"}, [1, "x"], [{"a": 1}], {"a": None}, 10**30)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a short run."""
    out = tmp_path_factory.mktemp("trained") / "run"
    values = {
        "epochs": 1.0,
        "warmup_epochs": 0.5,
        "decay_epochs": 1.0,
        "max_steps": 2,
        "device": "cpu",
        "out": str(out),
    }
    loop.run(get_recipe("digits", **values), Ranks())
    return out


def spoilt(values, depth):
    """The values with one of them replaced by garbage, one after the other."""
    for name in list(values):
        for garbage in GARBAGE if depth > 1 else GARBAGE[::3]:
            yield {**values, name: garbage}
        if depth > 1 and isinstance(values[name], dict):
            for inner in spoilt(dict(list(values[name].items())[:4]), depth - 1):
                yield {**values, name: {**values[name], **inner}}


def test_a_checkpoint_with_other_values_is_one_line_or_read(trained, tmp_path):
    path = tmp_path / "step-1.pt"
    good = torch.load(next((trained / "checkpoints").glob("step-*.pt")), weights_only=True)
    del good["checksums"]  # whoever alters a file can leave them out
    refused = 0
    for values in spoilt(good, 2):
        torch.save(values, path)
        try:
            export(path, tmp_path / "out.safetensors")
        except InputError:
            refused += 1
    assert refused > 50


def test_a_record_with_other_values_is_one_line_or_plain_text(trained, tmp_path):
    run, refused = tmp_path / "run", 0
    run.mkdir()
    (run / "metrics.jsonl").write_bytes((trained / "metrics.jsonl").read_bytes())
    for values in spoilt(json.loads((trained / "record.json").read_text()), 2):
        (run / "record.json").write_text(json.dumps(values))
        try:
            assert "<script>alert" not in write_report([run], tmp_path / "report.html").read_text()
        except InputError:
            refused += 1
    assert refused > 10, "others are shown with what is wrong with them"


# Where a report goes


def test_a_report_goes_through_a_link_and_the_link_stays(tmp_path):
    link, target = tmp_path / "link.html", tmp_path / "target.html"
    link.symlink_to(target)
    replace_text(link, "first")
    replace_text(link, "second")
    assert link.is_symlink()
    assert target.read_text() == "second"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link.html", "target.html"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path):
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    replace_text(pipe, "text")
    reader.join(10)
    assert read == ["text"]
    assert pipe.is_fifo()
    replace_text(Path("/dev/null"), "text")
    assert not Path("/dev/null").is_file()


# Bombs


def png(width, height):
    """One bit a pixel, all of them 0: deflate makes 1,000 bytes one."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = zlib.compress(bytes(height * (1 + -(-width // 8))), 9)
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_small_file_that_claims_a_large_image_is_refused():
    bomb = png(8_000, 8_000)
    assert len(bomb) < 10_000
    with pytest.raises(BadSample, match=r"bomb.png: 8000x8000 pixels in [\d,]+ bytes is too large"):
        decode.decode_full(bomb, "bomb.png", decoder="pillow")
    assert decode.decode_full(png(3_000, 3_000), "page.png", decoder="pillow").shape[:2] == (3_000, 3_000)


def test_an_archive_that_unpacks_to_more_than_fits_is_refused(tmp_path, monkeypatch):
    path = tmp_path / "train.tar.gz"
    path.write_bytes(gzip.compress(bytes(8 << 20)))
    monkeypatch.setattr(folders, "free_host_memory_bytes", lambda: 4 << 20)
    with (
        gzip.open(path) as file,
        pytest.raises(InputError, match=r"train.tar.gz unpacks to more than 2 MiB, half of the"),
    ):
        folders.read_into_memory(file, path)
    for opened in (lambda: folders.TarSource([path], "train"), lambda: open_archive(path)):
        with pytest.raises(InputError, match=r"^\S+train.tar.gz unpacks to more .* free memory; unpack it first$"):
            opened()
    monkeypatch.setattr(folders, "free_host_memory_bytes", memory.free_host_memory_bytes)
    assert folders.read_into_memory(io.BytesIO(b"abc" * 1000), path) == b"abc" * 1000


# Input that is refused


def test_more_processes_than_memory_are_refused(capsys):
    check_nproc(2)
    for words in (["doctor", "--collectives", "--nproc", "100000"], ["train", "digits", "--nproc", "100000"]):
        assert main(words) == 2
        assert "--nproc 100000: they need at least" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--dataset", "json:dumps"], "dataset 'json:dumps' raised TypeError"),
        (["--model", "json:dumps"], "model 'json:dumps'"),
        (["--init-from", "nowhere.pt"], "no such file"),
    ],
)
def test_refused_input_is_one_line_and_leaves_nothing(tmp_path, monkeypatch, capsys, words, line):
    monkeypatch.chdir(tmp_path)
    for out in ([], ["--out", "here"]):
        assert main(["train", "digits", "--nproc", "1", "--device", "cpu", *words, *out]) == 2
        told = capsys.readouterr().err
        assert line in told
        assert "Traceback" not in told
    assert [path for path in tmp_path.rglob("*") if path.name != "runs"] == []
