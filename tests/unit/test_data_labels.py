"""Labels are as safe as pixels: a changed label, class or file is found when a packed set is opened, checked or packed
again."""

import errno
import json
import os
import shutil
import tarfile
import zlib
from pathlib import Path

import numpy as np
import pytest
from layout_files import Files, folder_set
from PIL import Image
from test_data_pack import as_first_schema, contents, opened, rewrite_index, rewrite_manifest

from hyperbatch.cli import main
from hyperbatch.cli.data import _ProgressLines
from hyperbatch.config import DataConfig
from hyperbatch.data import shard_writer
from hyperbatch.data.identity import sample_list
from hyperbatch.data.pack import info, pack
from hyperbatch.data.shards import index_path
from hyperbatch.data.source import BadSample, open_data, open_eval
from hyperbatch.data.verify import verify
from hyperbatch.errors import InputError


def add_class(src, name, *, splits=("train", "val"), count=4, seed=0):
    """Bitmaps, which have the same size whatever they show."""
    rng = np.random.default_rng([seed, *name.encode()])
    for split in splits:
        (src / split / name).mkdir(parents=True)
        for i in range(count):
            pixels = Image.fromarray(rng.integers(0, 256, (6, 5, 3), dtype=np.uint8))
            pixels.save(src / split / name / f"{i}.bmp")
            os.utime(src / split / name / f"{i}.bmp", ns=(0, 0))  # as unpacked from an archive without times


@pytest.fixture
def src(tmp_path):
    for name in ("ant", "cow"):
        add_class(tmp_path / "src", name)
    return tmp_path / "src"


@pytest.fixture
def packed(src, tmp_path):
    pack(src, tmp_path / "dst")
    return tmp_path / "dst"


def change_label(index):
    index["label"][3] = 1 - index["label"][3]
    return index


def test_a_changed_label_in_the_index_is_found(packed):
    rewrite_index(packed, change_label)
    with pytest.raises(InputError, match=r"train-000000\.index\.npy does not match the manifest's checksum"):
        opened(packed)
    report = verify(packed)
    assert not report.ok
    assert "index.npy does not match" in report.problems[0]


@pytest.mark.parametrize("old", [False, True])
def test_a_changed_label_in_the_shard_is_found(packed, old):
    """Other readers take the label from there."""
    shard = packed / "train-000000.tar"
    index = np.load(index_path(shard))
    place = int(index["offset"][3]) + -(-int(index["length"][3]) // 512) * 512 + 512
    data = bytearray(shard.read_bytes())
    assert data[place : place + 1] == str(index["label"][3]).encode()
    data[place] ^= 1
    shard.write_bytes(data)
    if old:
        as_first_schema(packed)
    report = verify(packed)
    assert report.problem_count == 1
    assert f".cls: says '{1 - index['label'][3]}', the index says label {index['label'][3]}" in report.problems[0]


def test_a_shard_without_a_label_is_found(packed):
    shard = packed / "val-000000.tar"
    data = shard.read_bytes()
    shard.write_bytes(data.replace(b".cls", b".clt", 1))
    assert not verify(packed).ok


def test_a_label_that_does_not_stand_beside_its_image_is_found(packed):
    shard = packed / "train-000000.tar"
    with tarfile.open(shard) as tar:
        labels = [member for member in tar if member.name.endswith(".cls")]
        first, second = [member for member in labels if tar.extractfile(member).read() == b"0"][:2]
    data = bytearray(shard.read_bytes())
    headers = [slice(member.offset, member.offset_data) for member in (first, second)]
    data[headers[0]], data[headers[1]] = data[headers[1]], data[headers[0]]
    shard.write_bytes(data)
    assert any("does not follow its image" in line for line in verify(packed).problems)


@pytest.mark.parametrize("change", ["classes", "samples", "shards", "crc32"])
def test_a_changed_manifest_is_refused(packed, change):
    path = packed / "manifest.json"
    manifest = json.loads(path.read_text())
    if change == "classes":
        manifest["classes"].reverse()
    elif change == "crc32":
        manifest["crc32"] += 1
    elif change == "samples":
        manifest["splits"]["train"]["samples"] -= 1
    else:
        manifest["splits"]["train"]["shards"] = manifest["splits"]["val"]["shards"]
    path.write_text(json.dumps(manifest))
    for use in (opened, verify, info):
        with pytest.raises(InputError, match=r"manifest\.json.*do not match its checksum"):
            use(packed)


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 3},
        {"schema": 0},
        {"schema": True},
        {"schema": None},
        {"schema": 1},
        {"classes": ["ant", "ant"]},
        {"classes": []},
        {"classes": [1, 2]},
        {"classes": ["ant", "\ud800"]},
        {"splits": {}},
        {"splits": {"test": {}}},
        {"splits": []},
    ],
)
def test_a_manifest_with_the_right_checksum_is_still_not_trusted(packed, change):
    rewrite_manifest(packed, lambda manifest: manifest.update(change))
    with pytest.raises(InputError, match=r"manifest\.json is not a manifest"):
        opened(packed)


