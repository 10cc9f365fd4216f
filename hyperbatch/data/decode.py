"""From a file's bytes to pixels: the whole image, or one view of it cut out and resized.

Everything becomes RGB, as ImageNet training expects (`as_rgb`): grey is repeated, CMYK converted, transparency dropped,
16 bits a channel become 8; EXIF orientation is ignored, as torchvision's ImageFolder ignores it.
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
_MUCH_PIXELS, _PIXELS_PER_BYTE = 1 << 24, 400  # of a larger image, a file holds no more a byte unless it is made for it
_JPEG_MAGIC = b"\xff\xd8\xff"
_PPM_HEADER = re.compile(rb"P6\n(\d{1,6}) (\d{1,6})\n255\n")  # as `data pack --decoded` writes it
_SOI, _EOI = b"\xff\xd8", b"\xff\xd9"
_PLAIN_FRAMES = (0xC0, 0xC1, 0xC2)  # baseline, extended, progressive: all Huffman coded
_OTHER_FRAMES = (0xC3, 0xC5, 0xC6, 0xC7, 0xC9, 0xCA, 0xCB, 0xCD, 0xCE, 0xCF)
_SEQUENTIAL_FRAMES = (0xC0, 0xC1)
_LOSSLESS_FRAME = 0xC3
_CONTEXT_ROWS = 2  # below a crop, of the decoded image: interpolated colours depend on the next row of colours
_RGB_IDS = b"RGB"  # component names of files that are not YCbCr
_GREY_16_BITS = ("PNG", "PPM")  # formats whose grey images of 32 bits, as Pillow opens them, hold 16
_TIFF_BITS = 258  # the tag that says how many a channel has; Pillow opens 12 as it does 16
# Pillow's plugins raise all of these on damaged files; none of them is a mistake of ours that should pass.
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

ViewOf = Callable[[int, int], View]  # of the full image's width and height


@functools.cache
def load_torchvision() -> Any | None:
    """torchvision.io, or None where it is missing or does not fit this torch."""
    try:
        return importlib.import_module("torchvision.io")
    except Exception:  # a build for another torch fails in many ways at import
        return None


def choose_decoder(name: str) -> str:
    """The CPU decoder `auto` stands for without torchvision, or the one asked for when it can be used."""
    if name == "auto":
        return "pillow" if simplejpeg is None else "simplejpeg"
    if name == "simplejpeg" and simplejpeg is None:
        raise InputError("--decoder simplejpeg: not installed; run pip install simplejpeg, or use --decoder pillow")
    if name in ("torchvision", "nvjpeg") and importlib.util.find_spec("torchvision") is None:
        raise InputError(f"--decoder {name}: needs torchvision, which is not installed; use --decoder auto")
    return name


def image_size(data: bytes | bytearray, where: object) -> tuple[int, int]:
    """(width, height), from the header alone. Raises BadSample."""
    return _guarded(lambda: _open(data, where).size, where)


def decode_full(data: bytes | bytearray, where: object, *, decoder: str = "pillow") -> np.ndarray:
    """uint8[height, width, 3] of the whole image, the same from every decoder. Raises BadSample."""
    if (raw := _raw_pixels(data)) is not None:
        return raw
    if decoder != "pillow" and data[:3] == _JPEG_MAGIC:
        try:
            return _fast_full(data, decoder)
        except (ValueError, RuntimeError):
            pass  # CMYK, or damage that strict decoding refuses: Pillow has the last word, so all decoders agree
    return np.asarray(_guarded(lambda: as_rgb(_open(data, where)), where))


def decode_view(
    data: bytes | bytearray, where: object, view_of: ViewOf, size: int, *, decoder: str, exact: bool
) -> np.ndarray:
    """uint8[size, size, 3]: the view of the image that `view_of` chooses. Raises BadSample.

    exact: decode every pixel and resize as Pillow does, for evaluation; otherwise JPEGs are decoded smaller where the
    view does not need more, and simplejpeg's pixels are resized by a faster kernel.
    """
    if (raw := _raw_pixels(data)) is not None:
        view, full_size = view_of(raw.shape[1], raw.shape[0]), (raw.shape[1], raw.shape[0])
        return render_array(raw, view, size) if exact else resized_view(raw, view, size, full_size=full_size)
    if decoder != "pillow" and data[:3] == _JPEG_MAGIC:
        try:
            return _fast_view(data, view_of, size, decoder, exact)
        except (ValueError, RuntimeError):
            pass  # CMYK, or damage that strict decoding refuses: Pillow has the last word, so all decoders agree
    return _guarded(lambda: _pillow_view(data, where, view_of, size, exact), where)


class JpegFrame(NamedTuple):
    """A JPEG as its header describes it. `kind`: a decoder that takes one file takes all of its kind and size."""

    width: int
    height: int
    kind: int


def frame_left_to_gpu(data: bytes | bytearray | memoryview, cpu_pixels: int) -> JpegFrame | None:
    """The frame of a file that nvJPEG can decode, unless the CPU is to decode those of up to so many pixels."""
    frame = gpu_frame(data)
    return None if frame is None or frame.width * frame.height <= cpu_pixels else frame


def gpu_frame(data: bytes | bytearray | memoryview) -> JpegFrame | None:
    """The frame of a file that nvJPEG decodes as libjpeg does: a whole 8-bit JPEG, grey or YCbCr. None: the CPU must.

    Cut-off files come out grey below the cut, and RGB or CMYK ones in wrong colours: Pillow has the word on those, and
    on files with two frames, since the decoder is given memory for the one that is found here.
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
                return None  # colours are stored as they are, not as YCbCr
            elif marker == 0xDD:
                restarts = int(data[place + 4] + data[place + 5] > 0)
            place += 2 + length
    except IndexError:
        pass
    return None


