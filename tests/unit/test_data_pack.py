"""Packing: what comes out is what went in; cut short it can be finished; hostile sets are refused, not followed."""

import errno
import io
import json
import mmap
import os
import shutil
import tarfile

import numpy as np
import pytest
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data import kept, shard_writer
from hyperbatch.data import pack as pack_module
from hyperbatch.data.decode import decode_full, raw_header_bytes
from hyperbatch.data.identity import sample_list
from hyperbatch.data.pack import info, pack
from hyperbatch.data.recompress import Recompress
from hyperbatch.data.shard_writer import write_atomically
from hyperbatch.data.shards import INDEX_DTYPE, ShardSource, _checksum, index_path
from hyperbatch.data.source import ArraySource, BadSample, PixelFiles, check_data, open_data
from hyperbatch.data.texts import format_info
from hyperbatch.data.verify import verify
from hyperbatch.errors import InputError


@pytest.fixture
def tree(tmp_path):
    rng = np.random.default_rng(0)
    for split, count in (("train", 20), ("val", 5)):
        for name in ("a", "b"):
            (tmp_path / "src" / split / name).mkdir(parents=True)
            for i in range(count):
                image = Image.fromarray(rng.integers(0, 256, (20 + i, 30, 3), dtype=np.uint8))
                image.save(tmp_path / "src" / split / name / f"{name}.{i}.jpg")
    return tmp_path / "src"


def opened(folder):
    return open_data(DataConfig(dataset="images", data=str(folder)))


def contents(source):
    """Every sample's (bytes, label), in no order."""
    return sorted((source.read(i), int(source.labels[i])) for i in range(len(source)))


