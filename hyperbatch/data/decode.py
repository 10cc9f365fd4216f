"""Decodes a file's bytes to pixels: the whole image, or one view, cropped and resized.

Everything becomes RGB, as ImageNet training expects (`as_rgb`): grey is repeated, CMYK is converted, transparency is
dropped, and 16 bits per channel become 8. EXIF orientation is ignored, as in torchvision's ImageFolder.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import io
import math
import re
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from hyperbatch.data.augment import Box, View
from hyperbatch.data.buffers import scratch
from hyperbatch.data.source import BadSample
from hyperbatch.errors import InputError

try:
    simplejpeg: Any = importlib.import_module("simplejpeg")
except ImportError:  # an optional extra
    simplejpeg = None

_MAX_PIXELS = 1 << 28  # a header may claim any size; no photograph is larger
# An image with more than _MUCH_PIXELS has at most this many pixels per byte of its file, unless the file is malicious.
_MUCH_PIXELS, _PIXELS_PER_BYTE = 1 << 24, 400
# Pillow alone would warn of photographs of 108 megapixels and refuse those of 200, which the other decoders read.
if Image.MAX_IMAGE_PIXELS is not None:
    Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, _MAX_PIXELS)
_JPEG_MAGIC = b"\xff\xd8\xff"
_PPM_HEADER = re.compile(rb"P6\s(\d{1,6})\s(\d{1,6})\s255\s")  # as `data pack` writes photographs and arrays
_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: all are Huffman coded
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)
_LOSSLESS_FRAME = 0xC3
_CONTEXT_ROWS = 2  # decoded rows needed below a crop: interpolated colours depend on the next row of colours
_RGB_IDS = b"RGB"  # component names of files that are not YCbCr
_GREY_16_BITS = ("PNG", "PPM")  # formats whose 16-bit grey images Pillow may open as 32-bit ones
_TIFF_BITS = 258  # the tag with the number of bits per channel; Pillow opens 12 bits as 16
# Pillow's plugins raise all of these on damaged files.
_DAMAGE = (
    OSError,
    EOFError,
    ValueError,
    SyntaxError,
    TypeError,
    AttributeError,
    OverflowError,
    LookupError,
    RuntimeError,
)

ViewOf = Callable[[int, int], View]  # its arguments are the full image's width and height


@functools.cache
def load_torchvision() -> Any | None:
    """Returns torchvision.io, or None if it is missing or does not match this torch."""
    try:
        return importlib.import_module("torchvision.io")
    except Exception:  # a build for another torch fails in many ways at import
        return None


def choose_decoder(name: str) -> str:
    """Returns the CPU decoder that `auto` means without torchvision, or the requested one. Raises InputError if it is
    not installed."""
    if name == "auto":
        return "pillow" if simplejpeg is None else "simplejpeg"
    if name == "simplejpeg" and simplejpeg is None:
        raise InputError("--decoder simplejpeg: not installed; run pip install simplejpeg, or use --decoder pillow")
    if name in ("torchvision", "nvjpeg") and importlib.util.find_spec("torchvision") is None:
        raise InputError(f"--decoder {name}: needs torchvision, which is not installed; use --decoder auto")
    return name


def image_size(data: bytes | bytearray, where: object) -> tuple[int, int]:
    """Returns (width, height), read from the header alone. Raises BadSample."""
    return _guarded(lambda: _open(data, where).size, where)


def decode_full(data: bytes | bytearray, where: object, *, decoder: str = "pillow") -> np.ndarray:
    """Returns the whole image as uint8[height, width, 3]. Raises BadSample for the same files with every decoder."""
    if (raw := _raw_pixels(data)) is not None:
        return raw
    if decoder != "pillow" and data[:3] == _JPEG_MAGIC:
        try:
            return _fast_full(data, decoder)
        except (ValueError, RuntimeError):
            pass  # CMYK, or damage that strict decoding rejects: Pillow decides, so that all decoders agree
    return np.asarray(_guarded(lambda: as_rgb(_open(data, where)), where))


def decode_view(
    data: bytes | bytearray, where: object, view_of: ViewOf, size: int, *, decoder: str, exact: bool
) -> np.ndarray:
    """Returns the view of the image that `view_of` chooses, as uint8[size, size, 3]. Raises BadSample.

    exact: decode every pixel and resize with Pillow, for evaluation. Otherwise, JPEGs are decoded at a smaller scale if
    that is enough for the view, and pixels that Pillow did not decode are resized by a faster kernel.
    """
    if (raw := _raw_pixels(data)) is not None:
        view, full_size = view_of(raw.shape[1], raw.shape[0]), (raw.shape[1], raw.shape[0])
        return render_array(raw, view, size) if exact else resized_view(raw, view, size, full_size=full_size)
    if decoder != "pillow" and data[:3] == _JPEG_MAGIC:
        try:
            return _fast_view(data, view_of, size, decoder, exact)
        except (ValueError, RuntimeError):
            pass  # CMYK, or damage that strict decoding rejects: Pillow decides, so that all decoders agree
    return _guarded(lambda: _pillow_view(data, where, view_of, size, exact), where)


class JpegFrame(NamedTuple):
    """A JPEG as described by its header. A decoder that accepts one file accepts all files of the same `kind` and
    size."""

    width: int
    height: int
    kind: int


def frame_left_to_gpu(data: bytes | bytearray | memoryview, cpu_pixels: int) -> JpegFrame | None:
    """Returns the frame of a file that the GPU decodes, or None. The CPU decodes files of up to `cpu_pixels` pixels and
    those that nvJPEG cannot decode."""
    frame = gpu_frame(data)
    return None if frame is None or frame.width * frame.height <= cpu_pixels else frame


def gpu_frame(data: bytes | bytearray | memoryview) -> JpegFrame | None:
    """Returns the frame of a file that nvJPEG decodes as libjpeg does: a complete 8-bit JPEG, grey or YCbCr. None means
    that the CPU must decode the file.

    nvJPEG fills a truncated file with grey below the cut and gives RGB or CMYK files wrong colours, so Pillow decodes
    those. It also decodes files with two frames, because memory is allocated for the frame that is found here.
    """
    if data[:2] != _SOI or data[-2:] != _EOI:
        return None
    place, end = 2, len(data) - 2
    frame, restarts = None, 0
    try:
        while place < end and data[place] == 0xFF:
            marker = data[place + 1]
            if marker == 0xFF:  # fill
                place += 1
                continue
            length = data[place + 2] << 8 | data[place + 3]
            if marker == 0xDA:  # the first scan
                if frame is None:
                    return None
                width, height, frame_marker, sampling = frame
                kind = int.from_bytes(bytes((frame_marker, data[place + 4], restarts, *sampling)), "big")
                return JpegFrame(width, height, kind)
            if marker in _PLAIN_FRAMES:
                precision, components = data[place + 4], data[place + 9]
                height = data[place + 5] << 8 | data[place + 6]
                width = data[place + 7] << 8 | data[place + 8]
                ids = bytes(data[place + 10 : place + 19 : 3])
                if frame is not None or precision != 8 or components not in (1, 3) or ids == _RGB_IDS:
                    return None
                if not fits(width, height, len(data)):
                    return None
                sampling = bytes(data[place + 11 : place + 10 + 3 * components : 3])
                frame = width, height, marker, sampling
            elif marker in _OTHER_FRAMES or length < 2:
                return None
            elif marker == 0xEE and data[place + 4 : place + 9] == b"Adobe" and data[place + 15] != 1:
                return None  # colours are stored as RGB or CMYK, not as YCbCr
            elif marker == 0xDD:
                restarts = int(data[place + 4] + data[place + 5] > 0)
            place += 2 + length
    except IndexError:
        pass
    return None


def gpu_can_decode(data: bytes | bytearray | memoryview) -> bool:
    return gpu_frame(data) is not None


def fits(width: int, height: int, data_bytes: int) -> bool:
    """Whether an image of this size may be decoded. A malicious file of a few kilobytes can fill gigabytes of
    memory."""
    pixels = width * height
    return 0 < pixels <= _MAX_PIXELS and (pixels <= _MUCH_PIXELS or pixels <= _PIXELS_PER_BYTE * data_bytes)


def as_rgb(image: Image.Image) -> Image.Image:
    """Converts an image to RGB. Of 16 or 12 bits per channel, the upper 8 are kept, as Pillow does for RGB. Pillow's
    conversion of 16-bit grey clips at 255, so nearly all pixels would be white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _GREY_16_BITS):
        image.load()
        bits = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (16,))[0]
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow would warn that transparency is dropped
    return image.convert("RGB")


