"""Each layout that people really have, built small and exactly: opened, described and packed alike."""

import io
import itertools
import json
import os
import re
import stat
import struct
import sys
import tarfile
import zipfile

import pages
import pytest
from layout_files import Files, cache, folder_set, images, is_read, jpeg, message

from hyperbatch.cli import main
from hyperbatch.config import DataConfig
from hyperbatch.data import kept
from hyperbatch.data.layouts import archives, recognise
from hyperbatch.data.pack import pack
from hyperbatch.data.source import BadSample, check_data, open_data, open_eval

pytestmark = pytest.mark.usefixtures("cache")
__all__ = ("cache",)  # a fixture is used by its name
DOCS = pages.ROOT / "docs" / "data.md"


# --- image folders


def test_images_in_nested_folders_are_read_in_torchvisions_order(tmp_path):
    names = ["b.jpg", "a/z.png", "a-b/y.jpg", "a/b/x.jpg", "a.jpg", "z/w.JPEG"]
    files = Files().images(
        *(f"{split}/{c}/{name}" for split in ("train", "val") for c in ("cat", "dog") for name in names)
    )
    files["train/cat/notes.txt"] = files["train/cat/a/.hidden.jpg"] = b"no image"
    files.folder(tmp_path / "set")
    # torchvision.datasets.folder.make_dataset: for root, _, names in sorted(os.walk(FOLDER)): for name in sorted(names)
    expected = {split: [] for split in ("train", "val")}
    for split in expected:
        for name in ("cat", "dog"):
            for root, _, found in sorted(os.walk(tmp_path / "set" / split / name, followlinks=True)):
                for file in sorted(found):
                    if not file.endswith(".txt") and not file.startswith("."):
                        with open(os.path.join(root, file), "rb") as opened:
                            expected[split].append((opened.read(), name))
    assert len(expected["train"]) == 12
    is_read(tmp_path / "set", tmp_path, kind="folder", classes=("cat", "dog"), **expected)


def test_links_that_go_round_in_circles_and_pipes_are_passed_over(tmp_path):
    files, _, _ = folder_set()
    files.folder(tmp_path)
    (tmp_path / "train" / "a" / "again").symlink_to(tmp_path / "train" / "a", target_is_directory=True)
    (tmp_path / "train" / "a" / "folder.jpg").mkdir()
    os.mkfifo(tmp_path / "train" / "a" / "pipe.jpg")
    assert check_data(images(tmp_path)).train_samples == 4


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_names_of_the_validation_set(tmp_path, name):
    files, train, val = folder_set(name)
    is_read(files.folder(tmp_path / "set"), tmp_path, kind="folder", classes=("a", "b"), train=train, val=val)


def test_a_test_set_beside_a_validation_set_is_left_alone(tmp_path):
    files, train, val = folder_set("valid")
    files.images("test/c/0.jpg")
    is_read(files.folder(tmp_path / "set"), tmp_path, kind="folder", classes=("a", "b"), train=train, val=val)


def test_two_validation_sets_are_one_too_many(tmp_path):
    files, _, _ = folder_set()
    files.images("validation/a/0.jpg", "validation/b/0.jpg").folder(tmp_path)
    assert "has val and validation; keep one of them" in message(tmp_path)