@pytest.mark.parametrize("value", [[], [{}], 5, None, [{"name": "train-000000.tar", "samples": float("inf")}]])
@pytest.mark.parametrize("old", [False, True])
def test_shards_that_are_no_list_of_shards(packed, value, old):
    if old:
        as_first_schema(packed)
    rewrite_manifest(packed, lambda manifest: manifest["splits"]["train"].update(shards=value))
    with pytest.raises(InputError, match=r"manifest\.json is not a manifest"):
        opened(packed)


def test_a_set_of_the_first_schema_is_read_with_a_note(packed, capsys):
    before = [contents(source) for source in opened(packed)]
    assert verify(packed).notes == []
    as_first_schema(packed)
    assert [contents(source) for source in opened(packed)] == before
    report = verify(packed)
    assert report.ok
    assert "before manifest and index had checksums" in report.notes[0]
    assert main(["data", "verify", str(packed)]) == 0
    assert "before manifest and index had checksums" in capsys.readouterr().out


def test_files_that_are_pipes_or_folders_are_named(packed):
    index = index_path(packed / "train-000000.tar")
    index.unlink()
    os.mkfifo(index)
    with pytest.raises(InputError, match=r"train-000000\.index\.npy cannot be read: not a regular file"):
        opened(packed)
    (packed / "manifest.json").unlink()
    os.mkfifo(packed / "manifest.json")
    with pytest.raises(InputError, match=r"manifest\.json.*not a regular file"):
        opened(packed)
    (packed / "manifest.json").unlink()
    (packed / "manifest.json").mkdir()
    with pytest.raises(InputError, match=r"manifest\.json cannot be read: Is a directory"):
        opened(packed)


@pytest.mark.parametrize("name", ["manifest.json", "train-000000.index.npy"])
def test_files_that_may_not_be_read_need_other_permissions(packed, monkeypatch, name):
    """Not to be packed again, as others that cannot be read."""
    allowed = os.open

    def denied(path, *flags):
        if str(path).endswith(name):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return allowed(path, *flags)

    monkeypatch.setattr(os, "open", denied)
    with pytest.raises(InputError, match=f"{name} cannot be read: Permission denied; check its permissions"):
        opened(packed)


def test_a_bad_sample_is_named_by_where_it_was_packed_from(src, tmp_path):
    odd = os.fsdecode(b"\xff odd.name.bmp")
    os.rename(src / "train" / "ant" / "0.bmp", src / "train" / "ant" / odd)
    pack(src, tmp_path / "dst", shard_bytes=3000)
    train, _ = opened(tmp_path / "dst")
    names = {train.describe(i).partition("packed from ")[2].rstrip(")") for i in range(len(train))}
    assert names == {f"train/{path.parent.name}/{path.name}" for path in (src / "train").rglob("*.bmp")}
    shard = tmp_path / "dst" / "train-000001.tar"
    row = len(np.load(index_path(tmp_path / "dst" / "train-000000.tar")))
    data = bytearray(shard.read_bytes())
    data[int(train.index["offset"][row]) + 60] ^= 1
    shard.write_bytes(data)
    with pytest.raises(BadSample, match=r"train-000001\.tar\[0\] \(packed from train/(ant|cow)/.*\.bmp\): the bytes"):
        train.read(row)
    for path in (tmp_path / "dst").glob("*.names"):
        path.write_bytes(b"damaged")
    again, _ = opened(tmp_path / "dst")  # names are for messages: their loss costs nothing else
    assert again.describe(row).endswith(("train-000001.tar[0]", ".bmp)"))
    assert not verify(tmp_path / "dst").ok