def raw_header_bytes(data: bytes | bytearray | memoryview) -> tuple[int, int, int] | None:
    """Returns (width, height, bytes before the pixels) of an uncompressed file, or None if the file must be decoded."""
    header = _PPM_HEADER.match(data)
    if header is None:
        return None
    width, height = int(header[1]), int(header[2])
    if not 0 < width * height <= _MAX_PIXELS or len(data) != header.end() + 3 * width * height:
        return None  # Pillow then reports what is wrong with the file
    return width, height, header.end()


def _raw_pixels(data: bytes | bytearray) -> np.ndarray | None:
    header = raw_header_bytes(data)
    if header is None:
        return None
    return np.frombuffer(data, np.uint8, offset=header[2]).reshape(header[1], header[0], 3)


def render(image: Image.Image, view: View, size: int, *, full_size: tuple[int, int]) -> np.ndarray:
    """Returns the view as uint8[size, size, c], cut from an image that may have been decoded smaller than
    `full_size`."""
    box = _decoded_box(view, image.size, full_size)
    if box != (0, 0, size, size) or image.size != (size, size):
        image = image.resize((size, size), Image.Resampling.BILINEAR, box=box)
    return view.finish(np.asarray(image).reshape(size, size, -1))


def render_array(pixels: np.ndarray, view: View, size: int) -> np.ndarray:
    """`render` for pixels in memory, of any channel count."""
    full_size = (pixels.shape[1], pixels.shape[0])
    if pixels.shape[2] == 3:
        return render(Image.fromarray(pixels), view, size, full_size=full_size)
    planes = [
        render(Image.fromarray(np.ascontiguousarray(pixels[:, :, c])), view, size, full_size=full_size)
        for c in range(pixels.shape[2])
    ]
    return np.concatenate(planes, axis=2)