def test_the_command_line_takes_files_and_folders(tmp_path, capsys):
    path = folder_set()[0].zip(tmp_path / "set.zip")
    assert main(["data", "info", str(path)]) == 0
    assert capsys.readouterr().out.startswith("folder in a zip, 2 classes: a, b\n\nsplit  images ")
    assert main(["data", "info", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "folder in a zip"
    assert main(["data", "pack", str(path), str(tmp_path / "packed")]) == 0
    assert re.match(r"packed \d+ samples, 0.0 MB, in 2 shards\n", capsys.readouterr().out)
    assert main(["data", "verify", str(tmp_path / "packed")]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    assert main(["data", "verify", str(path)]) == 2
    os.mkfifo(tmp_path / "pipe.zip")
    assert "is neither a folder nor a supported file" in message(tmp_path / "pipe.zip")


def test_a_flat_validation_set_without_labels(tmp_path):
    Files().images("train/a/0.jpg", "val/1.jpg").folder(tmp_path)
    assert "val holds images but no class folders" in message(tmp_path)


def test_a_path_that_no_file_can_have_and_names_with_control_characters(tmp_path, capsys):
    assert main(["data", "info", str(tmp_path / ("x" * 300))]) == 2
    assert "cannot be read: File name too long" in capsys.readouterr().err
    Files().images("train/a\nb/0.jpg", "val/c/0.jpg").folder(tmp_path / "set")
    assert main(["data", "info", str(tmp_path / "set")]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "only in train: a\\nb" in told
    Files().images("train/a\x1b[2Jb/0.jpg", "val/a\x1b[2Jb/0.jpg").folder(tmp_path / "clears")
    assert main(["data", "info", str(tmp_path / "clears")]) == 0
    assert "folder, 1 classes: a\\x1b[2Jb\n" in capsys.readouterr().out


needs_permissions = pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")


@needs_permissions
def test_an_archive_at_the_root_of_a_disk(tmp_path):
    folder_set()[0].zip(tmp_path / "set.zip")
    (tmp_path / "lost+found").mkdir(mode=0)
    assert check_data(images(tmp_path)).train_samples == 4


@needs_permissions
@pytest.mark.parametrize("mode", [0, 0o444])
def test_folders_that_may_not_be_entered(tmp_path, capsys, mode):
    folder_set()[0].folder(tmp_path / "set")
    (tmp_path / "set").chmod(mode)
    try:
        for arguments in (["info", "set"], ["verify", "set"], ["info", "set/train"], ["pack", "set", "packed"]):
            assert main(["data", arguments[0], *(str(tmp_path / name) for name in arguments[1:])]) == 2
            assert "Permission denied" in capsys.readouterr().err
    finally:
        (tmp_path / "set").chmod(0o755)


def test_a_set_one_folder_further_down(tmp_path):
    files, train, val = folder_set(prefix="imagenette2/")
    files["imagenette2/noisy_imagenette.csv"] = b"path,noisy_labels_0\n"
    files["README.txt"] = b"hello"
    is_read(files.folder(tmp_path / "set"), tmp_path, kind="folder", classes=("a", "b"), train=train, val=val)
    folder_set(prefix="imagewoof2/")[0].folder(tmp_path / "set")
    assert "holds several data sets" in message(tmp_path / "set")


def test_a_manifest_of_another_program_is_passed_over(tmp_path):
    files, train, val = folder_set()
    files["manifest.json"] = b'{"name": "pets", "icons": []}'
    root = files.folder(tmp_path / "set")
    is_read(root, tmp_path, kind="folder", classes=("a", "b"), train=train, val=val)
    (tmp_path / "packed" / "pack.json").unlink()
    (tmp_path / "packed" / "manifest.json").write_bytes(files["manifest.json"])
    assert "is not a manifest of packed shards" in message(tmp_path / "packed"), "beside indexes of shards"


@pytest.mark.parametrize("given", ["train", "val", "."])
def test_one_split_of_a_set_is_told(tmp_path, monkeypatch, given):
    root = folder_set()[0].folder(tmp_path / "set")
    monkeypatch.chdir(root / "train")
    told = message(given if given == "." else root / given)
    assert f"{given} is only one split of the data set; use --data {root}" in told


# --- archives of image folders


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize("prefix", ["", "top/inner/"])
def test_a_zip_of_an_image_folder(tmp_path, method, prefix):
    files, train, val = folder_set(prefix=prefix)
    files["__MACOSX/train/a/._0.jpg"] = b"x"
    files.images(f"{prefix}train/b/ünïcode 猫.jpg")
    train = [*train, (files[f"{prefix}train/b/ünïcode 猫.jpg"], "b")]
    path = files.zip(tmp_path / "set.zip", method)
    opened = is_read(path, tmp_path, kind="folder in a zip", classes=("a", "b"), train=train, val=val)
    assert (opened[0].locations([0]) is None) == (method == zipfile.ZIP_DEFLATED)
    (tmp_path / "alone").mkdir()
    path.rename(tmp_path / "alone" / "set.zip")
    assert recognise(tmp_path / "alone").kind == "folder in a zip"


@pytest.mark.parametrize(("system", "name"), [(3, os.fsdecode(b"caf\xe9")), (0, "caf\u0398")])
def test_names_in_a_zip_that_are_not_utf_8(tmp_path, system, name):
    """Of the code page 437 if Windows wrote them, and otherwise as they are in a folder."""
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as file:
        for path in folder_set()[0]:
            member = zipfile.ZipInfo(path.replace("/b/", "/caf_/"))
            member.create_system = system
            file.writestr(member, jpeg(1))
    content = (tmp_path / "set.zip").read_bytes()
    (tmp_path / "set.zip").write_bytes(content.replace(b"caf_", b"caf\xe9"))
    assert open_data(images(tmp_path / "set.zip"))[0].classes == ("a", name)


@pytest.mark.parametrize(
    "name", ["set.zip", "set.tar.gz", "train.zip", "train.tar", "train-0.parquet", "cifar-10-python.tar.gz"]
)
def test_an_archive_that_may_not_be_read_is_not_said_to_be_damaged(tmp_path, monkeypatch, name):
    """Emulated, because a test may run as root, whom no permission stops."""
    path = folder_set()[0].tar(tmp_path / name)
    (tmp_path / name.replace("train", "val")).write_bytes(path.read_bytes())
    allowed = os.access
    monkeypatch.setattr(os, "access", lambda given, mode: given != path and allowed(given, mode))
    assert f"{path} cannot be read: Permission denied; check its permissions" in message(tmp_path)


def test_links_in_a_zip_are_skipped_as_in_a_tar(tmp_path):
    """`zip -y` stores them as files that hold the target's path."""
    files, train, val = folder_set()
    path = files.zip(tmp_path / "set.zip")
    with zipfile.ZipFile(path, "a") as file:
        for name, target in (("train/a/link.jpg", "0.jpg"), ("val/b/link.jpg", "../a/0.jpg"), ("train/c", "a")):
            link = zipfile.ZipInfo(name)
            link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
            file.writestr(link, target)
    is_read(path, tmp_path, kind="folder in a zip", classes=("a", "b"), train=train, val=val)


def test_a_damaged_member_of_a_zip_is_a_bad_sample(tmp_path):
    files, train, _ = folder_set()
    path = files.zip(tmp_path / "set.zip")
    content = bytearray(path.read_bytes())
    content[content.index(train[2][0]) + 30] ^= 1
    path.write_bytes(content)
    source, _ = open_data(images(path))
    with pytest.raises(BadSample, match=r"train/b/0\.jpg: the bytes do not match"):
        source.read(2)
    path.write_bytes(content[:-30])
    assert "set.zip cannot be read as a zip" in message(path)
    renamed = bytes(content)[::-1].replace(b"train/a/1.jpg"[::-1], b"train/b/9.jpg"[::-1], 1)[::-1]  # in the directory
    path.write_bytes(renamed)
    assert "the header of 'train/b/9.jpg' is damaged" in message(path)


@pytest.mark.parametrize(
    "damage", ["another zip before it", "a name that is no image's", "an entry that hides the next"]
)
def test_a_zip_that_does_not_list_all_its_members_is_refused(tmp_path, damage):
    files, _, _ = folder_set()
    path = files.zip(tmp_path / "set.zip")
    content = bytearray(path.read_bytes())
    if damage == "another zip before it":
        content = Files().images("train/a/2.jpg").zip(tmp_path / "other.zip").read_bytes() + content
    elif damage == "a name that is no image's":
        place = content.rindex(b"train/a/1.jpg")
        content[place + 10 : place + 13] = b"xxx"
    else:
        entry = content.index(b"PK\1\2")
        length = content.index(b"PK\1\2", entry + 4) - entry
        content[entry + 32 : entry + 34] = length.to_bytes(2, "little")  # of a comment, which is the next entry
    path.write_bytes(content)
    told = "the header of 'train/a/1.xxx' is damaged" if "name" in damage else "has members that it does not list"
    assert told in message(path)


@pytest.mark.parametrize("field", [20, 24, 42])  # its length as it is stored, its length, its offset
def test_a_zip_with_a_member_of_impossible_size_or_place_is_refused(tmp_path, field):
    path = folder_set()[0].zip(tmp_path / "set.zip")
    content = bytearray(path.read_bytes())
    entry, extra = content.index(b"PK\1\2"), struct.pack("<HHQ", 1, 8, 2**64 - 5)
    content[entry + field : entry + field + 4] = b"\xff" * 4  # it follows as 64 bits
    content[entry + 30 : entry + 32] = len(extra).to_bytes(2, "little")
    place = entry + 46 + len("train/a/0.jpg")
    content[place:place] = extra
    end = content.rindex(b"PK\5\6")
    content[end + 12 : end + 16] = (end - entry).to_bytes(4, "little")
    path.write_bytes(content)
    assert "set.zip cannot be read as a zip: the size or place of 'train/a/0.jpg' is impossible" in message(path)


@pytest.mark.parametrize("name", ["imagenette2.tgz", "imagenette2.tar"])
@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
def test_imagenette_as_published(tmp_path, cache, monkeypatch, name, kept_bytes):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", kept_bytes)
    files, train, val = folder_set(prefix="imagenette2/")
    files["imagenette2/noisy_imagenette.csv"] = b"path,noisy_labels_0\n"
    path = files.tar(tmp_path / name)
    for _ in range(2):  # unpacked or indexed, then found
        opened = open_data(images(path))
        assert (opened[0].locations([0]) is None) == (name.endswith("tgz") and kept_bytes > 0)
    is_read(path, tmp_path, kind="folder in a tar", classes=("a", "b"), train=train, val=val)
    assert len(list(cache.glob("unpacked-*.tar"))) == (name.endswith("tgz") and kept_bytes == 0)
    assert (tmp_path / f"{name}.index.npz").exists() == (kept_bytes == 0)


@pytest.mark.parametrize("form", ["tar", "zip"])
def test_what_was_kept_of_an_archive_is_made_anew_when_it_changes_or_is_damaged(tmp_path, monkeypatch, form):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 0)
    files, train, _ = folder_set()
    path = getattr(files, form)(tmp_path / f"set.{form}")
    read = lambda: [open_data(images(path))[0].read(i) for i in range(4)]  # noqa: E731
    assert read() == [data for data, _ in train]
    index = tmp_path / f"set.{form}.index.npz"
    content = bytearray(index.read_bytes())
    content[len(content) // 2] ^= 255
    index.write_bytes(content)
    assert read() == [data for data, _ in train]
    index.write_bytes(b"")
    assert read() == [data for data, _ in train]
    whole = index.read_bytes()
    entries = [match.start() for match in re.finditer(b"PK\1\2", whole)]
    for entry, place in itertools.product(entries, (8, 32)):  # an array is called encrypted, or hides the next
        content = bytearray(whole)
        content[place + entry] ^= 1 if place == 8 else (entries[1] - entries[0])
        index.write_bytes(content)
        assert read() == [data for data, _ in train]
    other = getattr(Files(files, **{"train/a/0.jpg": jpeg(99)}), form)(path)
    os.utime(other, ns=(1, 1))
    assert read()[0] == jpeg(99)


@pytest.mark.parametrize("place", ["beside it", "in the cache folder", "nowhere"])
@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_the_headers_of_a_large_zip_are_read_once(tmp_path, cache, monkeypatch, method, place):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 0)
    files, train, val = folder_set(prefix="top/")
    path = files.images("top/train/b/ünïcode 猫.jpg").zip(tmp_path / "set.zip", method)
    train = [*train, (files["top/train/b/ünïcode 猫.jpg"], "b")]
    if place != "beside it":
        (tmp_path / "set.zip.index.npz").mkdir()  # nothing can be written there
    if place == "nowhere":
        cache.write_bytes(b"")
    walked = []
    walk = archives._behind_headers
    monkeypatch.setattr(archives, "_behind_headers", lambda *args: walked.append(args) or walk(*args))
    for _ in range(2):
        opened = open_data(images(path))
        for source, expected in zip(opened, (train, val), strict=True):
            assert [(source.read(i), "ab"[source.labels[i]]) for i in range(len(source))] == expected
            assert (source.locations([0]) is None) == (method == zipfile.ZIP_DEFLATED)
    assert len(walked) == (2 if place == "nowhere" else 1)


def test_a_zip_in_the_place_of_another_that_was_kept_gives_no_wrong_images(tmp_path, monkeypatch):
    """Of the same size and time: its bytes do not match the checksums that were kept."""
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 0)
    files, train, _ = folder_set()
    path = files.zip(tmp_path / "set.zip")
    before = path.stat()
    assert open_data(images(path))[0].read(0) == train[0][0]
    swapped = Files(files, **{"train/a/0.jpg": files["train/b/0.jpg"], "train/b/0.jpg": files["train/a/0.jpg"]})
    swapped.zip(path)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size
    source, _ = open_data(images(path))
    assert source.read(1) == train[1][0]
    for index in (0, 2):
        with pytest.raises(BadSample, match="do not match"):
            source.read(index)


def test_of_a_zip_that_is_refused_nothing_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 0)
    path = folder_set()[0].zip(tmp_path / "set.zip")
    path.write_bytes(path.read_bytes()[::-1].replace(b"train/a/1.jpg"[::-1], b"train/b/9.jpg"[::-1], 1)[::-1])
    for _ in range(2):
        assert "the header of 'train/b/9.jpg' is damaged" in message(path)


@pytest.mark.parametrize("damage", ["zeroed header", "two in one", "cut off"])
def test_a_tar_whose_rest_would_be_lost_is_refused(tmp_path, damage):
    files, _, _ = folder_set()
    path = files.tar(tmp_path / "set.tar")
    content = bytearray(path.read_bytes())
    if damage == "zeroed header":
        with tarfile.open(path) as tar:
            offset = tar.getmembers()[2].offset
        content[offset : offset + 512] = bytes(512)
    path.write_bytes(content * 2 if damage == "two in one" else content[:3000] if damage == "cut off" else content)
    assert "set.tar cannot be read as a tar" in message(path)


def test_archives_without_a_set_and_several_archives(tmp_path):
    Files().images("a/0.jpg").zip(tmp_path / "one.zip")
    assert "has no train/ and val/ folders inside" in message(tmp_path / "one.zip")
    folder_set()[0].zip(tmp_path / "two.zip")
    assert "holds several archives: one.zip, two.zip" in message(tmp_path)


# --- zips of splits


@pytest.mark.parametrize("prefix", ["", "val/", "top/"])
def test_a_zip_for_each_split(tmp_path, prefix):
    files, train, val = folder_set()
    (tmp_path / "set").mkdir()
    for split in ("train", "val"):
        inner = {path.removeprefix(f"{split}/"): data for path, data in files.items() if path.startswith(split)}
        Files({prefix.replace("val", split) + path: data for path, data in inner.items()}).zip(
            tmp_path / "set" / f"pets_{split}.zip"
        )
    is_read(tmp_path / "set", tmp_path, kind="zips", classes=("a", "b"), train=train, val=val)
    (tmp_path / "set" / "pets_val.zip").unlink()
    assert "no zip of the val set" in message(tmp_path / "set")


# --- tables


@pytest.mark.parametrize("form", ["csv", "bare csv", "tsv", "jsonl", "one csv", "one jsonl", "metadata", "absolute"])
def test_tables_of_paths_and_labels(tmp_path, form):
    files = Files().images(*(f"images/{i}.jpg" for i in range(8)))
    root = files.folder(tmp_path / "set")
    labels = ["dog", "cat", "cat", "emu", "dog", "dog", "emu", "cat"]
    rows = [(path, label, "train" if i < 5 else "validation") for i, (path, label) in enumerate(zip(files, labels))]
    if form == "metadata":
        for number, (path, label, split) in enumerate(rows):
            Files({f"{split}/pictures/{number}.jpg": files[path]}).folder(root)
            with open(root / split / "metadata.csv", "a") as file:
                file.write("file_name,label\n" if number in (0, 5) else "")
                file.write(f"pictures/{number}.jpg,{label}\n")
    elif form == "one csv":
        (root / "labels.csv").write_text("Path,width,Label,Split\n" + "".join(f"{p},12,{c},{s}\n" for p, c, s in rows))
    elif form == "one jsonl":
        lines = [json.dumps({"image_path": p, "class": c, "split": s, "x": [1]}) for p, c, s in rows]
        (root / "labels.jsonl").write_text("\n".join(lines) + "\n\n")
    else:
        suffix, between = form.split()[-1].replace("absolute", "csv"), "\t" if form == "tsv" else ","
        for split in ("train", "validation"):
            chosen = [(str(root / p) if form == "absolute" else p, c) for p, c, s in rows if s == split]
            if suffix == "jsonl":
                lines = [json.dumps({"file_name": p, "label": c}) for p, c in chosen]
            else:
                lines = [] if form == "bare csv" else [f"filename{between}category"]
                lines += [f"{p}{between}{c}" for p, c in chosen]
            (root / f"{split}.{suffix}").write_text("\n".join(lines))
    expected = [(files[path], label) for path, label, _ in rows]
    known = {"kind": "table", "classes": ("cat", "dog", "emu"), "train": expected[:5], "val": expected[5:]}
    is_read(root, tmp_path, **known)
    if form != "metadata":
        path = next(path for path in root.iterdir() if path.is_file())
        assert [len(part) for part in open_data(images(path))] == [5, 3]


def test_labels_that_are_numbers_are_in_the_order_of_numbers(tmp_path):
    Files().images(*(f"{i}.jpg" for i in range(12))).folder(tmp_path)
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text("path,label\n" + "".join(f"{i}.jpg,{11 - i}\n" for i in range(12)))
    train, _ = open_data(images(tmp_path))
    assert train.labels.tolist() == list(range(11, -1, -1))


@pytest.mark.parametrize(
    ("table", "told"),
    [
        ("path,label\n0.jpg\n", "train.csv line 2 has 1 fields, not 2"),
        ("path,label\n0.jpg,\n", "line 2 has no path or no label"),
        ("path,label\n1.jpg,a\n", "1.jpg is not a file"),
        ("path,label,class\n0.jpg,a,a\n", "more than one label column"),
        ("path,label,Label\n0.jpg,a,b\n", "more than one label column"),
        ("path,label\n\n,\n0.jpg,a\n\n0.jpg\n", "train.csv line 6 has 1 fields, not 2"),
        ('path,label,note\n0.jpg,a,"x\ny"\n0.jpg\n', "train.csv line 4 has 1 fields, not 3"),
        ('path,label,note\n0.jpg,a,"x\n1.jpg,b,"y"\n2.jpg,b,z\n', "is not a table: ',' expected after '\"' in line 3"),
        ('path,label\n"0.jpg,a\n1.jpg,b\n', "is not a table: unexpected end of data in line 3"),
        ('path,label\n"0.jpg,a\n1.jpg",b\n', "line 3 ends a path with a line break in it; correct its quotation marks"),
        ("name,label\n0.jpg,a\n", "no path column"),
        ("path,label\n", "names no images"),
        ("", "names no images"),
        ("path,label\n0.jpg,b\n", "a label 'a' that the training set does not have"),
        ("path,label\n\xff,b\n", "not a text in UTF-8"),
        ("path,label\n0.jpg,a\nPath,Label\n0.jpg,a\n", "line 3 repeats the names of the columns"),
        ("path,label\n0.jpg,b\n0.jpg,a\n", "train.csv gives 0.jpg the labels 'b' and 'a'; keep one of them"),
    ],
)
def test_wrong_tables_are_told(tmp_path, table, told):
    Files().images("0.jpg").folder(tmp_path)
    (tmp_path / "train.csv").write_bytes(table.encode("latin-1"))
    (tmp_path / "val.csv").write_text("path,label\n0.jpg,a\n")
    assert told in message(tmp_path)


@pytest.mark.parametrize(
    ("row", "told"),
    [
        ("1.jpg,a,", "line 4 has no split; write train, val or test"),
        ("1.jpg,a,trian", "line 4 has a split 'trian'; write train, val or test"),
    ],
)
def test_rows_of_no_split_are_told(tmp_path, row, told):
    """They were left out without a word."""
    Files().images("0.jpg", "1.jpg").folder(tmp_path)
    (tmp_path / "labels.csv").write_text(f"path,label,split\n0.jpg,a,train\n0.jpg,a,val\n{row}\n")
    assert f"labels.csv {told}" in message(tmp_path)
    (tmp_path / "labels.csv").unlink()
    rows = [dict(zip(("path", "label", "split"), line.split(","))) for line in ("0.jpg,a,train", "0.jpg,a,val", row)]
    del rows[0]["split"]
    (tmp_path / "labels.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert "labels.jsonl line 1 has no split; write train, val or test" in message(tmp_path)


def test_one_image_with_another_label_in_another_split_is_told(tmp_path):
    Files().images("0.jpg", "1.jpg").folder(tmp_path)
    (tmp_path / "labels.csv").write_text("path,label,split\n0.jpg,a,train\n1.jpg,b,train\n0.jpg,b,val\n")
    assert "labels.csv gives 0.jpg the labels 'a' and 'b'; keep one of them" in message(tmp_path)


@pytest.mark.parametrize("place", ["SPLIT", "images/SPLIT"])
@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_a_table_labels_the_flat_folders_beside_or_below_it(tmp_path, place, suffix):
    files = Files().images(*(f"{place.replace('SPLIT', split)}/{i}.jpg" for split in ("train", "val") for i in (0, 1)))
    rows = list(zip(files, "abba", ("train", "train", "val", "val")))
    root = files.folder(tmp_path / "set")
    lines = ["path,label,split", *map(",".join, rows)]
    if suffix == "jsonl":
        lines = [json.dumps(dict(zip(("path", "label", "split"), row))) for row in rows]
    (root / f"labels.{suffix}").write_text("\n".join(lines))
    pairs = [(files[path], label) for path, label, _ in rows]
    is_read(root, tmp_path, kind="table", classes=("a", "b"), train=pairs[:2], val=pairs[2:])


@pytest.mark.parametrize("table", [b"id,name\n0,cat\n", b"path,label,split\n0.jpg,a,train\n", b"\xff\xfe", b""])
def test_class_folders_further_down_are_read_without_the_table_above_them(tmp_path, table):
    files, _, _ = folder_set(prefix="pets/")
    (files.folder(tmp_path / "set") / "table.csv").write_bytes(table)
    assert recognise(tmp_path / "set").kind == "folder"


def test_a_set_further_down_is_read_without_a_table_of_other_paths_above_it(tmp_path):
    (tmp_path / "set" / "shards").mkdir(parents=True)
    for split in ("train", "val"):
        Files().images(f"{split}/a/0.jpg", f"{split}/b/0.jpg").tar(tmp_path / "set" / "shards" / f"{split}.tar")
    (tmp_path / "set" / "all.csv").write_text("path,label,split\n0.jpg,a,train\n1.jpg,b,train\n2.jpg,b,val\n")
    assert recognise(tmp_path / "set").kind == "tars"


def test_tables_in_parts(tmp_path):
    Files().images("0.jpg").folder(tmp_path)
    (tmp_path / "train.csv").write_text("path,label\n0.jpg,a\n")
    assert "no table of the val set" in message(tmp_path)
    (tmp_path / "train.csv").rename(tmp_path / "all.csv")
    assert "no 'split' column" in message(tmp_path)
    (tmp_path / "all.csv").unlink()
    (tmp_path / "train.jsonl").write_text("[" * 100_000)
    assert "line 1 is not JSON" in message(tmp_path)


# --- others' WebDataset shards


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20])
@pytest.mark.parametrize("form", ["cls", "json", "folders", "names"])
def test_webdataset_shards_of_others(tmp_path, monkeypatch, form, kept_bytes):
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", kept_bytes)
    (tmp_path / "set").mkdir()
    pictures = Files().images(*(f"{i:04d}" for i in range(15)))
    labels = (
        [str(11 - i % 12) for i in range(15)] if form != "names" else ["cat" if i % 2 else "a dog" for i in range(15)]
    )
    shards = {"train": [range(6), range(6, 12)], "validation": [range(12, 15)]}
    for split, parts in shards.items():
        for number, part in enumerate(parts):
            shard = Files()
            for i in part:
                key = f"n0{i % 2}/{i:04d}" if form == "folders" else f"{i:04d}"
                shard[f"{key}.jpg"] = pictures[f"{i:04d}"]
                if form == "json":
                    shard[f"{key}.json"] = json.dumps({"label": int(labels[i]), "width": 12}).encode()
                else:
                    shard[f"{key}.cls"] = f"{labels[i]}\n".encode()
                    shard[f"{key}.json"] = b'{"filename": "x"}'
            name = f"{split}/{number:05d}.tar" if form == "folders" else f"imagenet1k-{split}-{number:04d}.tar"
            (tmp_path / "set" / name).parent.mkdir(exist_ok=True)
            shard.tar(tmp_path / "set" / name)
    classes = tuple(map(str, range(12))) if form != "names" else ("a dog", "cat")
    expected = [(data, label) for data, label in zip(pictures.values(), labels)]
    known = {"kind": "WebDataset shards", "classes": classes, "train": expected[:12], "val": expected[12:]}
    opened = is_read(tmp_path / "set", tmp_path, **known)
    assert opened[0].locations([0]) is not None
    assert len(list((tmp_path / "set").rglob("*.index.npz"))) == (3 if kept_bytes == 0 else 0)