# --- packing again


def test_images_that_moved_between_classes_are_not_packed_under_their_old_labels(src, packed):
    """Names, sizes and times are the same as before: only who has which bytes is not."""
    one, other = src / "train" / "ant" / "0.bmp", src / "train" / "cow" / "0.bmp"
    one.rename(src / "kept")
    other.rename(one)
    (src / "kept").rename(other)
    with pytest.raises(InputError, match=r"other data: in train 2 classes changed \(e\.g\. ant\)"):
        pack(src, packed)


def test_renamed_images_and_classes_are_other_data(src, packed):
    (src / "train" / "ant" / "0.bmp").rename(src / "train" / "ant" / "9.bmp")
    with pytest.raises(InputError, match="1 classes changed"):
        pack(src, packed)
    (src / "train" / "ant" / "9.bmp").rename(src / "train" / "ant" / "0.bmp")
    for split in ("train", "val"):
        (src / split / "cow").rename(src / split / "bee")
    with pytest.raises(InputError, match=r"changed.*new \(e\.g\. bee\).*gone \(e\.g\. cow\)|new.*gone"):
        pack(src, packed)


def test_a_finished_shard_with_other_labels_is_written_again(src, packed):
    """An interrupted pack trusts a finished shard only as far as it can be compared."""
    before = {path.name: path.read_bytes() for path in packed.iterdir()}
    (packed / "manifest.json").unlink()
    rewrite_index(packed, change_label)
    assert pack(src, packed).resumed_shards == 1
    assert {path.name: path.read_bytes() for path in packed.iterdir()} == before


def test_one_split_now_and_the_other_later(src, packed, tmp_path):
    dst = tmp_path / "parts"
    assert pack(src, dst, split="val").samples == 8
    assert len(open_eval(DataConfig(data=str(dst)))) == 8
    assert verify(dst).samples == info(dst).splits["val"].samples == 8
    with pytest.raises(InputError, match="has no train split; add it with"):
        opened(dst)
    assert pack(src, dst, split="train").samples == 16
    assert [contents(source) for source in opened(dst)] == [contents(source) for source in opened(packed)]
    assert {path.name for path in dst.iterdir()} == {path.name for path in packed.iterdir()}
    with pytest.raises(InputError, match="--split test"):
        pack(src, tmp_path / "other", split="test")


def test_a_split_without_the_other_is_packed(src, tmp_path):
    (src / "val").rename(tmp_path / "elsewhere")
    assert pack(src, tmp_path / "dst", split="train").samples == 8


def test_new_classes_are_appended_and_the_old_keep_their_numbers(src, packed):
    old = [contents(source) for source in opened(packed)]
    shards = {path.name: path.read_bytes() for path in packed.glob("*.tar")}
    add_class(src, "bee")
    with pytest.raises(InputError, match="holds a pack of other data: in train 1 classes new"):
        pack(src, packed)
    report = pack(src, packed, append=True)
    assert (report.samples, report.resumed_shards, report.shards) == (24, 2, 4)
    new = opened(packed)
    assert new[0].classes == ("ant", "cow", "bee")
    for before, after in zip(old, new, strict=True):
        assert [pair for pair in contents(after) if pair[1] < 2] == before
        assert np.bincount(after.labels).tolist() == [4, 4, 4]
    assert {name: (packed / name).read_bytes() for name in shards} == shards
    assert verify(packed).ok
    assert pack(src, packed).resumed_shards == 4  # nothing left to do
    # A source of nothing but new classes will do, too.
    for split in ("train", "val"):
        for name in ("ant", "bee"):
            os.rename(src / split / name, src.parent / f"{split}-{name}")
    add_class(src, "dog")
    assert pack(src, packed, append=True).samples == 32
    assert opened(packed)[1].classes == ("ant", "cow", "bee", "dog")