def gpu_can_decode(data: bytes | bytearray | memoryview) -> bool:
    return gpu_frame(data) is not None


def fits(width: int, height: int, data_bytes: int) -> bool:
    """Whether an image of this size may be decoded: a few kilobytes can claim, and fill, gigabytes of memory."""
    pixels = width * height
    return 0 < pixels <= _MAX_PIXELS and (pixels <= _MUCH_PIXELS or pixels <= _PIXELS_PER_BYTE * data_bytes)


def as_rgb(image: Image.Image) -> Image.Image:
    """Of 16 bits a channel, or 12, the upper 8, as Pillow itself reads RGB. Its own conversion cuts 16-bit grey off at
    255, so that nearly all of it would be white."""
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in _GREY_16_BITS):
        image.load()
        bits = getattr(image, "tag_v2", {}).get(_TIFF_BITS, (16,))[0]
        image = Image.fromarray((np.asarray(image) >> (bits - 8)).astype(np.uint8))
    elif image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")  # Pillow would warn that transparency is dropped
    return image.convert("RGB")


def raw_header_bytes(data: bytes | bytearray | memoryview) -> tuple[int, int, int] | None:
    """(width, height, bytes before the pixels) of a file that holds nothing but pixels; None: it must be decoded."""
    header = _PPM_HEADER.match(data)
    if header is None:
        return None
    width, height = int(header[1]), int(header[2])
    if not 0 < width * height <= _MAX_PIXELS or len(data) != header.end() + 3 * width * height:
        return None  # Pillow says what is wrong with it
    return width, height, header.end()


def _raw_pixels(data: bytes | bytearray) -> np.ndarray | None:
    header = raw_header_bytes(data)
    if header is None:
        return None
    return np.frombuffer(data, np.uint8, offset=header[2]).reshape(header[1], header[0], 3)


def render(image: Image.Image, view: View, size: int, *, full_size: tuple[int, int]) -> np.ndarray:
    """uint8[size, size, c]: the view cut from an image that may be decoded smaller than `full_size`."""
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
    """By simplejpeg or torchvision; ValueError or RuntimeError for what they refuse."""
    if decoder == "torchvision":
        return _torchvision_pixels(data)
    _simplejpeg_size(data)
    return simplejpeg.decode_jpeg(data, "RGB")


def _simplejpeg_size(data: bytes | bytearray) -> tuple[int, int]:
    """(width, height) of a file that simplejpeg may decode; ValueError for others. Its colours of CMYK differ by a grey
    level from Pillow's."""
    height, width, colors, _ = simplejpeg.decode_jpeg_header(data)
    if colors in ("CMYK", "YCCK"):
        raise ValueError("neither grey nor RGB")
    if not fits(width, height, len(data)):
        raise ValueError("too large")
    return width, height