def test_webdataset_shards_without_labels_or_cut(tmp_path):
    for split in ("train", "val"):
        Files({"0.jpg": jpeg(1), "0.cls": b"0", "1.jpg": jpeg(2)}).tar(tmp_path / f"{split}-0.tar")
    assert "train-0.tar: sample '1' has no .cls" in message(tmp_path)
    Files({"0.jpg": jpeg(1), "0.cls": b"0", "1.gif": b"GIF89a", "1.cls": b"1"}).tar(tmp_path / "train-0.tar")
    assert "train-0.tar: sample '1' has a .cls and no image" in message(tmp_path)
    path = Files({"0.jpg": jpeg(1), "0.cls": b"0"}).tar(tmp_path / "train-0.tar")
    with tarfile.open(path, "a") as tar:
        for name in ("0.jpg", "0.cls"):
            tar.addfile(tarfile.TarInfo(name), io.BytesIO())
    assert "train-0.tar: sample '0' has more than one .jpg" in message(tmp_path)
    Files({"0.jpg": jpeg(1), "0.cls": b"0"}).tar(path)
    path.write_bytes(path.read_bytes() * 2)
    assert "data after its end mark" in message(tmp_path)
    path.unlink()
    assert "no shards of the train set" in message(tmp_path)


def test_shards_of_a_validation_set_alone_are_evaluated(tmp_path):
    (tmp_path / "val").mkdir()
    Files({"0.jpg": jpeg(1), "0.cls": b"0", "1.jpg": jpeg(2), "1.cls": b"1"}).tar(tmp_path / "val" / "0.tar")
    assert len(open_eval(images(tmp_path))) == 2


