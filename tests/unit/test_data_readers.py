"""Readers for a GPU: which JPEGs the CPU decodes beside it, and that threads and processes hand on the same."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from photos import without_codes
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data import decoders
from hyperbatch.data.batch import BatchPlan
from hyperbatch.data.decode import decode_full, gpu_can_decode
from hyperbatch.data.gpu import reader_pool, reading
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.gpu.reading import ProcessReaders, SampleReader, ThreadReaders
from hyperbatch.data.meter import Meter
from hyperbatch.data.source import EncodedSource, open_data

SAMPLES = 40
FOREIGN, RAW, CUT_OFF, WITHOUT_CODES, LARGE = 3, 11, 17, 23, 27  # the last two are the CPU's, of half of them


def encoded(index, width, height, format="JPEG"):
    rng = np.random.default_rng(index)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    file = io.BytesIO()
    coarse.resize((width, height), Image.Resampling.BICUBIC).save(file, format)
    return file.getvalue()


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """JPEGs of many sizes; among them a PNG, plain pixels, a cut-off one, a broken one and a large one."""
    tree = tmp_path_factory.mktemp("tree")
    files = [encoded(i, 60 + i, 90 - i) for i in range(SAMPLES)]
    files[FOREIGN] = encoded(FOREIGN, 50, 40, "PNG")
    files[RAW] = encoded(RAW, 50, 40, "PPM")
    files[CUT_OFF] = files[CUT_OFF][:300]
    files[WITHOUT_CODES] = without_codes(files[WITHOUT_CODES])
    files[LARGE] = encoded(LARGE, 1100, 1000)
    for split in ("train", "val"):
        (tree / split / "a").mkdir(parents=True)
        for i, data in enumerate(files):
            (tree / split / "a" / f"{i:02}.{'ppm' if i == RAW else 'jpg'}").write_bytes(data)
    return open_data(DataConfig(data=str(tree)))[0]


def reader(source, share, *, on_gpu=True):
    return SampleReader(
        source=source,
        on_gpu=on_gpu,
        cpu_share=share,
        decoder="pillow",
        pin=False,
        meter=Meter(),
        threads=2,
        host_cache=None,
        device_cache=None,
    )


def plan(ids):
    return BatchPlan(ids=ids, epochs=np.zeros_like(ids), uniforms=np.zeros((len(ids), 9)), size=8, padding=0)


def handed_on(readers, ids):
    """({row: what its file holds}, {row: its pixels}, {row: the sample that replaces it}, unreadable samples)."""
    files, pixels, replaced, bad = {}, {}, {}, []
    for promise in readers.submit(plan(ids), np.arange(len(ids))):
        read = promise()
        for part in read.files:
            files |= {row: data.numpy().tobytes() for row, data in zip(part.rows.tolist(), part.contents())}
        for block in read.blocks:
            for row, (offset, width, height) in zip(block.rows.tolist(), block.places.tolist()):
                image = block.pixels[offset : offset + 3 * width * height].view(height, width, 3)
                pixels[row] = image.numpy().tobytes()
        replaced |= read.replaced
        bad += [index for index, _ in read.bad]
    return files, pixels, replaced, sorted(bad)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9])
def test_the_sample_decides_and_its_share_is_kept(source, share):
    ids = np.random.default_rng(0).permutation(50_000)
    chosen = reader(source, share).cpu_pixels(ids) > 0
    assert chosen.mean() == pytest.approx(share, abs=0.01)
    one_by_one = [reader(source, share).cpu_pixels(ids[i : i + 1])[0] > 0 for i in range(100)]
    assert chosen[:100].tolist() == one_by_one
    # Neither in each batch's order nor in the order of the set.
    assert (chosen[1:] & chosen[:-1]).mean() == pytest.approx(share**2, abs=0.01)
    more = reader(source, min(1.0, share + 0.05)).cpu_pixels(ids) > 0
    assert more[chosen].all()


def test_the_cpus_samples_are_pinned():
    """Other ones would change the pixels of a run that is continued."""
    chosen = np.flatnonzero(reader(None, 0.3).cpu_pixels(np.arange(40)))
    assert chosen.tolist() == [5, 6, 7, 15, 17, 23, 27, 32, 35, 39]


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("workers", [1, 3])
def test_processes_hand_on_what_threads_do(source, share, workers):
    made = reader(source, share)
    threads, processes = ThreadReaders(made), ProcessReaders(made, workers, slots=2)
    chosen = made.cpu_pixels(np.arange(SAMPLES)) > 0
    try:
        for seed in range(3):  # more than there are slots
            ids = np.random.default_rng(seed).permutation(SAMPLES)
            expected = handed_on(threads, ids)
            assert handed_on(processes, ids) == expected
            files, pixels, replaced, bad = expected
            shown = ids.copy()
            shown[list(replaced)] = list(replaced.values())
            assert {*files} | {*pixels} == set(range(SAMPLES))
            for row, index in enumerate(shown.tolist()):
                data = source.read(index)
                on_cpu = not gpu_can_decode(data) or (chosen[index] and index != LARGE)
                held = decode_full(data, "").tobytes() if on_cpu else data
                assert (pixels if on_cpu else files)[row] == held
            # A broken file that looks whole is found by the CPU here, or by the GPU later.
            assert bad == sorted({CUT_OFF, WITHOUT_CODES} if chosen[WITHOUT_CODES] else {CUT_OFF})
    finally:
        threads.close()
        processes.close()


@pytest.mark.parametrize(("on_gpu", "share"), [(True, 0.0), (True, 0.9), (False, 0.0)])
def test_slots_hold_what_is_decoded(tmp_path, on_gpu, share, monkeypatch):
    """What finds no room is read by the parent, whose time is the batch's: of images of one size that is none."""
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(16):
            (tmp_path / split / "a" / f"{i:02}.jpg").write_bytes(encoded(i, 500, 375))
    files = open_data(DataConfig(data=str(tmp_path)))[0]
    processes = ProcessReaders(reader(files, share, on_gpu=on_gpu), 1, slots=1)
    monkeypatch.setattr(SampleReader, "_load", lambda self, index: pytest.fail("read by the parent"))
    reader_pool.close_idle()  # whose slots may be larger
    try:
        found, pixels, _, bad = handed_on(processes, np.arange(16))
        assert len(found) + len(pixels) == 16
        assert len(pixels) == np.count_nonzero(reader(files, share, on_gpu=on_gpu).cpu_pixels(np.arange(16)))
        assert not bad
    finally:
        processes.close()


