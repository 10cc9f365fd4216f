"""Damaged files give one line that names them, or the right data; never other labels, other samples or a traceback."""

import gzip
import io
import tarfile
import zipfile

import numpy as np
import pytest
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data.pack import pack
from hyperbatch.data.source import BadSample, open_data
from hyperbatch.data.verify import verify
from hyperbatch.errors import InputError

MUTATIONS = 300


def mutated(data, rng):
    """One kind of damage: bits, bytes, zeros, a cut, a hole, something in between, or blocks twice."""
    data, kind = bytearray(data), rng.integers(8)
    place, length = int(rng.integers(len(data))), int(rng.integers(1, 600))
    if kind == 0:
        data[place] ^= 1 << int(rng.integers(8))
    elif kind == 1:
        data[place] = int(rng.integers(256))
    elif kind == 2:
        data[place : place + length] = bytes(min(length, len(data) - place))
    elif kind == 3:
        del data[place:]
    elif kind == 4:
        del data[place : place + length]
    elif kind == 5:
        data[place:place] = rng.bytes(length)
    elif kind == 6:  # a lost write: a sector of zeros
        start = place // 512 * 512
        data[start : start + 512] = bytes(min(512, len(data) - start))
    else:  # a digit, a bracket, a quote: what text is made of
        data[place] = b'0123456789[]{}",:-eE '[int(rng.integers(21))]
    return bytes(data)


@pytest.fixture
def src(tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        for name in ("ant", "cow"):
            (tmp_path / "src" / split / name).mkdir(parents=True)
            for i in range(4):
                pixels = Image.fromarray(rng.integers(0, 256, (9, 8 + i, 3), dtype=np.uint8))
                pixels.save(tmp_path / "src" / split / name / f"{i}.jpg")
    return tmp_path / "src"


def opened(folder):
    return open_data(DataConfig(dataset="images", data=str(folder)))


def one_line(error, folder):
    text = str(error)
    assert "\n" not in text
    assert str(folder) in text


def samples(source):
    """(where, label, bytes); None for those that are known to be bad."""
    found = []
    for i in range(len(source)):
        try:
            data = source.read(i)
        except BadSample as error:
            one_line(error, "")
            data = None
        found.append((source.describe(i).rpartition("/")[2], source.classes[source.labels[i]], data))
    return found


@pytest.mark.parametrize("name", ["manifest.json", "train-000000.index.npy", "train-000000.names", "train-000000.tar"])
def test_a_damaged_packed_set(src, tmp_path, name):
    dst = tmp_path / "dst"
    pack(src, dst)
    right, whole = [samples(source) for source in opened(dst)], (dst / name).read_bytes()
    rng = np.random.default_rng(1)
    refused = 0
    for _ in range(MUTATIONS):
        (dst / name).write_bytes(mutated(whole, rng))
        try:
            now = [samples(source) for source in opened(dst)]
        except InputError as error:
            one_line(error, dst)
            refused += 1
        else:
            for before, after in zip(right, now, strict=True):
                for (_, label, data), (_, label_now, data_now) in zip(before, after, strict=True):
                    assert label_now == label
                    assert data_now in (data, None)
        try:
            report = verify(dst)
            assert report.ok or all("\n" not in line for line in report.problems)
        except InputError as error:
            one_line(error, dst)
    assert refused > MUTATIONS // 3 or name.endswith((".names", ".tar"))
    (dst / name).write_bytes(whole)
    assert verify(dst).ok


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz"])
def test_a_damaged_tar(src, tmp_path, suffix):
    """A plain tar has no checksum of what is in it, so damage in an image shows there, and only there."""
    folder = tmp_path / "tars"
    folder.mkdir()
    mode = {"tar": "w", "tar.gz": "w:gz", "tar.xz": "w:xz"}[suffix]
    for split in ("train", "val"):
        with tarfile.open(folder / f"{split}.{suffix}", mode, format=tarfile.USTAR_FORMAT) as tar:
            tar.add(src / split, split)
    path = folder / f"train.{suffix}"
    right, whole = samples(opened(folder)[0]), path.read_bytes()
    rng = np.random.default_rng(2)
    refused = 0
    for _ in range(MUTATIONS):
        path.write_bytes(mutated(whole, rng))
        try:
            now = samples(opened(folder)[0])
        except InputError as error:
            one_line(error, folder)
            refused += 1
            continue
        assert [sample[:2] for sample in now] == [sample[:2] for sample in right]
        if suffix != "tar":
            assert now == right
        else:
            assert [len(sample[2]) for sample in now] == [len(sample[2]) for sample in right]
            assert sum(ours != theirs for ours, theirs in zip(now, right, strict=True)) <= 2
    assert refused > MUTATIONS // 3


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_a_damaged_zip(src, tmp_path, method):
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w", method) as file:
        for image in sorted(src.rglob("*.jpg")):
            file.write(image, image.relative_to(src))
    right, whole = [samples(source) for source in opened(path)], path.read_bytes()
    directory = whole.index(b"PK\1\2")
    rng = np.random.default_rng(3)
    for turn in range(MUTATIONS):
        # Every other one in the directory, which has the names and no checksum.
        kept = directory if turn % 2 else 0
        path.write_bytes(whole[:kept] + mutated(whole[kept:], rng))
        try:
            now = [samples(source) for source in opened(path)]
        except InputError as error:
            one_line(error, path)
            continue
        for before, after in zip(right, now, strict=True):
            for (*where, data), (*where_now, data_now) in zip(before, after, strict=True):
                assert where_now == where
                assert data_now in (data, None)


def test_a_gz_whose_content_is_no_tar(tmp_path):
    for split in ("train", "val"):
        (tmp_path / f"{split}.tar.gz").write_bytes(gzip.compress(b"x" * 3000))
    with pytest.raises(InputError, match=r"train\.tar\.gz cannot be read as a tar"):
        opened(tmp_path)
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w"):
        pass
    (tmp_path / "train.tar.gz").write_bytes(gzip.compress(buffer.getvalue()))
    with pytest.raises(InputError, match="has no members named"):
        opened(tmp_path)