@pytest.mark.parametrize("suffix", ["", "-5f3a", "-{0}b"])
def test_a_set_that_lacks_one_of_its_numbered_files_is_told(tmp_path, suffix):
    """They say themselves how many they are; half of a set was read without a word."""
    names = [f"train-{i:05d}-of-00003{suffix.format(i)}.tar" for i in range(3)]
    for name in (*names, "val-00000-of-00001.tar", "test-00001-of-00002.tar"):
        Files({"0.jpg": jpeg(1), "0.cls": b"0"}).tar(tmp_path / name)
    assert check_data(images(tmp_path)).train_samples == 3
    (tmp_path / names[1]).unlink()
    assert "lacks train-00001-of-00003; fetch it" in message(tmp_path)
    for path in tmp_path.iterdir():
        path.unlink()
    for name in ("train-1-of-4", "train-2-of-4", "train-4-of-4", "val"):
        (tmp_path / f"{name}.parquet").touch()
    assert "lacks train-3-of-4; fetch it" in message(tmp_path)
    (tmp_path / "tars").mkdir()
    Files({"train/a/0.jpg": jpeg(1)}).tar(tmp_path / "tars" / "train-0-of-2.tar")
    Files({"val/a/0.jpg": jpeg(1)}).tar(tmp_path / "tars" / "val.tar")
    assert "lacks train-1-of-2; fetch it" in message(tmp_path / "tars")


