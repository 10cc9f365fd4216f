"""Sets as other people's tools leave them: hidden copies, hard links, names in other encodings, odd tables."""

import errno
import io
import json
import os
import resource
import tarfile
import zipfile

import pytest
from layout_files import Files, cache, folder_set, images, is_read, jpeg, message

from hyperbatch.data import kept
from hyperbatch.data.layouts import recognise
from hyperbatch.data.pack import pack
from hyperbatch.data.source import open_data
from hyperbatch.data.verify import verify
from hyperbatch.errors import InputError

pytestmark = pytest.mark.usefixtures("cache")
__all__ = ("cache",)  # a fixture is used by its name


# --- folders and archives


@pytest.mark.parametrize("form", ["folder", "zip", "tar", "tars"])
def test_images_in_hidden_folders_are_no_samples(tmp_path, form):
    """Jupyter leaves copies of what it showed in .ipynb_checkpoints."""
    files, train, val = folder_set()
    files["train/a/.ipynb_checkpoints/0-checkpoint.jpg"] = jpeg(200)
    files["train/.ipynb_checkpoints/1-checkpoint.jpg"] = jpeg(201)
    path = tmp_path / "set"
    path.mkdir()
    if form == "tars":
        for split in ("train", "val"):
            Files({name: data for name, data in files.items() if name.startswith(split)}).tar(path / f"{split}.tar")
    elif form == "folder":
        files.folder(path)
    else:
        path = getattr(files, form)(path / f"set.{form}")
    kind = {"folder": "folder", "tars": "tars"}.get(form, f"folder in a {form}")
    is_read(path, tmp_path, kind=kind, classes=("a", "b"), train=train, val=val)


@pytest.mark.parametrize("form", ["tar", "zip", "shards"])
def test_an_archive_that_may_not_be_read_is_told(tmp_path, monkeypatch, form):
    files, _, _ = folder_set()
    path = tmp_path / "set"
    if form == "shards":
        path.mkdir()
        for split in ("train", "val"):
            Files({"0.jpg": jpeg(3), "0.cls": b"a"}).tar(path / f"{split}.tar")
    else:
        path = getattr(files, form)(tmp_path / f"set.{form}")
    allowed = os.open

    def denied(name, *flags):
        if str(name).endswith((".tar", ".zip")):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), name)
        return allowed(name, *flags)

    monkeypatch.setattr(os, "open", denied)
    assert "cannot be read: Permission denied; check its permissions" in message(path)


@pytest.mark.parametrize("form", ["zip", "tar", "tars"])
@pytest.mark.parametrize(
    "name", ["{split}/b/./{file}", "{split}//b/{file}", "/{split}/b/{file}", "./././{split}/b/{file}"]
)
def test_paths_in_archives_mean_what_they_mean_when_unpacked(tmp_path, form, name):
    """`tar cf x.tar train/a train/b/.` writes such names; the images of class b were passed over in both splits."""
    files, train, val = folder_set()
    odd = Files()
    for path, data in files.items():
        split, label, file = path.split("/")
        odd[name.format(split=split, file=file) if label == "b" else path] = data
    path = tmp_path / "set"
    path.mkdir()
    if form == "tars":
        for split in ("train", "val"):
            part = {each: data for each, data in odd.items() if f"{split}/" in each}
            Files(part).tar(path / f"{split}.tar")
    else:
        path = getattr(odd, form)(path / f"set.{form}")
    kind = "tars" if form == "tars" else f"folder in a {form}"
    is_read(path, tmp_path, kind=kind, classes=("a", "b"), train=train, val=val)


@pytest.mark.parametrize("name", ["val", "valid", "validation", "test"])
def test_tars_may_have_any_name_of_the_validation_set(tmp_path, name):
    files, train, val = folder_set(name)
    for split in ("train", name):
        (tmp_path / "set").mkdir(exist_ok=True)
        part = Files({path: data for path, data in files.items() if path.startswith(f"{split}/")})
        part.tar(tmp_path / "set" / f"{split}-0.tar")
    is_read(tmp_path / "set", tmp_path, kind="tars", classes=("a", "b"), train=train, val=val)


def test_tars_hold_images_at_any_depth(tmp_path):
    files, train, val = folder_set()
    files["train/b/deep/er/0.jpg"] = jpeg(200)
    (tmp_path / "set").mkdir()
    for split in ("train", "val"):
        part = Files({path: data for path, data in files.items() if path.startswith(split)})
        part.tar(tmp_path / "set" / f"{split}.tar")
    train = [*train, (jpeg(200), "b")]
    is_read(tmp_path / "set", tmp_path, kind="tars", classes=("a", "b"), train=train, val=val)