def _fast_view(data: bytes | bytearray, view_of: ViewOf, size: int, decoder: str, exact: bool) -> np.ndarray:
    """By simplejpeg or torchvision; ValueError or RuntimeError for what they refuse."""
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
    """(the image decoded at eighths / 8 of its size, how many of its rows that are): at least `rows`, if it has them.

    Most of the work is reading the Huffman codes, which come from top to bottom. So a file is said to be as high as
    it is needed, and what follows is passed over. libjpeg warns of that, and must not be strict then; a file that was
    cut off, for which strictness is meant, does not end with the end mark.
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
    """Where a JPEG whose rows come one after the other says how high it is; None: it is another kind of JPEG."""
    place = _frame_place(data)
    return None if place is None or data[place + 1] not in _SEQUENTIAL_FRAMES else place + 5


def _is_lossless(data: bytes | bytearray) -> bool:
    """Whether it is a JPEG that cannot be decoded smaller: asked to, libjpeg gives pixels from all over the image."""
    place = _frame_place(data)
    return place is not None and data[place + 1] == _LOSSLESS_FRAME


def _frame_place(data: bytes | bytearray) -> int | None:
    """Where the marker of a JPEG's frame is; None: there is none before the first scan, or it is no JPEG."""
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
    """The smallest scale at which both sides are long enough; sizes between a half and all take longer to decode."""
    for eighths in (1, 2, 3, 4):
        if -(-width * eighths // 8) >= least[0] and -(-height * eighths // 8) >= least[1]:
            return eighths
    return 8


def resized_view(
    pixels: np.ndarray, view: View, size: int, *, full_size: tuple[int, int], is_bgr: bool = False
) -> np.ndarray:
    """`render` by the faster kernel, which looks at nothing outside the box. is_bgr: of a mirrored view, the quicker
    way; it becomes RGB."""
    from hyperbatch.data.resize import mirrored, read_backwards, resize_box  # here, because they load torch

    resized = resize_box(pixels, _decoded_box(view, (pixels.shape[1], pixels.shape[0]), full_size), size)
    if view.flip:
        resized = read_backwards(resized) if is_bgr else mirrored(resized)
    return view.finish(resized, mirrored=view.flip)


def _torchvision_pixels(data: bytes | bytearray) -> np.ndarray:
    """By torchvision's libjpeg-turbo, without Python's lock; ValueError or RuntimeError for what it refuses."""
    import torch  # here, because reading processes start without it

    if not gpu_can_decode(data):
        raise ValueError("not a plain JPEG")
    torchvision: Any = load_torchvision()
    # A bytearray, because torch warns of memory that must not be written.
    file = torch.frombuffer(data if isinstance(data, bytearray) else bytearray(data), dtype=torch.uint8)
    return torchvision.decode_jpeg(file, mode=torchvision.ImageReadMode.RGB).permute(1, 2, 0).numpy()


def _pillow_view(data: bytes | bytearray, where: object, view_of: ViewOf, size: int, exact: bool) -> np.ndarray:
    image = _open(data, where)
    full_size = image.size
    view = view_of(*full_size)
    if not exact and not _is_lossless(data):
        image.draft("RGB", _least_size(view, *full_size, size))  # only JPEGs; others stay as they are
    return render(as_rgb(image), view, size, full_size=full_size)


def _decoded_box(view: View, decoded_size: tuple[int, int], full_size: tuple[int, int]) -> Box:
    """The view's box in an image that may have been decoded smaller."""
    # JPEGs are decoded at k/8 and their sides rounded up, so the ratio of the sides is not quite the scale.
    scale = round(8 * max(decoded_size) / max(full_size)) / 8
    left, top, right, bottom = (side * scale for side in view.box)
    return (left, top, min(right, decoded_size[0]), min(bottom, decoded_size[1]))


def _least_size(view: View, width: int, height: int, size: int) -> tuple[int, int]:
    """How large the whole image must be for the view's box to have `size` pixels a side."""
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
    except UnidentifiedImageError as error:  # its text holds an address, other each time
        raise BadSample(f"{where}: not a readable image") from error
    except _DAMAGE as error:
        raise BadSample(f"{where}: {' '.join(str(error).split())}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: {error}") from error