def test_splits_may_get_new_classes_one_after_the_other(src, packed):
    add_class(src, "bee")
    add_class(src, "dog")
    pack(src, packed, append=True, split="train")
    for split in ("train", "val"):
        (src / split / "bee").rename(src / f"{split}-later")
    pack(src, packed, append=True, split="val")
    assert np.bincount(opened(packed)[1].labels).tolist() == [4, 4, 0, 4]
    for split in ("train", "val"):
        (src / f"{split}-later").rename(src / split / "bee")
    pack(src, packed, append=True, split="val")
    assert [np.bincount(source.labels).tolist() for source in opened(packed)] == [[4, 4, 4, 4]] * 2
    assert verify(packed).ok


def test_an_interrupted_pack_is_not_taken_for_shards_of_others(packed):
    (packed / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"holds no complete packed set \(manifest.json is missing\)"):
        opened(packed)


@pytest.mark.parametrize("content", ['{"format": "webpack", "splits": {}}', "[]", "not json", ""])
def test_a_pack_json_of_another_program_is_no_pack(src, tmp_path, content):
    before = [source.labels.tolist() for source in opened(src)]
    (src / "pack.json").write_text(content)
    assert [source.labels.tolist() for source in opened(src)] == before
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "pack.json").write_text(content)
    with pytest.raises(InputError, match="dst is not empty and holds no pack"):
        pack(src, tmp_path / "dst")


def test_a_folder_that_cannot_be_made_is_told_without_a_number(src, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match=r"cannot pack into .*/file/dst: Not a directory; give an empty folder"):
        pack(src, tmp_path / "file" / "dst")


