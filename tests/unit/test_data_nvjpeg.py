"""The caller of nvJPEG against a library that decodes on the CPU, behind the same C signatures: what is written where,
in which order, and what happens to files that it does not take or that are broken."""

from __future__ import annotations

import ctypes
import io
import threading
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_void_p

import numpy as np
import pytest
import torch
from photos import without_codes
from PIL import Image

from hyperbatch.data.decode import decode_full, gpu_frame
from hyperbatch.data.gpu import hardware, nvjpeg
from hyperbatch.data.gpu.hardware import Api, HardwareDecoder
from hyperbatch.data.gpu.jpegs import JpegFiles
from hyperbatch.data.source import BadSample

CPU = torch.device("cpu")
SUCCESS, BAD_JPEG, ARCH_MISMATCH = 0, 3, 7  # nvjpegStatus_t
HARDWARE, RGB = 3, 3  # nvjpegBackend_t, nvjpegOutputFormat_t
SENTINEL = 0xA5


class Library:
    """nvJPEG's functions, as C functions. Baseline files are supported; the scan decides whether one is broken."""

    def __init__(self, *, create_status=SUCCESS, decode_status=SUCCESS):
        self.batches, self.asked, self.header, self.sizes = [], 0, b"", {}
        self.create_status, self.decode_status = create_status, decode_status
        self._lock = threading.Lock()
        out, array = POINTER(c_void_p), c_void_p
        signatures = {
            "nvjpegCreateEx": (c_int, c_void_p, c_void_p, c_uint, out),
            "nvjpegJpegStateCreate": (c_void_p, out),
            "nvjpegJpegStreamCreate": (c_void_p, out),
            "nvjpegJpegStreamParseHeader": (c_void_p, c_void_p, c_size_t, c_void_p),
            "nvjpegDecodeBatchedSupported": (c_void_p, c_void_p, POINTER(c_int)),
            "nvjpegDecodeBatchedPreAllocate": (c_void_p, c_void_p, *(5 * [c_int])),
            "nvjpegDecodeBatchedInitialize": (c_void_p, c_void_p, c_int, c_int, c_int),
            "nvjpegDecodeBatched": (c_void_p, c_void_p, array, array, array, c_void_p),
        }
        for name, arguments in signatures.items():
            setattr(self, name, CFUNCTYPE(c_int, *arguments)(getattr(self, "_" + name)))

    def _nvjpegCreateEx(self, backend, device_allocator, pinned_allocator, flags, handle):
        handle[0] = 1000
        fits = (backend, device_allocator, pinned_allocator, flags) == (HARDWARE, None, None, 0)
        return self.create_status if fits else 2

    def _nvjpegJpegStateCreate(self, handle, state):
        state[0] = 2000 + len(self.sizes)
        self.sizes[state[0]] = 0
        return SUCCESS

    def _nvjpegJpegStreamCreate(self, handle, stream):
        stream[0] = 3000
        return SUCCESS

    def _nvjpegJpegStreamParseHeader(self, handle, data, length, stream):
        self.asked += 1
        self.header = ctypes.string_at(data, length)
        return BAD_JPEG if b"broken header" in self.header else SUCCESS

    def _nvjpegDecodeBatchedSupported(self, handle, stream, supported):
        assert stream == 3000
        supported[0] = 0 if b"\xff\xc0" in self.header else 1
        return SUCCESS

    def _nvjpegDecodeBatchedPreAllocate(self, handle, state, batch, width, height, sampling, form):
        return SUCCESS

    def _nvjpegDecodeBatchedInitialize(self, handle, state, batch, threads, form):
        self.sizes[state] = batch
        return SUCCESS if (handle, form) == (1000, RGB) else 2

    def _nvjpegDecodeBatched(self, handle, state, addresses, lengths, destinations, stream):
        n = self.sizes[state]
        address_of, length_of = ((c_size_t * n).from_address(place) for place in (addresses, lengths))
        places = np.ctypeslib.as_array((c_size_t * (8 * n)).from_address(destinations)).reshape(n, 8)
        with self._lock:
            self.batches.append(n)
        for i in range(n):
            try:
                pixels = decode_full(ctypes.string_at(address_of[i], length_of[i]), "")
            except BadSample:
                return BAD_JPEG
            assert places[i, [3, 7]].tolist() == [0, 0]  # no fourth plane
            for plane in range(3):
                for y, line in enumerate(np.ascontiguousarray(pixels[:, :, plane])):
                    ctypes.memmove(int(places[i, plane] + y * places[i, 4 + plane]), line.tobytes(), line.size)
        return self.decode_status


