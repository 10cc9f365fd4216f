"""`benchmarks.pieces`: both layouts become tars that the trainer reads, every image once, bytes untouched."""

from __future__ import annotations

import io
import shutil
import subprocess

import numpy as np
import pytest
from PIL import Image

from benchmarks.pieces import main
from hyperbatch.config import DataConfig
from hyperbatch.data.source import EncodedSource, open_data

pytestmark = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


def jpeg(value: int) -> bytes:
    file = io.BytesIO()
    Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(file, "JPEG")
    return file.getvalue()


@pytest.fixture(params=["folders", "tiny"])
def clone(request, tmp_path):
    """(bare clone, folder of the data set in it, bytes of each split)."""
    tree, root = tmp_path / "tree", "" if request.param == "folders" else "tiny-imagenet-200"
    contents = {"train": [], "val": []}
    annotations = []
    for k, (split, count) in enumerate((("train", 6), ("val", 4))):
        for i in range(count):
            name, label = f"{split}_{i}.JPEG", f"n{i % 2}"
            inner = {"folders": f"{split}/{label}", "tiny": "val/images" if k else f"train/{label}/images"}
            path = tree / root / inner[request.param] / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(jpeg(20 * i + 100 * k))
            contents[split].append(path.read_bytes())
            annotations += [f"{name}\t{label}\t0\t0\t8\t8"] if k else []
    if request.param == "tiny":
        (tree / root / "val" / "val_annotations.txt").write_text("\n".join(annotations))
        (tree / root / "test" / "images").mkdir(parents=True)
        (tree / root / "test" / "images" / "test_0.JPEG").write_bytes(jpeg(7))
    words = ["git", "-C", str(tree), "-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "all"]):
        subprocess.run([*words, *command], check=True)
    return tree / ".git", root, contents


def test_pieces_hold_every_image_once(clone, tmp_path):
    repo, root, contents = clone
    out = tmp_path / "out"
    main([str(repo), root, str(out), "--piece-mb", "0.005"])
    assert len(list(out.glob("train-*.tar.xz"))) > 1
    for source, split in zip(open_data(DataConfig(data=str(out))), ("train", "val"), strict=True):
        assert isinstance(source, EncodedSource)
        assert source.classes == ("n0", "n1")
        assert sorted(source.read(i) for i in range(len(source))) == sorted(contents[split])
        for i in range(len(source)):
            assert source.labels[i] == contents[split].index(source.read(i)) % 2
    assert (out / "classes.txt").read_text() == "0\tn0\n1\tn1\n"
