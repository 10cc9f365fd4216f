"""A JPEG is decoded down to the last row that a crop needs: the same pixels as from all of it."""

import io
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbatch.data import decode
from hyperbatch.data.augment import View
from hyperbatch.data.resize import mirrored, read_backwards, resize_box
from hyperbatch.data.source import BadSample

simplejpeg = pytest.importorskip("simplejpeg")


def photograph(width, height):
    rng = np.random.default_rng(width)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8, width // 8, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


def jpeg(image, **options):
    file = io.BytesIO()
    image.save(file, "JPEG", quality=90, **options)
    return file.getvalue()


def view(data, box, size=96, **more):
    return decode.decode_view(data, "here", lambda w, h: View(box, **more), size, decoder="simplejpeg", exact=False)


@pytest.fixture
def decoded_rows(monkeypatch):
    """The heights that were decoded."""
    rows, original = [], simplejpeg.decode_jpeg

    def watched(*values, **options):
        pixels = original(*values, **options)
        rows.append(pixels.shape[0])
        return pixels

    monkeypatch.setattr(decode.simplejpeg, "decode_jpeg", watched)
    return rows


KINDS = {
    "4:2:0": {"subsampling": 2},
    "4:2:2": {"subsampling": 1},
    "4:4:4": {"subsampling": 0},
    "restart markers": {"subsampling": 2, "restart_marker_blocks": 3},
    "other tables": {"subsampling": 2, "optimize": True},
    "with a comment": {"comment": b"\xff\xc0" * 40, "exif": b"Exif\0\0" + b"\xff\xda" * 30},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bottom", [40, 64, 113.5, 160, 190])
def test_the_pixels_are_those_of_the_whole_image(kind, bottom, decoded_rows):
    data = jpeg(photograph(240, 200), **KINDS[kind])
    box = (17.0, 5.0, 181.0, bottom)
    ours = view(bytearray(data), box)
    np.testing.assert_array_equal(ours, view(data, box))  # what is not ours to change is decoded as it is
    assert decoded_rows == [min(200, int(np.ceil(bottom)) + 2), 200]


def test_grey_images(decoded_rows):
    data = jpeg(photograph(240, 200).convert("L"))
    np.testing.assert_array_equal(view(bytearray(data), (0, 0, 100, 90)), view(data, (0, 0, 100, 90)))
    assert decoded_rows == [92, 200]


@pytest.mark.parametrize("colors", ["444", "422", "420", "440", "411", "Gray"])
def test_two_more_rows_are_enough_at_every_edge_and_scale(colors):
    """Noise, so that each colour differs from its neighbours; all edges, so that those of blocks are among them."""
    width, height = 40, 70
    noise = np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)
    form = {"colorspace": "Gray"} if colors == "Gray" else {"colorsubsampling": colors}
    data = simplejpeg.encode_jpeg(noise[:, :, :1].copy() if colors == "Gray" else noise, 90, **form)
    buffer = np.empty(noise.size, np.uint8)
    for eighths in (1, 2, 3, 4, 8):
        whole = decode._upper_rows(data, eighths, width, height, height, buffer, "RGB")[0].copy()
        for bottom in range(1, height):
            rows = bottom + -(-16 // eighths)
            upper, _ = decode._upper_rows(bytearray(data), eighths, width, height, rows, buffer, "RGB")
            needed = -(-bottom * eighths // 8)
            np.testing.assert_array_equal(upper[:needed], whole[:needed])
            assert len(upper) <= needed + 3


@pytest.mark.parametrize("size", [32, 64, 100, 200])
@pytest.mark.parametrize("shape", [(801, 1203), (1203, 801)])
def test_large_images_are_decoded_at_the_same_scale(size, shape, decoded_rows):
    data = jpeg(photograph(*shape))
    box = (100, 50, 600, 560)
    np.testing.assert_array_equal(view(bytearray(data), box, size), view(data, box, size))
    upper, whole = decoded_rows
    assert upper < whole
    assert round(8 * upper / 576) == round(8 * whole / shape[1])


def test_progressive_images_are_decoded_whole(decoded_rows):
    data = jpeg(photograph(240, 200), progressive=True)
    np.testing.assert_array_equal(view(bytearray(data), (0, 0, 100, 90)), view(data, (0, 0, 100, 90)))
    assert decoded_rows == [200, 200]


def test_the_file_is_left_as_it_was():
    data = jpeg(photograph(240, 200))
    ours = bytearray(data)
    view(ours, (0, 0, 100, 90))
    assert ours == data


def outcome(data):
    try:
        return view(data, (0, 0, 100, 90)).tobytes()
    except BadSample as error:
        return str(error)


def test_damaged_files_are_judged_as_before():
    """Cut off, or with bytes that changed: the pixels, or the line that says why there are none, stay the same."""
    data = jpeg(photograph(240, 200))
    rng = np.random.default_rng(0)
    for length in (len(data) - 1, len(data) - 2, len(data) // 2, 700, 30):
        assert outcome(bytearray(data[:length])) == outcome(data[:length])
    assert "truncated" in outcome(bytearray(data[: len(data) // 2]))
    assert outcome(bytearray(data + b"\0\0")) == outcome(data + b"\0\0")
    refused = 0
    for _ in range(60):
        changed = bytearray(data)
        changed[int(rng.integers(2, 640))] = int(rng.integers(0, 256))  # in the headers and tables
        ours, before = outcome(changed), outcome(bytes(changed))
        assert isinstance(ours, str) == isinstance(before, str)
        refused += isinstance(ours, str)
    assert 0 < refused < 60


@pytest.mark.parametrize("size", [7, 54, 100, 224, 300])
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_a_mirrored_view_is_the_view_from_right_to_left(size, mode):
    """Of files, which are then decoded as BGR, and of pixels."""
    image, box = photograph(240, 200).convert(mode), (17.0, 5.0, 181.0, 190.0)
    file = bytearray(jpeg(image))
    np.testing.assert_array_equal(view(file, box, size, flip=True), view(file, box, size)[:, ::-1])
    pixels = np.asarray(image.convert("RGB"))
    plain, turned = (
        decode.resized_view(pixels, View(box, flip=flip), size, full_size=image.size) for flip in (False, True)
    )
    np.testing.assert_array_equal(turned, plain[:, ::-1])


@pytest.mark.skipif(sys.platform != "linux", reason="counts the threads that Linux lists")
def test_views_start_no_threads_of_torch():
    """Each of the loader's threads would get as many as there are cores, which spin between two images."""

    def threads_started():
        torch.set_num_threads(2)  # as if nobody had said OMP_NUM_THREADS=1
        counts = [len(os.listdir("/proc/self/task"))]
        resized = lambda pixels: resize_box(pixels, (3, 0, 384, 384), 300)  # noqa: E731
        for change in (resized, mirrored, read_backwards, lambda pixels: torch.from_numpy(pixels).flip(1)):
            change(pixels)
            counts.append(len(os.listdir("/proc/self/task")))
        return np.diff(counts).tolist()

    pixels, before = np.zeros((384, 384, 3), np.uint8), torch.get_num_threads()
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(threads_started).result() == [0, 0, 0, 1]
    finally:
        torch.set_num_threads(before)