# --- parquet


@pytest.mark.parametrize("form", ["hub", "plain"])
def test_parquet_with_an_image_column(tmp_path, cache, form):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pictures = [jpeg(9 * i) for i in range(10)]
    labels = [i % 3 for i in range(10)]
    names = ["zebra", "ant", "cat"]
    for split, chosen in (
        ("train-00000-of-00002", (0, 4)),
        ("train-00001-of-00002", (4, 7)),
        ("test-00000-of-00001", (7, 10)),
    ):
        rows = slice(*chosen)
        if form == "hub":
            features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
            image = [{"bytes": data, "path": None} for data in pictures[rows]]
            table = pyarrow.table({"image": image, "label": labels[rows]})
            table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        else:
            table = pyarrow.table({"img": pictures[rows], "label": [names[label] for label in labels[rows]]})
        folder = tmp_path / "set" / "data" if form == "hub" else tmp_path / "set"
        folder.mkdir(parents=True, exist_ok=True)
        parquet.write_table(table, folder / f"{split}.parquet", row_group_size=2)
    classes = tuple(names) if form == "hub" else tuple(sorted(names))
    expected = [(data, names[label]) for data, label in zip(pictures, labels)]
    opened = is_read(tmp_path / "set", tmp_path, kind="parquet", classes=classes, train=expected[:7], val=expected[7:])
    assert opened[0].locations([0]) is not None
    assert len(list(cache.glob("parquet-*.images"))) == 2
    file = next((tmp_path / "set").rglob("test-*.parquet"))
    file.write_bytes(file.read_bytes()[:-20])
    assert f"{file.name} cannot be read as parquet" in message(tmp_path / "set")