@pytest.mark.parametrize("form", ["tar", "tars"])
def test_a_file_that_was_written_again_counts_once(tmp_path, form):
    """tar --update appends what is newer."""
    files, train, _ = folder_set()
    for split in ("train", "val"):
        part = Files({path: data for path, data in files.items() if path.startswith(split)})
        part.tar(tmp_path / f"{split}.tar")
    path = tmp_path / "train.tar"
    if form == "tar":
        path = files.tar(tmp_path / "set.tar")
    with tarfile.open(path, "a") as tar:
        member = tarfile.TarInfo("train/a/1.jpg")
        member.size = len(jpeg(250))
        tar.addfile(member, io.BytesIO(jpeg(250)))
    source, _ = open_data(images(path if form == "tar" else tmp_path))
    assert [source.read(i) for i in range(len(source))] == [train[0][0], jpeg(250), train[2][0], train[3][0]]


@pytest.mark.parametrize("name", ["set.tar", "set.tgz"])
def test_hard_links_in_a_tar_are_files(tmp_path, name):
    """tar writes the second name of a file as a link to the first."""
    root = folder_set()[0].folder(tmp_path / "src")
    os.link(root / "train/a/0.jpg", root / "train/b/9.jpg")
    os.link(root / "train/a/0.jpg", root / "val/b/9.jpg")
    with tarfile.open(tmp_path / name, "w:gz" if name.endswith("tgz") else "w") as tar:
        tar.add(root / "train", "train")
        tar.add(root / "val", "val")
        assert sum(member.islnk() for member in tar.getmembers()) == 2
    for ours, theirs in zip(open_data(images(tmp_path / name)), open_data(images(root)), strict=True):
        assert [ours.read(i) for i in range(len(ours))] == [theirs.read(i) for i in range(len(theirs))]
        assert ours.labels.tolist() == theirs.labels.tolist()
        assert len(ours) == 5


def test_a_hard_link_to_nothing_is_named(tmp_path):
    root = folder_set()[0].folder(tmp_path / "src")
    os.link(root / "train/a/0.jpg", root / "train/b/9.jpg")
    with tarfile.open(tmp_path / "set.tar", "w") as tar:
        tar.add(root / "train", "train", filter=lambda member: None if member.name == "train/a/0.jpg" else member)
        tar.add(root / "val", "val")
    with pytest.raises(InputError, match=r"'train/b/9.jpg' is a hard link to 'train/a/0.jpg', which is not a file"):
        open_data(images(tmp_path / "set.tar"))


class Unmarked(zipfile.ZipInfo):
    """A member whose name is in UTF-8 without a word of it, as Finder and Info-ZIP write them."""

    def _encodeFilenameFlags(self):
        return self.filename.encode(), self.flag_bits & ~0x800


@pytest.mark.parametrize("maker", ["finder", "windows"])
def test_names_in_zips_are_read_as_unzip_reads_them(tmp_path, maker):
    files = Files().images(
        *(f"{split}/{c}/{i}.jpg" for split in ("train", "val") for c in ("été", "日本") for i in "01")
    )
    expected = [(data, path.split("/")[1]) for path, data in files.items()]
    with zipfile.ZipFile(tmp_path / "set.zip", "w") as file:
        for name, data in files.items():
            member = Unmarked(name) if maker == "finder" else zipfile.ZipInfo(name.replace("/", "\\"))
            member.create_system = 3 if maker == "finder" else 0
            file.writestr(member, data)
    known = {"kind": "folder in a zip", "classes": ("été", "日本"), "train": expected[:4], "val": expected[4:]}
    is_read(tmp_path / "set.zip", tmp_path, **known)


def test_any_set_one_folder_further_down(tmp_path):
    files, train, val = folder_set()
    for split in ("train", "val"):
        part = Files({path.removeprefix(f"{split}/"): data for path, data in files.items() if path.startswith(split)})
        (tmp_path / "set" / "default").mkdir(parents=True, exist_ok=True)
        part.zip(tmp_path / "set" / "default" / f"{split}.zip")
    is_read(tmp_path / "set", tmp_path, kind="zips", classes=("a", "b"), train=train, val=val)
    # What was made of an image folder may lie beside it.
    files.images("preview.jpg").folder(tmp_path / "set" / "images")
    assert recognise(tmp_path / "set").kind == "folder"


# --- tables