def jpeg(width, height, seed=0, mode="RGB", **options):
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).convert(mode)
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", **options)
    return buffer.getvalue()


def files_of(contents):
    """In two pieces of memory, as from two readers, for rows in another order."""
    rows = np.random.default_rng(0).permutation(len(contents)).tolist()
    files = [(row, (bytearray(data), gpu_frame(data))) for row, data in zip(rows, contents, strict=True)]
    parts = [part for part in (dict(files[:3]), dict(files[3:])) if part]
    joined = JpegFiles.join([JpegFiles.collect(part, pin=False) for part in parts])
    assert joined.rows.tolist() == rows
    return joined


def decoder_of(library, **options):
    return HardwareDecoder(Api(library, library), CPU, **options)


@pytest.fixture
def by_torchvision(monkeypatch):
    """Stands for torchvision's decoder; the batches it was given."""
    batches = []

    def decode_batch(files, device):
        batches.append(len(files))
        try:
            found = [decode_full(file.numpy().tobytes(), "") for file in files]
        except BadSample as error:
            raise RuntimeError("Error while decoding JPEG images") from error
        return [torch.from_numpy(pixels.transpose(2, 0, 1).copy()) for pixels in found]

    monkeypatch.setattr(nvjpeg, "decode_batch", decode_batch)
    return batches


def same_pixels(decoded, contents):
    assert len(decoded.images) == len(contents)
    for i, data in enumerate(contents):
        expected = decode_full(data, "")
        assert torch.equal(decoded.pixels(i), torch.from_numpy(expected.transpose(2, 0, 1).copy()))
        height, width, _ = expected.shape
        assert decoded.images[i, 1:].tolist() == [width, height, 1, width, width * height]


MIXED = [
    jpeg(40, 30, 1),
    jpeg(41, 31, 2, subsampling=0),
    jpeg(50, 20, 3, progressive=True),
    jpeg(17, 1, 4),
    jpeg(33, 45, 5, mode="L"),
    jpeg(8, 9, 6, progressive=True),
    jpeg(1, 1, 7),
]


@pytest.mark.parametrize("callers", [1, 2, 9])
def test_each_file_is_decoded_into_its_place(by_torchvision, callers):
    library = Library()
    decoder = decoder_of(library, callers=callers)
    same_pixels(nvjpeg.decode_with(decoder, files_of(MIXED), CPU), MIXED)
    assert by_torchvision == [2]  # the progressive ones
    assert sum(library.batches) == 5
    assert len(library.batches) == min(callers, 5)


def test_each_kind_and_size_is_asked_for_once(by_torchvision):
    library = Library()
    decoder = decoder_of(library)
    contents = [jpeg(40, 30, seed) for seed in range(4)] + [jpeg(40, 30, 9, subsampling=0), jpeg(30, 40, 9)]
    for _ in range(2):
        same_pixels(nvjpeg.decode_with(decoder, files_of(contents), CPU), contents)
    assert library.asked == 3
    assert by_torchvision == []


def test_a_broken_header_says_nothing_of_other_files(by_torchvision):
    library = Library()
    decoder = decoder_of(library)
    contents = [jpeg(40, 30, 0, comment=b"broken header"), jpeg(40, 30, 1)]
    same_pixels(nvjpeg.decode_with(decoder, files_of(contents), CPU), contents)
    assert (by_torchvision, library.batches) == ([1], [1])


