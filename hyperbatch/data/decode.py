"""From a file's bytes to pixels: the whole image, or one view of it cut out and resized.

Everything becomes RGB, as ImageNet training expects: grey is repeated, CMYK converted, transparency dropped; EXIF
orientation is ignored, as torchvision's ImageFolder ignores it.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from PIL import Image

from hyperbatch.data.augment import Box, View
from hyperbatch.data.source import BadSample
from hyperbatch.errors import InputError

try:
    simplejpeg: Any = importlib.import_module("simplejpeg")
except ImportError:  # an optional extra
    simplejpeg = None

_MAX_PIXELS = 1 << 28  # a header may claim any size; no photograph is larger
_JPEG_MAGIC = b"\xff\xd8\xff"

ViewOf = Callable[[int, int], View]  # of the full image's width and height


def choose_decoder(name: str) -> str:
    """The decoder `auto` stands for, or the one asked for when it can be used."""
    if name == "auto":
        return "pillow" if simplejpeg is None else "simplejpeg"
    if name == "simplejpeg" and simplejpeg is None:
        raise InputError("--decoder simplejpeg: not installed; run pip install simplejpeg, or use --decoder pillow")
    if name not in ("pillow", "simplejpeg"):
        raise InputError(f"--decoder {name}: decodes on the GPU, which this version does not; use --decoder auto")
    return name


def decode_full(data: bytes, where: str) -> np.ndarray:
    """uint8[height, width, 3] of the whole image. Raises BadSample."""
    return np.asarray(_guarded(lambda: _open(data, where).convert("RGB"), where))


def decode_view(data: bytes, where: str, view_of: ViewOf, size: int, *, decoder: str, exact: bool) -> np.ndarray:
    """uint8[size, size, 3]: the view of the image that `view_of` chooses. Raises BadSample.

    exact: decode every pixel and resize as Pillow does, for evaluation; otherwise JPEGs are decoded smaller where the
    view does not need more, and simplejpeg's pixels are resized by a faster kernel.
    """
    if decoder == "simplejpeg" and data.startswith(_JPEG_MAGIC):
        try:
            height, width, _, _ = simplejpeg.decode_jpeg_header(data)
            view = view_of(width, height)
            least = (0, 0) if exact else _least_size(view, width, height, size)
            if width * height <= _MAX_PIXELS:
                pixels = simplejpeg.decode_jpeg(data, "RGB", min_width=least[0], min_height=least[1], min_factor=2)
                if exact:
                    return render(Image.fromarray(pixels), view, size, full_size=(width, height))
                from hyperbatch.data.resize import resize_box  # here, because it loads torch

                box = _decoded_box(view, (pixels.shape[1], pixels.shape[0]), (width, height))
                return view.finish(resize_box(pixels, box, size))
        except ValueError:
            pass  # CMYK, or damage that strict decoding refuses: Pillow has the last word, so both decoders agree
    return _guarded(lambda: _pillow_view(data, where, view_of, size, exact), where)


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


def _pillow_view(data: bytes, where: str, view_of: ViewOf, size: int, exact: bool) -> np.ndarray:
    image = _open(data, where)
    full_size = image.size
    view = view_of(*full_size)
    if not exact:
        image.draft("RGB", _least_size(view, *full_size, size))  # only JPEGs; others stay as they are
    return render(image.convert("RGB"), view, size, full_size=full_size)


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
        min(width, int(np.ceil(width * size / (right - left)))),
        min(height, int(np.ceil(height * size / (bottom - top)))),
    )


def _open(data: bytes, where: str) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    if image.width * image.height > _MAX_PIXELS:
        raise BadSample(f"{where}: {image.width}x{image.height} pixels is too large to be a photograph")
    return image


def _guarded(decode: Callable[[], Any], where: str) -> Any:
    try:
        return decode()
    except BadSample:
        raise
    # Pillow's plugins raise all of these on damaged files; none of them is a mistake of ours that should pass.
    except (OSError, ValueError, SyntaxError, TypeError, EOFError, OverflowError, IndexError, KeyError) as error:
        raise BadSample(f"{where}: {' '.join(str(error).split())}") from error
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise BadSample(f"{where}: {error}") from error
