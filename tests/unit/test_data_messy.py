"""Sets as other people's tools leave them: hidden copies, hard links, names in other encodings, odd tables."""

import os
import tarfile
import zipfile

import pytest
from layout_files import Files, cache, folder_set, images, is_read, jpeg

from hyperbatch.data.source import open_data

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
