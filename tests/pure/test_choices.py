"""Choices that were measured, kept on disk: for whom, where, and what a damaged or foreign file does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hyperbatch.choices import Choices, cache_folder

H200 = {"device": "NVIDIA H200", "driver": "580.1", "torch": "2.11"}


def test_what_one_process_keeps_the_next_one_finds(tmp_path):
    first = Choices(tmp_path / "new" / "folder", H200)
    assert first.find("convolve") is None
    first.keep("convolve", 1)
    first.keep("decoder", "nvjpeg")
    assert (first.find("convolve"), first.find("decoder")) == (1, "nvjpeg")
    later = Choices(tmp_path / "new" / "folder", H200)
    assert (later.find("convolve"), later.find("decoder")) == (1, "nvjpeg")
    assert [path.suffix for path in (tmp_path / "new" / "folder").iterdir()] == [".json"]


@pytest.mark.parametrize("other", ["device", "driver", "torch"])
def test_another_gpu_driver_or_version_measures_for_itself(tmp_path, other):
    Choices(tmp_path, H200).keep("convolve", 1)
    assert Choices(tmp_path, {**H200, other: "another"}).find("convolve") is None
    assert Choices(tmp_path, H200).find("convolve") == 1


def test_two_processes_keep_each_others_choices(tmp_path):
    one, two = Choices(tmp_path, H200), Choices(tmp_path, H200)
    one.keep("convolve", 1)
    two.keep("input", 0)
    later = Choices(tmp_path, H200)
    assert (later.find("convolve"), later.find("input")) == (1, 0)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[]",
        b"3",
        b'{"choices": {"convolve": 1}}',
        json.dumps({"machine": {**H200, "torch": "2.10"}, "choices": {"convolve": 1}}).encode(),
        json.dumps({"machine": H200, "choices": [1]}).encode(),
    ],
    ids=repr,
)
def test_a_damaged_or_foreign_file_counts_as_none_and_is_replaced(tmp_path, content):
    Choices(tmp_path, H200).keep("convolve", 1)
    (path,) = tmp_path.iterdir()
    path.write_bytes(content)
    found = Choices(tmp_path, H200)
    assert found.find("convolve") is None
    found.keep("convolve", 0)
    assert Choices(tmp_path, H200).find("convolve") == 0


def test_a_folder_that_cannot_be_made_does_no_harm(tmp_path):
    (tmp_path / "file").write_text("")
    found = Choices(tmp_path / "file" / "choices", H200)
    found.keep("convolve", 1)
    assert found.find("convolve") == 1
    assert Choices(tmp_path / "file" / "choices", H200).find("convolve") is None


def test_where_the_folder_is(monkeypatch):
    monkeypatch.setenv("HOME", "/home/somebody")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HYPERBATCH_CACHE", raising=False)
    assert cache_folder() == Path("/home/somebody/.cache/hyperbatch")
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/hyperbatch")
    monkeypatch.setenv("HYPERBATCH_CACHE", "/mine")
    assert cache_folder() == Path("/mine")


def test_a_device_has_its_file_in_the_folder(tmp_path):
    """In a process of its own: torch is loaded."""
    code = "import torch; from hyperbatch.choices import choices_of; choices_of(torch.device('cpu')).keep('a', 1); "
    code += "print(choices_of(torch.device('cpu')).find('a'))"
    env = {**os.environ, "HYPERBATCH_CACHE": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    (path,) = (tmp_path / "choices").iterdir()
    assert json.loads(path.read_text())["machine"]["device"] == "cpu"
