"""The tutorial of docs/finetune.md: its commands are read from the page and run, on real photographs."""

from __future__ import annotations

import csv
import os
import re
import tarfile
from pathlib import Path

import pages
import pytest

from hyperbatch.export import load_trained
from hyperbatch.record import RunRecord

PAGE = pages.ROOT / "docs" / "finetune.md"
DATA = Path(os.environ.get("HYPERBATCH_TEST_DATA", ""))
PHOTOS = 3  # classes of ours; the others are imagenette's remaining ones
NAMES = {"n03000684": "chain saw", "n03028079": "church", "n03417042": "truck"}


def unpack(folder: Path) -> None:
    """Some images of three classes under their common names as `photos`, and of the seven others as `others`."""
    for split, most in (("train", 40), ("val", 12)):
        counts: dict[str, int] = {}
        with tarfile.open(DATA / "imagenette224_4k" / f"{split}-0.tar.xz") as tar:
            for member in tar:
                name, file = Path(member.name).parts[1:]
                counts[name] = counts.get(name, 0) + 1
                if counts[name] > most:
                    continue
                home = folder / ("photos" if name in NAMES else "others") / split / NAMES.get(name, name)
                home.mkdir(parents=True, exist_ok=True)
                content = tar.extractfile(member)
                assert content is not None
                (home / file).write_bytes(content.read())
        assert len(counts) == 10


def test_classes_are_split_as_the_page_does(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {f"{name}/{number}.jpg" for name in ("church", "truck") for number in range(10)}
    for name in names:
        path = tmp_path / "all" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    exec("\n".join(pages.blocks(PAGE, "python")), {})
    val, train = (
        {str(p.relative_to(f"photos/{s}")) for p in Path(f"photos/{s}").glob("*/*")} for s in ("val", "train")
    )
    assert (len(val), len(train), val | train) == (4, 16, names)


@pytest.mark.slow
@pytest.mark.skipif("HYPERBATCH_TEST_DATA" not in os.environ, reason="HYPERBATCH_TEST_DATA names no folder")
def test_the_commands_of_the_page(tmp_path):
    unpack(tmp_path)
    printed = "".join(pages.run(PAGE, tmp_path))

    line = re.search(r"`note      (the head .*?)`", PAGE.read_text().replace("\n", " "))
    assert line is not None
    assert f"note      {line[1]}" in printed, "the dry run says what the page says"
    head, photos = (RunRecord.load(tmp_path / "runs" / name) for name in ("head", "photos"))
    assert head.warnings == [line[1]]
    assert photos.warnings == []
    assert tuple(photos.classes) == tuple(sorted(NAMES.values()))
    others, after_head, after_all = (
        load_trained(tmp_path / "runs" / name).weights for name in ("others", "head", "photos")
    )
    assert [name for name in others if not others[name].equal(after_head[name])] == ["fc.weight", "fc.bias"]
    stayed = [name for name in others if others[name].equal(after_all[name])]
    assert {name.partition(".")[0] for name in stayed if "num_batches" not in name} == {"conv1", "bn1"}
    assert photos.result.top1 is not None
    assert photos.result.top1 > 1.3 / PHOTOS
    with (tmp_path / "answers.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == PHOTOS * 12 * PHOTOS
    best = [Path(row["image"]).parts[-2] == row["class"] for row in rows if row["rank"] == "1"]
    assert sum(best) / len(best) == pytest.approx(photos.result.top1)