def of_table(root, name, content):
    """Two classes, listed by a table for each split: `content` makes its text of (path, label) rows."""
    files = Files().images(*(f"images/{i}.jpg" for i in range(4))).folder(root)
    rows = [(f"images/{i}.jpg", "cat" if i % 2 else "dog") for i in range(4)]
    for split, part in (("train", rows[:2]), ("val", rows[2:])):
        (files / name.replace("SPLIT", split)).write_text(content(part), encoding="utf-8", newline="")
    return files


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("SPLIT.csv", lambda rows: "path;label\r\n" + "".join(f"{p};{c}\r\n" for p, c in rows)),
        ("SPLIT.csv", lambda rows: "\ufeffpath\tlabel\n" + "".join(f"{p}\t{c}\n" for p, c in rows)),
        ("SPLIT.csv", lambda rows: "".join(f"{p};{c}\n" for p, c in rows)),
        ("SPLIT.csv", lambda rows: "path,label\n" + "".join(f'"{p}","{c}"\n' for p, c in rows) + ",\n  \n\n"),
        ("SPLIT.jsonl", lambda rows: "\r\n".join(json.dumps({"path": p, "label": c}) for p, c in rows)),
        (
            "SPLIT.jsonl",
            lambda rows: "\n".join(
                json.dumps({"path": p, "label": c, "text": "one\u2028two\x85"}, ensure_ascii=False) for p, c in rows
            ),
        ),
    ],
    ids=["semicolons", "tabs", "no header", "empty rows", "CRLF", "line separators"],
)
def test_tables_as_excel_and_others_write_them(tmp_path, name, content):
    train, val = open_data(images(of_table(tmp_path, name, content)))
    assert train.classes == ("cat", "dog")
    assert (train.labels.tolist(), val.labels.tolist()) == ([1, 0], [1, 0])
    assert train.read(0) == (tmp_path / "images/0.jpg").read_bytes()


@pytest.mark.parametrize("value", ["a\0b.jpg", "a\ud800.jpg"])
def test_a_path_that_no_file_can_have_is_told(tmp_path, value):
    root = of_table(tmp_path, "SPLIT.jsonl", lambda rows: json.dumps({"path": rows[0][0], "label": "dog"}))
    with open(root / "train.jsonl", "a") as file:
        file.write("\n" + json.dumps({"path": value, "label": "dog"}))
    assert "train.jsonl line 2 has a path that no file can have" in message(root)


def test_a_label_that_cannot_be_printed_is_told(tmp_path):
    root = of_table(tmp_path, "SPLIT.jsonl", lambda rows: json.dumps({"path": rows[0][0], "label": "d\ud800g"}))
    assert "train.jsonl line 1 has no path or no label" in message(root)


def test_a_table_with_a_split_column_beside_a_hidden_copy(tmp_path):
    Files().images("0.jpg", "1.jpg").folder(tmp_path)
    (tmp_path / "labels.csv").write_text("path,label,split\n0.jpg,a,train\n1.jpg,a,train\n")
    (tmp_path / "._labels.csv").write_bytes(b"\0\5\x16\7")
    assert "labels.csv has no row whose 'split' is val, only train; call some of them val" in message(tmp_path)


# --- labels and images of shards and parquet


def shards_of(root, sample, suffix="tar"):
    for split in ("train", "val"):
        members = Files()
        for number in range(4):
            members.update(sample(f"{number:04d}", number % 2))
        members.tar(root / f"{split}-000000.{suffix}")
    return root


@pytest.mark.parametrize("label", [None, [1], {"a": 1}, 0.5, float("nan"), " ", "\0"])
def test_what_is_no_label_becomes_no_class(tmp_path, label):
    shards_of(tmp_path, lambda key, c: {f"{key}.jpg": jpeg(c), f"{key}.json": json.dumps({"label": label}).encode()})
    assert "sample '0000' has no .cls, and no label in its .json" in message(tmp_path)
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "hub").mkdir()
    for split in ("train", "test"):
        table = pyarrow.table({"image": [jpeg(1), jpeg(2)], "label": [label, label]})
        parquet.write_table(table, tmp_path / "hub" / f"{split}.parquet")
    assert "train.parquet row 0 has no image or no label" in message(tmp_path / "hub")


def test_whole_numbers_that_pandas_made_floats_are_whole_numbers(tmp_path):
    shards_of(tmp_path, lambda key, c: {f"{key}.jpg": jpeg(c), f"{key}.json": b'{"label": %d.0}' % (10 - 8 * c)})
    assert open_data(images(tmp_path))[0].classes == ("2", "10")


def test_the_image_of_a_sample_is_not_its_mask(tmp_path):
    shards_of(tmp_path, lambda key, c: {f"{key}.mask.png": b"mask", f"{key}.jpg": jpeg(c), f"{key}.cls": b"%d" % c})
    train, _ = open_data(images(tmp_path))
    assert [train.read(i) for i in range(2)] == [jpeg(0), jpeg(1)]


