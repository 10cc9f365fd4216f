"""Changes the bytes of an image before `hyperbatch data pack` writes them, if its options say so."""

from __future__ import annotations

import io
from dataclasses import dataclass

from PIL import Image

from hyperbatch.data.decode import as_rgb, fits
from hyperbatch.errors import InputError

_SHRUNK_QUALITY = 90  # JPEG quality of images that are shrunk, if no quality is given


@dataclass(frozen=True, kw_only=True)
class Recompress:
    """Returns (bytes, extension) of a file as it is written to the shard. Damaged files are not changed."""

    short_side: int | None
    quality: int | None
    decoded: bool

    def __post_init__(self) -> None:
        if self.short_side is not None and self.short_side < 1:
            raise InputError(f"--short-side {self.short_side}: must be positive")
        if self.quality is not None and not 1 <= self.quality <= 100:
            raise InputError(f"--quality {self.quality}: must be in [1, 100]")
        if self.decoded and self.quality is not None:
            raise InputError("--quality and --decoded: plain pixels have no quality; give one of them")

    @property
    def keeps_bytes(self) -> bool:
        return self.short_side is None and self.quality is None and not self.decoded

    def __call__(self, data: bytes, extension: str) -> tuple[bytes, str]:
        if self.keeps_bytes:
            return data, extension
        try:
            with Image.open(io.BytesIO(data)) as image:
                shrink = self.short_side is not None and min(image.size) > self.short_side
                if not (shrink or self.decoded or self.quality):
                    return data, extension
                if not fits(*image.size, len(data)):
                    return data, extension
                pixels = image.convert("L") if image.mode == "L" and not self.decoded else as_rgb(image)
            if shrink and self.short_side is not None:
                scale = self.short_side / min(pixels.size)
                size = (round(pixels.width * scale), round(pixels.height * scale))
                pixels = pixels.resize(size, Image.Resampling.LANCZOS)
            out = io.BytesIO()
            if self.decoded:
                pixels.save(out, "PPM")
                return out.getvalue(), "ppm"
            pixels.save(out, "JPEG", quality=self.quality or _SHRUNK_QUALITY)
        # A damaged file can raise anything. Its bytes are kept, and the loader reports it. An image with a side of more
        # than 65,500 pixels cannot be a JPEG, and is kept, too.
        except Exception:
            return data, extension
        if not shrink and extension == "jpg" and len(out.getvalue()) >= len(data):
            return data, extension  # the original is not larger
        return out.getvalue(), "jpg"


def image_format(data: bytes) -> str:
    """Returns the format of the bytes as a file extension: "jpeg", "png", ..., or "bin" if it is unknown."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            kind = (image.format or "bin").lower()
            return "jpeg" if kind == "mpo" else kind  # a JPEG that holds further pictures, as some cameras write it
    except Exception:  # a damaged header can raise anything
        return "bin"


def header_size(data: bytes) -> tuple[int, int]:
    """Returns (width, height) from the image's header, or (0, 0) if it cannot be read."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            return image.size
    except Exception:  # a damaged header can raise anything
        return (0, 0)