def test_what_finds_no_room_is_decoded_by_the_parent(source, monkeypatch):
    monkeypatch.setattr(reading, "_ROOM", 0)  # and so a slot of 1 MB
    monkeypatch.setattr(reading, "_CPU_PIXELS", 1 << 21)
    reader_pool.close_idle()
    processes = ProcessReaders(reader(source, 0.99), 1, slots=1)
    try:
        files, pixels, _, bad = handed_on(processes, np.full(8, LARGE))
        assert (len(files), len(pixels), bad) == (0, 8, [])
        assert set(pixels.values()) == {decode_full(source.read(LARGE), "").tobytes()}
    finally:
        processes.close()


@pytest.mark.parametrize(("decoder", "share", "workers"), [("nvjpeg", 0, 8), ("nvjpeg", 0.3, 12), ("pillow", 0.3, 16)])
def test_more_processes_read_where_they_decode(source, decoder, share, workers):
    config = DataConfig(data_threads=16, cpu_decode_share=share)
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "decoder": decoder, "cpu_decoder": "pillow"}
    readers = DeviceMaker(source, config, processes=True, **options)._readers()
    assert isinstance(readers, ProcessReaders)
    assert readers._workers == workers
    # A share of which nothing is left to the GPU changes nothing.
    chosen = np.count_nonzero(readers._reader.cpu_pixels(np.arange(1000)))
    assert chosen == (1000 if decoder == "pillow" else pytest.approx(1000 * share, abs=50))


class Elsewhere(EncodedSource):
    """A set whose samples only this process can read."""

    def __init__(self, samples):
        super().__init__("elsewhere", ("a",), np.zeros(samples, dtype=np.int64))


class OnDisk(Elsewhere):
    def locations(self, ids):
        return []


def test_auto_takes_a_share_only_where_processes_and_cores_can_decode_it():
    def share(source, measured="nvjpeg", **values):
        config = DataConfig(**{"data_threads": 8, **values})
        return decoders.cpu_decode_share(source, config, measured if config.decoder == "auto" else config.decoder)

    disk = OnDisk(3000)
    assert share(disk) == 0.3
    assert share(disk, data_threads=7) == 0
    assert share(disk, "pillow") == 0
    assert share(Elsewhere(3000)) == 0
    assert share(OnDisk(2000)) == 0
    # The GPU's decoder, asked for by name, decodes alone, unless a share is asked for as well.
    assert share(disk, decoder="nvjpeg") == 0
    assert share(Elsewhere(10), decoder="nvjpeg", cpu_decode_share=0.5, data_threads=1) == 0.5
    assert share(disk, cpu_decode_share=0.0) == 0
    assert share(disk, decoder="pillow", cpu_decode_share=0.5) == 0