def test_shards_written_on_a_mac(tmp_path):
    """tar of macOS puts ._NAME before each member that has attributes."""

    def sample(key, label):
        parts = {f"{key}.jpg": jpeg(label), f"{key}.cls": b"%d" % label}
        return {name: data for part, data in parts.items() for name, data in ((f"._{part}", b"x"), (part, data))}

    train, _ = open_data(images(shards_of(tmp_path, sample)))
    assert train.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("suffix", ["tar.gz", "tgz"])
def test_compressed_shards(tmp_path, suffix):
    shards_of(tmp_path, lambda key, c: {f"{key}.jpg": jpeg(c), f"{key}.cls": b"%d" % c}, suffix)
    train, val = open_data(images(tmp_path))
    assert [train.read(i) for i in range(4)] == [jpeg(0), jpeg(1)] * 2
    assert train.labels.tolist() == val.labels.tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("form", ["others' shards", "packed shards", "tars"])
def test_more_shards_than_files_may_be_open(tmp_path, form):
    for number in range(50):
        for split in ("train", "val"):
            files = Files({"0.jpg": jpeg(number), "0.cls": b"%d" % (number % 2)})
            if form == "tars":
                files = Files({f"{split}/{number % 2}/0.jpg": jpeg(number)})
            files.tar(tmp_path / f"{split}-{number:06d}.tar")
    if form == "packed shards":
        assert pack(tmp_path, tmp_path / "packed", shard_bytes=1).shards == 100
    expected = {jpeg(number) for number in range(50)}
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, limits[1]))
    try:
        train, _ = open_data(images(tmp_path / "packed" if form == "packed shards" else tmp_path))
        assert {train.read(i) for i in range(50)} == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_tar_with_sparse_files_is_refused(tmp_path):
    """Their bytes do not lie one after the other, and left out they would be missed by nobody."""
    files, _, _ = folder_set()
    with tarfile.open(tmp_path / "set.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, data in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(data)
            if name == "train/b/1.jpg":
                member.pax_headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "4096"}
                data = b"1\n0\n4\n".ljust(512, b"\0") + b"data"
                member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    assert "'train/b/1.jpg' is stored with holes, so write the tar without --sparse" in message(tmp_path / "set.tar")


def test_an_archive_that_was_asked_for_something_else_before(tmp_path, monkeypatch):
    """Its index is kept beside it, and a file of a layout may first have been given by itself."""
    monkeypatch.setattr(kept, "WORTH_KEEPING_BYTES", 0)
    shards_of(tmp_path, lambda key, c: {f"{key}.jpg": jpeg(c), f"{key}.cls": b"%d" % c})
    assert "has no train/ and val/ folders inside" in message(tmp_path / "train-000000.tar")
    assert open_data(images(tmp_path))[0].labels.tolist() == [0, 1, 0, 1]
    inner = {f"{wnid}.tar": Files().images(f"{wnid}_0.JPEG", f"{wnid}_1.JPEG") for wnid in ("n01", "n02")}
    (tmp_path / "official").mkdir()
    tars = Files({name: part.tar(tmp_path / "official" / name).read_bytes() for name, part in inner.items()})
    path = tars.tar(tmp_path / "official" / "ILSVRC2012_img_train.tar")
    assert "has no train/ and val/ folders inside" in message(path)
    train = recognise(tmp_path / "official").open("train")
    assert (train.classes, train.labels.tolist()) == (("n01", "n02"), [0, 0, 1, 1])


# --- packing


def test_files_of_any_name_are_packed_under_their_own_kind(tmp_path):
    names = ["no ending", "photo.jpg?ixlib=" + "a" * 150, "x.été", "y.cls", "z.JPG", "no image.php"]
    for name in names:
        (tmp_path / name).write_bytes(b"text" if name.endswith("php") else jpeg(len(name)))
    for split in ("train", "val"):
        (tmp_path / f"{split}.csv").write_text("path,label\n" + "".join(f"{name},a\n" for name in names))
    pack(tmp_path, tmp_path / "packed")
    with tarfile.open(tmp_path / "packed" / "val-000000.tar") as tar:
        assert sorted(name.partition(".")[2] for name in tar.getnames()) == ["bin"] + 6 * ["cls"] + 5 * ["jpg"]
    (tmp_path / "no image.php").unlink()
    assert verify(tmp_path / "packed").problem_count == 2  # the text, once in each split


def test_a_set_is_not_packed_among_its_own_images(tmp_path):
    root = folder_set()[0].folder(tmp_path / "set")
    with pytest.raises(InputError, match=r"lies among the images of .*train; give an empty folder elsewhere"):
        pack(root, root / "train" / "packed")
    assert not (root / "train" / "packed").exists()
    assert pack(root, root / "packed").samples == 8
    assert recognise(root).kind == "folder"