def _fast_full(data: bytes | bytearray, decoder: str) -> np.ndarray:
    """Decodes with simplejpeg or torchvision. Raises ValueError or RuntimeError for files that they reject."""
    if decoder == "torchvision":
        return _torchvision_pixels(data)
    _simplejpeg_size(data)
    return simplejpeg.decode_jpeg(data, "RGB")


def _simplejpeg_size(data: bytes | bytearray) -> tuple[int, int]:
    """Returns (width, height) of a file that simplejpeg may decode. Raises ValueError for others, such as CMYK, whose
    colours differ from Pillow's by a grey level."""
    height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    if colors in ("CMYK", "YCCK"):
        raise ValueError("neither grey nor RGB")
    if not fits(width, height, len(data)):
        raise ValueError("too large")
    return width, height


def _fast_view(data: bytes | bytearray, view_of: ViewOf, size: int, decoder: str, exact: bool) -> np.ndarray:
    """Decodes a view with simplejpeg or torchvision. Raises ValueError or RuntimeError for files that they reject."""
    is_bgr = False
    if decoder == "simplejpeg":
        width, height = _simplejpeg_size(data)
        view = view_of(width, height)
        buffer = scratch("decoded", 3 * width * height)
        if exact:
            pixels = simplejpeg.decode_jpeg(data, "RGB", buffer=buffer)
        else:
            eighths = _least_eighths(_least_size(view, width, height, size), width, height)
            if eighths < 8 and _is_lossless(data):
                eighths = 8
            rows = math.ceil(view.box[3]) + -(-8 * _CONTEXT_ROWS // eighths)
            is_bgr = view.flip
            pixels, height = _upper_rows(data, eighths, width, height, rows, buffer, "BGR" if is_bgr else "RGB")
    else:
        pixels = _torchvision_pixels(data)
        height, width, _ = pixels.shape
        view = view_of(width, height)
    if exact:
        return render(Image.fromarray(pixels), view, size, full_size=(width, height))
    return resized_view(pixels, view, size, full_size=(width, height), is_bgr=is_bgr)


def _upper_rows(
    data: bytes | bytearray, eighths: int, width: int, height: int, rows: int, buffer: np.ndarray, order: str
) -> tuple[np.ndarray, int]:
    """Returns (the upper part of the image at eighths / 8 of its size, the number of full-size rows that it covers).

    At least `rows` rows are decoded, if the image has them. Most of the work is reading the Huffman codes, which are
    stored from top to bottom. The height in the header is therefore reduced to the rows needed, and the decoder skips
    the rest of the file. libjpeg warns about that, so it must not be strict here. Strictness is meant for truncated
    files, and those do not end with the end marker.
    """
    place = _height_place(data) if rows < height and isinstance(data, bytearray) and data[-2:] == _EOI else None
    if place is None or data[place : place + 2] != height.to_bytes(2, "big"):
        rows, place = height, None
    sides = (-(-side * eighths // 8) for side in (width, rows))
    options = dict(zip(("min_width", "min_height"), sides, strict=True)) if eighths < 8 else {}
    if place is None:
        return simplejpeg.decode_jpeg(data, order, min_factor=2, buffer=buffer, **options), rows
    assert isinstance(data, bytearray)
    data[place : place + 2] = rows.to_bytes(2, "big")
    try:
        return simplejpeg.decode_jpeg(data, order, min_factor=2, buffer=buffer, strict=False, **options), rows
    finally:
        data[place : place + 2] = height.to_bytes(2, "big")


def _height_place(data: bytearray) -> int | None:
    """Returns the offset of the height in the header of a sequential JPEG, or None for other kinds of JPEG."""
    place = _frame_place(data)
    return None if place is None or data[place + 1] not in _SEQUENTIAL_FRAMES else place + 5


def _is_lossless(data: bytes | bytearray) -> bool:
    """Whether the file is a lossless JPEG. libjpeg cannot decode one at a smaller scale: it returns wrong pixels."""
    place = _frame_place(data)
    return place is not None and data[place + 1] == _LOSSLESS_FRAME


def _frame_place(data: bytes | bytearray) -> int | None:
    """Returns the offset of a JPEG's frame marker, or None if there is none before the first scan or it is no JPEG."""
    place, end = 2, len(data) - 9
    while place < end and data[place] == 0xFF:
        marker = data[place + 1]
        if marker in _PLAIN_FRAMES or marker in _OTHER_FRAMES:
            return place
        if marker == 0xFF:  # fill
            place += 1
        elif marker == 0xDA:
            return None
        else:
            place += 2 + (data[place + 2] << 8 | data[place + 3])
    return None


def _least_eighths(least: tuple[int, int], width: int, height: int) -> int:
    """Returns the smallest scale, in eighths, at which both sides are long enough. Scales between a half and one are
    not used, because they take longer to decode."""
    for eighths in (1, 2, 3, 4):
        if -(-width * eighths // 8) >= least[0] and -(-height * eighths // 8) >= least[1]:
            return eighths
    return 8


def resized_view(
    pixels: np.ndarray, view: View, size: int, *, full_size: tuple[int, int], is_bgr: bool = False
) -> np.ndarray:
    """`render` with the faster kernel, which reads no pixel outside the box.

    is_bgr: the pixels of a mirrored view are in BGR order. Reading them backwards mirrors the view and gives RGB, which
    is faster than mirroring RGB.
    """
    from hyperbatch.data.resize import mirrored, read_backwards, resize_box  # imported here because it loads torch

    resized = resize_box(pixels, _decoded_box(view, (pixels.shape[1], pixels.shape[0]), full_size), size)
    if view.flip:
        resized = read_backwards(resized) if is_bgr else mirrored(resized)
    return view.finish(resized, mirrored=view.flip)


def _torchvision_pixels(data: bytes | bytearray) -> np.ndarray:
    """Decodes with torchvision's libjpeg-turbo, which releases Python's lock. Raises ValueError or RuntimeError for
    files that it rejects."""
    import torch  # imported here because reading processes start without it

    if not gpu_can_decode(data):
        raise ValueError("not a plain JPEG")
    torchvision: Any = load_torchvision()
    # A bytearray, because torch warns about read-only memory.
    file = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    return torchvision.decode_jpeg(file, mode=torchvision.ImageReadMode.RGB).permute(1, 2, 0).numpy()


def _pillow_view(data: bytes | bytearray, where: object, view_of: ViewOf, size: int, exact: bool) -> np.ndarray:
    image = _open(data, where)
    full_size = image.size
    view = view_of(*full_size)
    if not exact and not _is_lossless(data):
        image.draft("RGB", _least_size(view, *full_size, size))  # has an effect on JPEGs only
    return render(as_rgb(image), view, size, full_size=full_size)


def _decoded_box(view: View, decoded_size: tuple[int, int], full_size: tuple[int, int]) -> Box:
    """Returns the view's box in the coordinates of an image that may have been decoded smaller."""
    # JPEGs are decoded at k/8 and their sides are rounded up, so the ratio of the sides is not exactly the scale.
    scale = round(8 * max(decoded_size) / max(full_size)) / 8
    left, top, right, bottom = (side * scale for side in view.box)
    return (left, top, min(right, decoded_size[0]), min(bottom, decoded_size[1]))


def _least_size(view: View, width: int, height: int, size: int) -> tuple[int, int]:
    """Returns the size that the whole image must have for the view's box to have at least `size` pixels per side."""
    left, top, right, bottom = view.box
    return (
        min(width, math.ceil(width * size / (right - left))),
        min(height, math.ceil(height * size / (bottom - top))),
    )


def _open(data: bytes | bytearray, where: object) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    if not fits(image.width, image.height, len(data)):
        raise BadSample(
            f"{where}: {image.width}x{image.height} pixels in {len(data):,} bytes is too large for a "
            "photograph of this file size"
        )
    return image


def _guarded(decode: Callable[[], Any], where: object) -> Any:
    try:
        return decode()
    except BadSample:
        raise
    except UnidentifiedImageError as error:  # its text contains a memory address, which differs in each run
        raise BadSample(f"{where}: not a readable image") from error
    except _DAMAGE as error:
        raise BadSample(f"{where}: {' '.join(str(error).split())}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: {error}") from error