def test_parquet_files_that_name_their_classes_otherwise(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split, names in (("train-0", ["ant", "cat"]), ("train-1", ["cat", "ant"]), ("test-0", ["ant", "cat"])):
        features = {"label": {"names": names, "_type": "ClassLabel"}}
        table = pyarrow.table({"image": [jpeg(1), jpeg(2)], "label": [0, 1]})
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
        parquet.write_table(table, tmp_path / f"{split}.parquet")
    assert "train-1.parquet names other classes than" in message(tmp_path)


@pytest.mark.parametrize("names", [["ant", "\ud800"], ["ant", "ant"]])
def test_parquet_files_with_names_of_classes_that_are_none(tmp_path, names):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    for split in ("train", "test"):
        table = pyarrow.table({"image": [jpeg(1), jpeg(2)], "label": [0, 1]})
        noted = json.dumps({"info": {"features": {"label": {"names": names}}}})
        parquet.write_table(table.replace_schema_metadata({"huggingface": noted}), tmp_path / f"{split}.parquet")
    assert "parquet does not name its classes by different texts" in message(tmp_path)


def test_damage_to_parquet_and_to_what_was_unpacked(tmp_path, cache):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"image": [jpeg(1), jpeg(2)], "label": ["a", "b"]})
    for split in ("train", "test"):
        parquet.write_table(table, tmp_path / f"{split}.parquet", compression="none", write_page_checksum=True)
    open_data(images(tmp_path))
    for path in cache.glob("parquet-*.images"):
        content = bytearray(path.read_bytes())
        entry = content.rindex(b"PK\1\2", 0, content.rindex(b"PK\1\2"))
        content[entry + 32] ^= content.rindex(b"PK\1\2") - entry  # the last array is taken for a comment
        path.write_bytes(content)
    assert ".images is damaged" in message(tmp_path)
    content = bytearray((tmp_path / "train.parquet").read_bytes())
    content[content.index(jpeg(1)) + 200] ^= 1
    (tmp_path / "train.parquet").write_bytes(content)
    assert "train.parquet cannot be read as parquet" in message(tmp_path)