@pytest.mark.parametrize("piece_bytes", [1 << 12, 1 << 13, 1 << 25])
def test_images_do_not_touch_what_lies_between_them(monkeypatch, by_torchvision, piece_bytes):
    """Memory in several pieces, one image larger than any, and no byte written outside the images."""
    monkeypatch.setattr(hardware, "_PIECE_BYTES", piece_bytes)
    contents = [jpeg(width, 20, width) for width in (13, 30, 31, 200, 30, 29, 30, 31)]
    files = files_of(contents)
    blank = hardware.room_for

    def marked(sizes, device):
        room = blank(sizes, device)
        for piece in room.memory:
            piece.fill_(SENTINEL)
        return room

    monkeypatch.setattr(hardware, "room_for", marked)
    decoded = nvjpeg.decode_with(decoder_of(Library()), files, CPU)
    same_pixels(decoded, contents)
    assert len(decoded.memory) == {1 << 12: 5, 1 << 13: 3, 1 << 25: 1}[piece_bytes]
    for i in range(len(contents)):
        decoded.pixels(i).fill_(SENTINEL)
    for piece in decoded.memory:
        assert (piece == SENTINEL).all()


def test_pieces_are_of_few_sizes():
    """Whatever is decoded: torch's allocator then has them ready."""
    rng = np.random.default_rng(0)
    large = {len(p) for _ in range(20) for p in hardware.room_for(rng.integers(300, 600, (100, 2)), CPU).memory}
    small = {len(p) for _ in range(20) for p in hardware.room_for(rng.integers(300, 600, (10, 2)), CPU).memory}
    assert large == {1 << 25}
    assert small <= {1 << 22, 1 << 23, 1 << 24}


@pytest.mark.parametrize("callers", [1, 3])
def test_one_broken_file_fails_the_batch(by_torchvision, callers):
    """As torchvision does: whoever asked tries each alone then."""
    contents = [*MIXED[:2], without_codes(jpeg(40, 30)), *MIXED[3:5]]
    decoder, files = decoder_of(Library(), callers=callers), files_of(contents)
    with pytest.raises(RuntimeError, match="decoding JPEG"):
        nvjpeg.decode_with(decoder, files, CPU)
    assert by_torchvision == [5]
    for i in (0, 1, 3, 4):
        same_pixels(nvjpeg.decode_with(decoder, files.take([i]), CPU), contents[i : i + 1])
    with pytest.raises(RuntimeError):
        nvjpeg.decode_with(decoder, files.take([2]), CPU)


def test_where_the_units_fail_torchvision_decodes(by_torchvision):
    library = Library(decode_status=6)
    same_pixels(nvjpeg.decode_with(decoder_of(library), files_of(MIXED), CPU), MIXED)
    assert (library.batches, by_torchvision) == ([5], [7])


def test_where_there_are_no_units_torchvision_decodes(by_torchvision):
    with pytest.raises(RuntimeError, match="nvjpegCreateEx failed with status 7"):
        decoder_of(Library(create_status=ARCH_MISMATCH))
    assert hardware.hardware_decoder(CPU) is None
    same_pixels(nvjpeg.decode_files(files_of(MIXED), CPU), MIXED)
    assert by_torchvision == [7]


def test_a_library_without_the_functions_is_not_used(monkeypatch):
    monkeypatch.setattr(hardware, "_libraries", lambda: iter(["/nowhere/libnvjpeg.so", None]))
    assert hardware.load_api.__wrapped__() is None  # the second is this program, which has no such functions


def test_kinds_of_files():
    """What a decoder's answer may depend on tells files apart; quality and size, which are known otherwise, do not."""
    several = [
        jpeg(40, 30),
        jpeg(40, 30, mode="L"),
        jpeg(40, 30, subsampling=0),
        jpeg(40, 30, subsampling=1),
        jpeg(40, 30, progressive=True),
        jpeg(40, 30, restart_marker_blocks=2),
    ]
    frames = [gpu_frame(data) for data in several]
    assert len({frame.kind for frame in frames}) == len(frames)
    assert {frame[:2] for frame in frames} == {(40, 30)}
    assert gpu_frame(jpeg(99, 55, quality=20, comment=b"x" * 99)) == (99, 55, frames[0].kind)
    twice = several[0]
    frame = twice[twice.index(b"\xff\xc0") :][:19]
    place = twice.index(b"\xff\xda")
    assert gpu_frame(twice[:place] + frame + twice[place:]) is None