def files(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_pack_keeps_every_byte_and_label(tree, tmp_path):
    seen = []
    result = pack(tree, tmp_path / "dst", shard_bytes=8000, progress=lambda done, total: seen.append((done, total)))
    assert result.samples == 50
    assert result.shards > 4
    assert result.unreadable == 0
    assert seen[-1] == (50, 50)
    for before, after in zip(opened(tree), opened(tmp_path / "dst"), strict=True):
        assert isinstance(after, ShardSource)
        assert after.classes == before.classes
        assert contents(after) == contents(before)
        assert after.image(3).shape == (after.index["height"][3], after.index["width"][3], 3)
        assert after.sizes_bytes().sum() == before.sizes_bytes().sum()
    assert verify(tmp_path / "dst").ok
    assert verify(tmp_path / "dst").samples == 50
    assert check_data(DataConfig(data=str(tmp_path / "dst"))).train_samples == 40


def test_shards_are_webdataset_tars(tree, tmp_path):
    """Pairs of <key>.jpg and <key>.cls in a row, a key being all up to the first dot."""
    pack(tree, tmp_path / "dst")
    with tarfile.open(tmp_path / "dst" / "train-000000.tar") as tar:
        members = [(member.name, tar.extractfile(member).read()) for member in tar]
    assert len(members) == 80
    for (image, data), (label, text) in zip(members[::2], members[1::2]):
        key, extension = image.split(".", 1)
        assert (label, extension) == (f"{key}.cls", "jpg")
        assert Image.open(io.BytesIO(data)).size[0] == 30
        assert ("a", "b")[int(text)] == key.split("_")[1]
    labels = [int(text) for _, text in members[1::2]]
    assert labels != sorted(labels)  # front to back, classes are mixed


def test_packing_twice_gives_the_same_bytes(tree, tmp_path):
    for name in ("one", "two"):
        pack(tree, tmp_path / name, shard_bytes=8000, workers=3)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_tars_pack_too(tree, tmp_path):
    (tmp_path / "tars").mkdir()
    for split in ("train", "val"):
        with tarfile.open(tmp_path / "tars" / f"{split}.tar", "w") as tar:
            tar.add(tree / split, split)
    pack(tmp_path / "tars", tmp_path / "dst")
    assert contents(opened(tmp_path / "dst")[0]) == contents(opened(tree)[0])
    assert info(tmp_path / "tars").kind == "tars"


def test_an_interrupted_pack_is_finished_by_the_next(tree, tmp_path, monkeypatch):
    pack(tree, tmp_path / "whole", shard_bytes=8000)
    write, written = shard_writer._write_member, []

    def full_disk(out, name, data):
        written.append(name)
        if len(written) > 45:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(out, name, data)

    monkeypatch.setattr(shard_writer, "_write_member", full_disk)
    with pytest.raises(InputError, match=r"No space left on device.*run the same command again"):
        pack(tree, tmp_path / "dst", shard_bytes=8000, workers=1)
    with pytest.raises(InputError, match="no complete packed set"):
        verify(tmp_path / "dst")
    monkeypatch.undo()
    (tmp_path / "dst" / "train-000003.part").write_bytes(b"left by a killed process")
    result = pack(tree, tmp_path / "dst", shard_bytes=8000)
    assert 0 < result.resumed_shards < result.shards
    left = files(tmp_path / "dst")
    assert {name: data for name, data in left.items() if not name.endswith(".part")} == files(tmp_path / "whole")
    assert verify(tmp_path / "dst").ok


def test_a_pack_that_was_killed_while_it_wrote_its_first_file_is_done_by_the_next(tree, tmp_path):
    (tmp_path / "dst").mkdir()
    (tmp_path / "dst" / "pack.json.part").write_bytes(b'{"format": "hyperb')
    pack(tree, tmp_path / "dst")
    pack(tree, tmp_path / "whole")
    assert files(tmp_path / "dst") == files(tmp_path / "whole")


@pytest.mark.parametrize("append", [True, False])
def test_classes_of_an_interrupted_addition_may_change_before_it_is_finished(tree, tmp_path, monkeypatch, append):
    """Otherwise the whole set had to be packed again."""
    pack(tree, tmp_path / "dst", shard_bytes=8000)
    (tmp_path / "dst" / "train-notes.txt").write_text("of somebody")
    before = files(tmp_path / "dst")
    for split in ("train", "val"):
        shutil.copytree(tree / split / "a", tree / split / "c")

    def interrupted(plan, *rest):
        if plan.path.name.startswith("val"):
            raise InputError("interrupted")
        return write(plan, *rest)

    write = shard_writer._write_shard
    monkeypatch.setattr(shard_writer, "_write_shard", interrupted)
    with pytest.raises(InputError, match="interrupted"):
        pack(tree, tmp_path / "dst", shard_bytes=8000, append=True)
    monkeypatch.undo()
    begun = files(tmp_path / "dst")
    assert begun.keys() > before.keys()
    shutil.copytree(tree, tmp_path / "other")
    (tmp_path / "other" / "train" / "a" / "a.0.jpg").unlink()
    shutil.rmtree(tmp_path / "other" / "train" / "c")
    shutil.rmtree(tmp_path / "other" / "val" / "c")
    with pytest.raises(InputError, match="holds a pack of other data"):
        pack(tmp_path / "other", tmp_path / "dst", shard_bytes=8000)
    assert files(tmp_path / "dst") == begun, "a refused command removes nothing"
    image = tree / "train" / "c" / "a.0.jpg"
    if append:  # pixels change and the size stays
        image.write_bytes(image.read_bytes()[::-1])
        pack(tree, tmp_path / "dst", shard_bytes=8000, append=True)
        train, val = opened(tmp_path / "dst")
        assert (train.classes, len(train), len(val)) == (("a", "b", "c"), 60, 15)
        assert contents(train) == contents(opened(tree)[0])
        assert verify(tmp_path / "dst").problem_count == 1, "of the reversed file"
    else:  # the class is given up
        for split in ("train", "val"):
            shutil.rmtree(tree / split / "c")
        pack(tree, tmp_path / "dst", shard_bytes=8000)
        assert files(tmp_path / "dst") == before


@pytest.mark.parametrize("last", ["manifest.json", "skipped.txt"])
def test_a_disk_that_the_last_files_fill_is_one_line(tree, tmp_path, monkeypatch, last):
    (tree / "train" / "a" / "gone.jpg").symlink_to(tmp_path / "nowhere")

    def full_disk(path, content):
        if path.name == last:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write_atomically(path, content)

    monkeypatch.setattr(pack_module, "write_atomically", full_disk)
    with pytest.raises(InputError, match=r"cannot write .*manifest\.json: No space left on device; fix this and run"):
        pack(tree, tmp_path / "dst")
    monkeypatch.undo()
    assert pack(tree, tmp_path / "dst").skipped == 1
    assert verify(tmp_path / "dst").ok


def test_a_folder_that_can_no_longer_be_written_is_one_line(tree, tmp_path, monkeypatch):
    """Not even what was begun there can be removed: here, because a file has taken the folder's place."""

    def read_only(out, name, data):
        shutil.rmtree(tmp_path / "dst")
        (tmp_path / "dst").touch()
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(shard_writer, "_write_member", read_only)
    with pytest.raises(InputError, match=r"cannot write .*train-000000.tar: Read-only file system; fix this and run"):
        pack(tree, tmp_path / "dst", workers=1)


def test_a_set_is_packed_into_a_folder_and_not_at_an_address(tree, tmp_path, monkeypatch):
    """It was written to a folder named s3: below the current one."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="s3://bucket/set is an address; pack into a folder of this machine"):
        pack(tree, "s3://bucket/set")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    pack(tree, "~/packed")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "src"]
    assert verify(tmp_path / "home" / "packed").ok


def test_a_folder_of_something_else_is_not_touched(tree, tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.txt").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        pack(tree, tmp_path / "other")
    pack(tree, tmp_path / "dst")
    (tree / "train" / "a" / "new.jpg").write_bytes((tree / "train" / "a" / "a.1.jpg").read_bytes())
    with pytest.raises(InputError, match="other data"):
        pack(tree, tmp_path / "dst")
    with pytest.raises(InputError, match="packed already"):
        pack(tmp_path / "dst", tmp_path / "again")


def test_images_that_cannot_be_read_are_kept_and_counted(tree, tmp_path):
    (tree / "train" / "a" / "broken.jpg").write_bytes(b"no image")
    assert pack(tree, tmp_path / "dst").unreadable == 1
    result = verify(tmp_path / "dst")
    assert not result.ok
    assert "broken.jpg: not a readable image" in result.problems[0]
    assert info(tmp_path / "dst").splits["train"].unreadable == 1


def test_info_describes_folders_and_shards(tree, tmp_path):
    pack(tree, tmp_path / "dst")
    plain, packed = info(tree), info(tmp_path / "dst")
    assert (plain.kind, packed.kind) == ("folder", "shards")
    assert plain.class_names == packed.class_names == ["a", "b"]
    assert plain.splits["train"].bytes == packed.splits["train"].bytes
    assert packed.splits["val"].samples_per_class == (5, 5)
    assert (plain.splits["val"].median_width, packed.splits["val"].median_width) == (None, 30)
    assert packed.to_dict()["splits"]["val"]["samples"] == 10
    assert "other files" not in format_info(plain)
    (tree / "train" / "a" / "photo.HEIC").touch()
    assert {name: split.other_files for name, split in info(tree).splits.items()} == {"train": 1, "val": None}
    assert "other files" in format_info(info(tree))


# --- damaged and hostile sets


@pytest.fixture
def packed(tree, tmp_path):
    pack(tree, tmp_path / "dst")
    return tmp_path / "dst"


def test_a_shard_is_opened_when_it_is_first_read(packed):
    """Thousands of ranks that open every shard as they start would hold up a shared file system."""
    source = open_data(DataConfig(data=str(packed)))[0]
    assert isinstance(source, ShardSource)
    assert source._open == {}
    for index in (0, len(source) - 1, 0):
        source.read(index)
    assert set(source._open) == {0, source.shard_of(len(source) - 1)}


def rewrite_index(packed, change):
    path = index_path(packed / "train-000000.tar")
    index = np.load(path)
    index = change(index)
    np.save(path, index)


def rewrite_manifest(packed, change):
    path = packed / "manifest.json"
    manifest = json.loads(path.read_text())
    change(manifest)
    if "crc32" in manifest:  # a forger would write the right one
        manifest["crc32"] = _checksum({key: value for key, value in manifest.items() if key != "crc32"})
    path.write_text(json.dumps(manifest))


def as_first_schema(packed):
    """The set as versions before the checksums wrote it."""

    def change(manifest):
        del manifest["crc32"]
        manifest["schema"] = 1
        for split in manifest["splits"].values():
            del split["classes"]
            split["shards"] = [{key: shard[key] for key in ("name", "samples")} for shard in split["shards"]]

    rewrite_manifest(packed, change)
    for path in packed.glob("*.names"):
        path.unlink()


def test_a_flipped_bit_is_found(packed):
    train, _ = opened(packed)
    offset = int(train.index["offset"][7]) + 100
    with open(packed / "train-000000.tar", "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    with pytest.raises(BadSample, match=r"train-000000\.tar\[7\].*checksum"):
        train.read(7)
    assert len(train.read(8)) == train.index["length"][8]
    result = verify(packed)
    assert result.problem_count == 1
    assert "[7]" in result.problems[0]


def test_a_flipped_bit_between_two_members_is_found(packed):
    train, _ = opened(packed)
    end = int(train.index["offset"][7] + train.index["length"][7])
    assert end % 512
    with open(packed / "train-000000.tar", "r+b") as file:
        file.seek(end)
        file.write(b"\1")
    result = verify(packed)
    assert result.problem_count == 1
    assert "what fills the block after" in result.problems[0]


def set_field(name, value):
    def change(index):
        index[name][3] = value
        return index

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_field("offset", 2**64 - 10), "past the end"),
        (set_field("offset", 1 << 40), "past the end"),
        (set_field("length", 2**32 - 1), "past the end"),
        (set_field("offset", 0), "not samples"),
        (set_field("offset", 1025), "not samples"),
        (lambda index: index[::-1], "not samples"),
        (lambda index: np.concatenate([index[:3], np.zeros(1, INDEX_DTYPE), index[4:]]), "not samples"),
        (set_field("label", -1), "labels outside"),
        (set_field("label", 2), "labels outside"),
        (lambda index: index[:-1], "the manifest says 40"),
        (lambda index: np.zeros(40), "not a shard index"),
        (lambda index: np.zeros((2, 20), INDEX_DTYPE), "not a shard index"),
        (lambda index: np.array([{"a": 1}] * 40, dtype=object), "pack the set again"),
    ],
)
def test_a_wrong_index_is_refused(packed, change, text):
    rewrite_index(packed, change)
    with pytest.raises(InputError, match="manifest's checksum"):
        opened(packed)
    assert not verify(packed).ok
    as_first_schema(packed)
    with pytest.raises(InputError, match=text):
        opened(packed)
    assert not verify(packed).ok


def test_a_shard_that_is_cut_or_missing_is_refused(packed):
    shard = packed / "train-000000.tar"
    shard.write_bytes(shard.read_bytes()[:5000])
    with pytest.raises(InputError, match="past the end"):
        opened(packed)
    shard.unlink()
    with pytest.raises(InputError, match="pack the set again"):
        opened(packed)
    assert not verify(packed).ok


@pytest.mark.parametrize("name", ["../outside.tar", "/etc/x.tar", "a/b.tar", "x.txt", 5, None])
def test_a_manifest_cannot_name_files_elsewhere(packed, name):
    rewrite_manifest(packed, lambda manifest: manifest["splits"]["train"]["shards"][0].update(name=name))
    with pytest.raises(InputError, match=r"manifest\.json"):
        opened(packed)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"format": "hyperbatch-shards"}',
        '{"format": "other"}',
        '{"format":',
        "[" * 100_000,
        "Infinity",
        '"\\ud800"',
        "5" * 5000,
    ],
)
def test_a_manifest_that_is_none_is_refused(packed, text):
    (packed / "manifest.json").write_text(text)
    with pytest.raises(InputError, match="not a manifest"):
        opened(packed)


@pytest.mark.parametrize("kind", ["absolute", "parent", "link", "extra"])
def test_verify_names_members_that_do_not_belong(packed, tmp_path, kind):
    member = tarfile.TarInfo({"absolute": "/outside/x.jpg", "parent": "../x.jpg"}.get(kind, "x.jpg"))
    if kind == "link":
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    before = sorted(tmp_path.rglob("*"))
    with tarfile.open(packed / "val-000000.tar", "a") as tar:
        tar.addfile(member)
    result = verify(packed)
    assert result.problem_count == 1
    assert repr(member.name) in result.problems[0]
    assert sorted(tmp_path.rglob("*")) == before


# --- recompression


def test_images_are_shrunk_to_the_shorter_side(tree, tmp_path):
    assert pack(tree, tmp_path / "dst", short_side=18).unreadable == 0
    assert verify(tmp_path / "dst").ok
    for before, after in zip(opened(tree), opened(tmp_path / "dst"), strict=True):
        assert len(after) == len(before)
        assert sorted(after.labels.tolist()) == sorted(before.labels.tolist())
        assert set(np.minimum(after.index["width"], after.index["height"]).tolist()) == {18}
    # 30 x 20 becomes 27 x 18: the picture, not a part of it.
    assert (27, 18) in zip(after.index["width"].tolist(), after.index["height"].tolist())


def test_small_images_keep_their_bytes_when_others_are_shrunk(tree, tmp_path):
    pack(tree, tmp_path / "dst", short_side=25)
    before, after = (set(contents(opened(folder)[0])) for folder in (tree, tmp_path / "dst"))
    assert 0 < len(before & after) < len(before)


def test_a_lower_quality_makes_files_smaller_and_never_larger(tree, tmp_path):
    sizes = {quality: pack(tree, tmp_path / str(quality), quality=quality).bytes for quality in (20, 60, 100)}
    original = pack(tree, tmp_path / "same").bytes
    assert sizes[20] < sizes[60] < original
    assert sizes[100] == original


def test_plain_pixels_are_those_of_the_files(tree, tmp_path):
    pack(tree, tmp_path / "dst", decoded=True)
    assert verify(tmp_path / "dst").ok
    before, after = opened(tree)[0], opened(tmp_path / "dst")[0]
    key = lambda pair: (pair[1], pair[0].tobytes())  # noqa: E731
    pairs = [
        sorted(((source.image(i), int(source.labels[i])) for i in range(len(source))), key=key)
        for source in (before, after)
    ]
    for (ours, label), (theirs, other_label) in zip(*pairs, strict=True):
        assert label == other_label
        assert (ours == theirs).all()
    with tarfile.open(tmp_path / "dst" / "train-000000.tar") as tar:
        member = next(iter(tar))
        assert member.name.endswith(".ppm")
        assert Image.open(io.BytesIO(tar.extractfile(member).read())).format == "PPM"  # others read it, too


def test_arrays_are_packed_as_plain_pixels_that_need_no_decoder():
    images = np.random.default_rng(0).integers(0, 256, (2, 5, 4, 3), dtype=np.uint8)
    source = PixelFiles(
        ArraySource("t", images, np.zeros(2, np.int64), classes=("a",), mean=(0.5,) * 3, std=(0.2,) * 3)
    )
    data = source.read(1)
    assert raw_header_bytes(data) == (4, 5, len(data) - 5 * 4 * 3)
    assert (decode_full(data, "x") == images[1]).all()


def test_damaged_images_are_kept_as_they_are(tree, tmp_path):
    path = next((tree / "train" / "a").iterdir())
    path.write_bytes(path.read_bytes()[:300])
    pack(tree, tmp_path / "dst", short_side=10)
    source = opened(tmp_path / "dst")[0]
    assert path.read_bytes() in [source.read(i) for i in range(len(source))]


@pytest.mark.parametrize(("max_side", "goes_on"), [("None", True), ("25", False)])
def test_a_pack_of_a_version_that_measured_the_longer_side_goes_on_without_it(tree, tmp_path, max_side, goes_on):
    pack(tree, tmp_path / "dst", split="train", short_side=None if goes_on else 25)
    plan = tmp_path / "dst" / "pack.json"
    plan.write_text(plan.read_text().replace(f"short_side={max_side}", f"max_side={max_side}"))
    assert "max_side" in plan.read_text()
    if goes_on:
        assert pack(tree, tmp_path / "dst").unreadable == 0
        return
    with pytest.raises(InputError, match="other options for its images"):
        pack(tree, tmp_path / "dst", short_side=25)


def test_options_of_recompression_belong_to_the_set(tree, tmp_path):
    pack(tree, tmp_path / "dst", short_side=25)
    with pytest.raises(InputError, match="give an empty folder"):
        pack(tree, tmp_path / "dst", short_side=20)
    with pytest.raises(InputError, match="another shard size, or other options"):
        pack(tree, tmp_path / "dst", shard_bytes=8000, short_side=25)
    for options in ({"short_side": 0}, {"quality": 101}, {"quality": 50, "decoded": True}):
        with pytest.raises(InputError, match="--"):
            pack(tree, tmp_path / "other", **options)


def mapped(array):
    while array is not None and not isinstance(array, mmap.mmap):
        array = array.obj if isinstance(array, memoryview) else getattr(array, "base", None)
    return array is not None


def test_the_index_of_a_large_set_is_held_once_for_all_processes(tree, tmp_path, monkeypatch):
    pack(tree, tmp_path / "dst", shard_bytes=8000)
    alone = opened(tmp_path / "dst")[0]
    assert not mapped(alone.index)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 1)
    for _ in range(2):
        shared = opened(tmp_path / "dst")[0]
        assert mapped(shared.index)
        assert shared.index.tobytes() == alone.index.tobytes()
        assert contents(shared) == contents(alone)
        assert sample_list(shared) == sample_list(alone)
    files = [path for path in (tmp_path / "cache" / "hyperbatch").iterdir() if path.suffix != ".lock"]
    assert len(files) == 2, "one for each split"

    for path in files:  # a bit that fell over is found, and the file written again
        path.write_bytes(path.read_bytes()[:-20] + bytes(20))
    assert opened(tmp_path / "dst")[0].index.tobytes() == alone.index.tobytes()
    assert not any(path.exists() for path in files)
    assert mapped(opened(tmp_path / "dst")[0].index)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tree / "train" / "a" / "a.0.jpg"))  # nothing can be kept there
    assert not mapped(opened(tmp_path / "dst")[0].index)
    assert opened(tmp_path / "dst")[0].index.tobytes() == alone.index.tobytes()


def test_a_changed_index_is_refused_though_a_sound_one_is_held(tree, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 1)
    pack(tree, tmp_path / "dst", shard_bytes=8000)
    opened(tmp_path / "dst")
    path = index_path(tmp_path / "dst" / "train-000001.tar")
    rows = np.load(path)
    rows["label"][0] = 1 - rows["label"][0]
    np.save(path, rows)
    with pytest.raises(InputError, match="labels may be wrong"):
        opened(tmp_path / "dst")
    with open(tmp_path / "dst" / "train-000000.tar", "r+b") as file:
        file.truncate(600)
    with pytest.raises(InputError, match="points past the end"):
        opened(tmp_path / "dst")


def png(image):
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def test_what_no_jpeg_can_hold_and_what_is_made_to_fill_memory_keeps_its_bytes():
    wide = png(Image.new("RGB", (70_000, 2)))
    assert Recompress(short_side=None, quality=80, decoded=False)(wide, "png") == (wide, "png")
    bomb = png(Image.new("1", (9_000, 9_000)))
    assert Recompress(short_side=None, quality=None, decoded=True)(bomb, "png") == (bomb, "png")


def test_plain_pixels_of_16_bits_are_those_of_the_loader():
    file = png(Image.fromarray(np.arange(0, 60_000, 1000, dtype=np.uint16).reshape(6, 10)))
    pixels, _ = Recompress(short_side=None, quality=None, decoded=True)(file, "png")
    assert (decode_full(pixels, "x") == decode_full(file, "x")).all()