def test_rows_of_parquet_are_named_by_their_file(tmp_path, monkeypatch):
    """Not by the file in the cache; packs made with different caches are therefore equal."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    for split, value in (("train-0", 1), ("train-1", 3), ("test", 5)):
        table = pyarrow.table({"image": [jpeg(value), jpeg(value + 1)[:60]], "label": ["a", "b"]})
        parquet.write_table(table, tmp_path / "set" / f"{split}.parquet")
    for number in (0, 1):
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / f"cache{number}"))
        pack(tmp_path / "set", tmp_path / f"packed{number}")
    packs = [{path.name: path.read_bytes() for path in (tmp_path / f"packed{i}").iterdir()} for i in (0, 1)]
    assert packs[0] == packs[1]
    train, _ = open_data(images(tmp_path / "set"))
    with pytest.raises(BadSample, match=re.escape(f"{tmp_path / 'set' / 'train-1.parquet'} row 1: ")):
        train.image(3)
    assert [train.describe(i)[-5:] for i in range(4)] == ["row 0", "row 1"] * 2


def test_what_a_killed_process_left_in_the_cache_is_removed(cache):
    cache.mkdir(parents=True)
    (cache / ".unpacked-1.tar-x7").write_bytes(b"a part")
    (cache / ".unpacked-2.tar-x7").write_bytes(b"a part of something else")
    assert kept.made_once("unpacked-1.tar", lambda file: file.write(b"all")).read_bytes() == b"all"
    assert not (cache / ".unpacked-1.tar-x7").exists()
    assert (cache / ".unpacked-2.tar-x7").exists()


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    for split in ("train", "test"):
        (tmp_path / f"{split}-0.parquet").write_bytes(b"PAR1")
    assert "pip install 'hyperbatch[parquet]'" in message(tmp_path)


# --- any other store, by a callable


def test_the_documented_reader_of_lmdb(tmp_path, monkeypatch):
    lmdb = pytest.importorskip("lmdb")
    pictures = {"train": [jpeg(20 * i) for i in range(6)], "val": [jpeg(100), jpeg(200)]}
    labels = {"train": [0, 1, 1, 0, 1, 0], "val": [1, 0]}
    (tmp_path / "set").mkdir()
    for split in ("train", "val"):
        with lmdb.open(str(tmp_path / "set" / split)) as env, env.begin(write=True) as write:
            for i, data in enumerate(pictures[split]):
                write.put(str(i).encode(), data)
            write.put(b"labels", json.dumps(labels[split]).encode())
    (code,) = (block for block in pages.blocks(DOCS, "python") if "lmdb.open" in block)
    (tmp_path / "my_data.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    config = DataConfig(dataset="my_data:open_lmdb", data=str(tmp_path / "set"), image_size=8, augment="none")
    for source, split in zip(open_data(config), ("train", "val"), strict=True):
        assert [source.read(i) for i in range(len(source))] == pictures[split]
        assert source.labels.tolist() == labels[split]
    assert check_data(config).to_dict() == {"train_samples": 6, "eval_samples": 2, "classes": 2, "channels": 3}
