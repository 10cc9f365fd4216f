"""Small sets in any layout, and the checks that every layout must pass."""

import io
import tarfile
import zipfile

import pytest
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data.pack import info, pack
from hyperbatch.data.source import check_data, open_data
from hyperbatch.errors import InputError


def jpeg(value):
    buffer = io.BytesIO()
    Image.new("RGB", (12, 8), (value, 255 - value, value // 2)).save(buffer, "JPEG", quality=100)
    return buffer.getvalue()


class Files(dict):
    """path -> bytes, each image another, written as a folder, a zip or a tar."""

    def images(self, *paths):
        for path in paths:
            self[path] = jpeg(7 * len(self) % 256)
        return self

    def folder(self, root):
        for path, data in self.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return root

    def zip(self, path, method=zipfile.ZIP_STORED):
        with zipfile.ZipFile(path, "w", method) as file:
            for name, data in self.items():
                file.writestr(name, data)
        return path

    def tar(self, path):
        with tarfile.open(path, "w:gz" if path.name.endswith("gz") else "w") as tar:
            for name, data in self.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        return path


def images(path, **fields):
    return DataConfig(dataset="images", data=str(path), **fields)


def is_read(path, tmp_path, *, kind, classes, train, val):
    """train, val: (bytes, class) of every sample in order. Holds for opening, counting, describing and packing."""
    opened = open_data(images(path))
    for source, expected in zip(opened, (train, val), strict=True):
        assert source.classes == tuple(classes)
        assert [(source.read(i), classes[source.labels[i]]) for i in range(len(source))] == expected
        assert source.sizes_bytes().tolist() == [len(data) for data, _ in expected]
        places = source.locations(list(range(len(source))))
        for i, place in enumerate(places or ()):
            with open(place.path, "rb") as file:
                file.seek(place.offset)
                assert file.read(place.length) == source.read(i)
        assert source.image(0).shape == (8, 12, 3)
    assert check_data(images(path)).to_dict() == {
        "train_samples": len(train),
        "eval_samples": len(val),
        "classes": len(classes),
        "channels": 3,
    }
    described = info(path)
    assert (described.kind, described.class_names) == (kind, list(classes))
    pack(path, tmp_path / "packed")
    for source, expected in zip(open_data(images(tmp_path / "packed")), (train, val), strict=True):
        assert source.classes == tuple(classes)
        found = [(source.read(i), classes[source.labels[i]]) for i in range(len(source))]
        assert sorted(found) == sorted(expected)
    return opened


def message(path):
    with pytest.raises(InputError) as caught:
        check_data(images(path))
    text = str(caught.value)
    assert "\n" not in text
    return text


def folder_set(val="val", prefix=""):
    """(files, train, val) of two classes."""
    files = Files().images(*(f"{prefix}{split}/{c}/{i}.jpg" for split in ("train", val) for c in "ab" for i in (0, 1)))
    expected = [(data, path.split("/")[-2]) for path, data in files.items()]
    return files, expected[:4], expected[4:]


@pytest.fixture
def cache(tmp_path_factory, monkeypatch):
    """The cache folder of this test alone."""
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder / "hyperbatch"
