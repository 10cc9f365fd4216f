"""Pictures for the tests of the loader: like photographs, as files, and as files that no decoder can read."""

import io

import numpy as np
from PIL import Image


def photo(width, height, seed=0):
    """Smooth colours with some detail, as photographs have."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).astype(float)
    return Image.fromarray(np.clip(pixels + rng.normal(0, 4, pixels.shape), 0, 255).astype(np.uint8))


def encoded(image, format="JPEG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def without_codes(data):
    """The JPEG with a scan that names Huffman codes it does not have: it looks whole, but no decoder can read it."""
    data = bytearray(data)
    data[data.index(b"\xff\xda") + 6] = 0x33
    return bytes(data)