def test_an_interrupted_append_is_finished_by_the_next_and_loses_nothing_before(src, packed, monkeypatch):
    before = [contents(source) for source in opened(packed)]
    add_class(src, "bee")

    def full_disk(out, name, data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(shard_writer, "_write_member", full_disk)
    with pytest.raises(InputError, match="No space left"):
        pack(src, packed, append=True)
    monkeypatch.undo()
    assert [contents(source) for source in opened(packed)] == before
    assert pack(src, packed, append=True).samples == 24
    assert verify(packed).ok


def test_two_packs_into_one_folder_at_once(src, tmp_path):
    """Both would write to the same files: the second emptied what the first had finished, or mixed other data in."""
    shutil.copytree(src, tmp_path / "other")
    refused = []

    def meanwhile(done, total):
        with pytest.raises(InputError, match="another process packs into") as caught:
            pack(tmp_path / "other", tmp_path / "twice")
        refused.append(caught)

    pack(src, tmp_path / "twice", progress=meanwhile)
    assert refused
    assert verify(tmp_path / "twice").ok
    pack(src, tmp_path / "twice")


def test_what_changed_is_not_appended_to(src, packed, tmp_path):
    add_class(src, "bee")
    (src / "train" / "ant" / "0.bmp").write_bytes(b"new")
    with pytest.raises(InputError, match=r"1 classes changed \(e\.g\. ant\)"):
        pack(src, packed, append=True)
    with pytest.raises(InputError, match="holds no pack to add to"):
        pack(src, tmp_path / "empty", append=True)


def test_a_dangling_link_is_left_out_and_listed(src, tmp_path):
    (src / "train" / "ant" / "gone.jpg").symlink_to(src / "nowhere.jpg")
    report = pack(src, tmp_path / "dst")
    assert (report.samples, report.skipped) == (16, 1)
    assert Path(report.skipped_list).read_text() == "train/ant/gone.jpg: there is no such file\n"
    assert verify(tmp_path / "dst").ok
    assert pack(src, tmp_path / "dst").resumed_shards == 2
    assert info(src).splits["train"].unreadable == 1


def test_bad_images_are_left_out_when_asked_and_listed(src, tmp_path):
    whole = (src / "train" / "ant" / "0.bmp").read_bytes()
    (src / "train" / "ant" / "cut.bmp").write_bytes(whole[:-20])
    (src / "val" / "cow" / "none.jpg").write_bytes(b"no image")
    kept = pack(src, tmp_path / "kept")
    assert (kept.samples, kept.unreadable, kept.skipped, kept.skipped_list) == (18, 1, 0, None)
    assert verify(tmp_path / "kept").problem_count == 1
    report = verify(tmp_path / "kept", decode=True)
    assert report.problem_count == 2
    assert any("cut.bmp" in problem or "cut: " in problem or "_cut." in problem for problem in report.problems)
    for _ in range(2):  # the second finds everything finished
        report = pack(src, tmp_path / "dst", skip_bad=True)
        assert (report.samples, report.unreadable, report.skipped) == (16, 0, 2)
        lines = Path(report.skipped_list).read_text().splitlines()
        assert sorted(line.partition(":")[0] for line in lines) == ["train/ant/cut.bmp", "val/cow/none.jpg"]
    assert report.resumed_shards == 2
    assert verify(tmp_path / "dst", decode=True).ok
    assert np.bincount(opened(tmp_path / "dst")[0].labels).tolist() == [4, 4]


def test_the_commands(src, tmp_path, capsys):
    (src / "train" / "ant" / "none.jpg").write_bytes(b"no image")
    dst = str(tmp_path / "dst")
    assert main(["data", "pack", str(src), dst, "--shard-mb", "1", "--skip-bad", "--split", "train", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["skipped"] == 1
    assert main(["data", "pack", str(src), dst, "--shard-mb", "1", "--skip-bad", "--json"]) == 0
    add_class(src, "bee")
    assert main(["data", "pack", str(src), dst, "--shard-mb", "1", "--skip-bad", "--append", "--json"]) == 0
    capsys.readouterr()
    assert main(["data", "verify", dst, "--decode", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 24
    assert main(["data", "pack", str(src), dst, "--shard-mb", "2"]) == 2
    assert "another shard size" in capsys.readouterr().err


def test_the_checksum_of_the_index_is_that_of_its_file(packed):
    manifest = json.loads((packed / "manifest.json").read_text())
    shard = manifest["splits"]["train"]["shards"][0]
    assert shard["index_crc32"] == zlib.crc32((packed / "train-000000.index.npy").read_bytes())


def test_a_log_gets_a_line_every_ten_seconds(monkeypatch, capsys):
    now_s = 100.0
    monkeypatch.setattr("hyperbatch.cli.data.time.monotonic", lambda: now_s)
    show = _ProgressLines("pack")
    for done, at_s in ((400, 200.0), (500, 205.0), (1400, 210.0), (1500, 211.0), (2400, 220.0)):
        now_s = at_s
        show(done, 10_400)
    assert capsys.readouterr().err.splitlines() == [
        "pack: 1,400 of 10,400 images, 100 images/s, 90 s left",
        "pack: 2,400 of 10,400 images, 100 images/s, 80 s left",
    ]


@pytest.mark.parametrize("name", ["set.zip", "set.tar", "set.tar.gz"])
def test_an_archive_that_was_written_anew_is_not_the_set_that_was_packed(tmp_path, name):
    """Images of the same names, sizes and places."""
    path, swapped = tmp_path / name, Files()
    files, _, _ = folder_set()
    for member in files:
        files[member] = files[member].ljust(1000, b"\0")
    swapped.update(files | {"train/a/0.jpg": files["train/b/0.jpg"]})
    write = files.zip if name.endswith("zip") else files.tar
    write_swapped = swapped.zip if name.endswith("zip") else swapped.tar
    write(path)
    assert pack(path, tmp_path / "dst").samples == 8
    assert pack(path, tmp_path / "dst").resumed_shards == 2
    write_swapped(path)
    with pytest.raises(InputError, match="changed"):
        pack(path, tmp_path / "dst")


def test_links_below_a_class_that_dangle_or_lead_to_themselves(src, tmp_path):
    (src / "train" / "ant" / "inner").mkdir()
    (src / "train" / "ant" / "inner" / "gone.jpg").symlink_to(src / "nowhere.jpg")
    (src / "train" / "ant" / "itself").symlink_to(src / "train" / "ant" / "itself")
    report = pack(src, tmp_path / "dst")
    assert (report.samples, report.skipped) == (16, 1)
    assert Path(report.skipped_list).read_text() == "train/ant/inner/gone.jpg: there is no such file\n"


def test_one_split_of_an_archive_is_packed(tmp_path):
    files, train, _ = folder_set()
    for name in [name for name in files if name.startswith("val")]:
        del files[name]
    path = files.zip(tmp_path / "set.zip")
    assert pack(path, tmp_path / "dst", split="train").samples == len(train)
    with pytest.raises(InputError, match="has no val/ folder"):
        pack(path, tmp_path / "other")


def test_samples_of_a_folder_or_archive_are_known_by_their_names_wherever_it_lies(tmp_path):
    files, _, _ = folder_set()
    inner = folder_set(prefix="top/")[0]
    paths = [files.folder(tmp_path / "folder"), files.tar(tmp_path / "one.tar"), inner.tar(tmp_path / "two.tar.gz")]
    lists = [sample_list(open_data(DataConfig(data=str(path)))[0]) for path in [*paths, inner.zip(tmp_path / "3.zip")]]
    assert {(one.order, one.members) for one in lists} == {(lists[0].order, lists[0].members)}
    renamed = Files({path.replace("train/a/0", "train/a/5"): data for path, data in files.items()})
    train, _ = open_data(DataConfig(data=str(renamed.tar(tmp_path / "three.tar"))))
    assert sample_list(train).members != lists[0].members


@pytest.mark.parametrize("form", ["folder", "tar", "zip", "tars", "table"])
def test_files_of_one_name_in_other_folders_of_a_class_are_other_samples(tmp_path, form):
    """The frames of videos are called the same in each; the videos of a class could change places unnoticed."""

    def listed(name, first, second):
        paths = [
            f"{split}/{c}/{video}/{i}.jpg" for split in ("train", "val") for c in "ab" for video in "vw" for i in "01"
        ]
        files = {path.replace("/v/", f"/{first}/").replace("/w/", f"/{second}/"): b"" for path in paths}
        files = Files({path: path.encode() for path in files})
        if form == "tars":
            for split in ("train", "val"):
                part = Files({path: data for path, data in files.items() if path.startswith(split)})
                (tmp_path / name).mkdir(exist_ok=True)
                part.tar(tmp_path / name / f"{split}.tar")
        elif form in ("folder", "table"):
            files.folder(tmp_path / name / ("images" if form == "table" else ""))
        else:
            (tmp_path / name).mkdir()
            getattr(files, form)(tmp_path / name / f"set.{form}")
        for split in ("train", "val") if form == "table" else ():
            rows = [f"images/{path},{path.split('/')[1]}\n" for path in files if path.startswith(split)]
            (tmp_path / name / f"{split}.csv").write_text("path,label\n" + "".join(rows))
        return sample_list(open_data(DataConfig(data=str(tmp_path / name)))[0])

    one = listed("one", "v", "w")
    assert one == listed("moved", "v", "w")
    assert one.order != listed("other", "w", "x").order
    assert one.members != listed("more", "v", "x").members


def test_rows_of_parquet_are_told_apart_by_their_images(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    lists = []
    for number, images in enumerate(([b"1", b"2", b"3"], [b"2", b"1", b"3"])):
        (tmp_path / str(number)).mkdir()
        for split in ("train", "val"):
            table = pyarrow.table({"image": images, "label": ["a", "a", "b"]})
            parquet.write_table(table, tmp_path / str(number) / f"{split}.parquet")
        lists.append(sample_list(open_data(DataConfig(data=str(tmp_path / str(number))))[0]))
    assert lists[0].order != lists[1].order
