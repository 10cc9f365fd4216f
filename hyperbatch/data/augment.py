"""Chooses which part of an image becomes a training or evaluation view.

All functions here are pure functions of uniform random numbers ("uniforms"). A view therefore depends on (seed, epoch,
sample) only, and not on the world size, the batch, or the thread that makes it.

    image w x h                 view: box (in pixels of the image) -> size x size, then shift, then flip
    ┌──────────────┐
    │   ┌─────┐    │            ┌────┐
    │   │ box │    │  resize -> │    │ size
    │   └─────┘    │            └────┘
    └──────────────┘

The colours are then computed as: grey level / 255, + colour noise; (. - mean) / std; * contrast + brightness; 0 in a
square (cutout).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hyperbatch.config import DataConfig
from hyperbatch.data import stream
from hyperbatch.errors import InputError

# The columns of a sample's uniforms are, in this order: the mirror, the colour noise (two pairs of normals), the
# geometry, the jitter of brightness and contrast, the operations of TrivialAugment or RandAugment, and the cutout's
# corner. The first columns of each kind of view must not move, because runs of older versions can be resumed.
_FLIP, _NOISE, _GEOMETRY = 0, 1, 5
_TRIVIAL_COLUMNS = 3  # TrivialAugment uses three: operation, strength, sign
RAND_COLUMNS = 2  # each operation of RandAugment uses two: which operation it is, and its sign
_CROP_ATTEMPTS = 10
_NEAR_FULL_AREA = 0.999  # of the image: the smallest near-full crop, as in Fujitsu's MLPerf v0.6 job parameters

# Eigenvalues and eigenvectors (columns) of the covariance of ImageNet's RGB pixels in [0, 1] (Krizhevsky et al.).
_PCA_VALUES = np.array([0.2175, 0.0188, 0.0045])
_PCA_AXES = np.array([[-0.5675, 0.7192, 0.4009], [-0.5808, -0.0045, -0.8140], [-0.5836, -0.6948, 0.4203]])


Box = tuple[float, float, float, float]  # left, top, right, bottom, in pixels of the image


class View(NamedTuple):
    """A box of the image, how far the resized result is shifted (pixels), and whether it is mirrored.

    reflect: whether a shift fills the gap with the image's reflection (without repeating the outermost pixel); if not,
    the gap is black.
    """

    box: Box
    shift_x: int = 0
    shift_y: int = 0
    flip: bool = False
    reflect: bool = False

    def finish(self, pixels: np.ndarray, *, mirrored: bool = False) -> np.ndarray:
        """Shifts and mirrors [h, w, c]. mirrored: the pixels are mirrored already."""
        if self.shift_x or self.shift_y:
            height, width, _ = pixels.shape
            dx, dy = -self.shift_x if mirrored else self.shift_x, self.shift_y
            if self.reflect:
                rows, columns = _reflected(np.arange(height) - dy, height), _reflected(np.arange(width) - dx, width)
                pixels = pixels[rows[:, None], columns]
            else:
                shifted = np.zeros_like(pixels)
                shifted[max(0, dy) : height + min(0, dy), max(0, dx) : width + min(0, dx)] = pixels[
                    max(0, -dy) : height + min(0, -dy), max(0, -dx) : width + min(0, -dx)
                ]
                pixels = shifted
        return pixels[:, ::-1] if self.flip and not mirrored else pixels


def check_options(config: DataConfig, channels: int, *, whole: bool) -> None:
    """Raises InputError if an augmentation does not fit the images. whole: the images are used uncropped (arrays)."""
    if not whole and config.eval_resize < config.eval_size:
        raise InputError(
            f"--eval-resize {config.eval_resize} is smaller than --eval-size {config.eval_size}: the crop would not "
            f"fit into the resized image; use --eval-resize {config.eval_size} or more"
        )
    side = min([config.image_size, *(phase.image_size for phase in config.size_phases)])
    if config.augment == "shift" and not 0 <= config.shift_pixels < side:
        raise InputError(f"--shift-pixels {config.shift_pixels}: must be in [0, {side}), the image side")
    if config.cutout >= config.image_size:
        raise InputError(f"--cutout {config.cutout}: must be in [0, {config.image_size}), the image side")
    if config.color_noise and channels != 3:
        raise InputError(
            f"--color-noise {config.color_noise:g}: needs RGB images, these have {channels} channels; use 0"
        )
    if config.auto_augment != "none" and channels not in (1, 3):
        raise InputError(
            f"--auto-augment {config.auto_augment}: needs grey or RGB images, these have {channels} channels; use none"
        )


def uniforms_needed(config: DataConfig) -> int:
    """Returns the number of columns of `stream.uniforms` that a training view may use."""
    if config.cutout:
        return cutout_column(config) + 2
    if config.auto_augment != "none":
        return cutout_column(config)
    return jitter_column(config) + (2 if has_jitter(config) else 0)


def draw(config: DataConfig, seed: int, epochs: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Returns the uniforms of training views, float64[n, columns], keyed by (seed, epoch, sample)."""
    uniforms = stream.uniforms(seed, epochs, ids, uniforms_needed(config))
    if config.flip_alternates:
        first = stream.uniforms(seed, np.zeros_like(epochs), ids, _FLIP + 1)[:, _FLIP]
        mirrored = (first < 0.5) ^ (epochs % 2 == 1)
        uniforms[:, _FLIP] = np.where(mirrored, 0.0, 0.5)  # `flips` mirrors below 0.5
    return uniforms


def size_at(config: DataConfig, epoch: float) -> int:
    """Returns the side of the training images in a step that starts at this epoch (progressive resizing)."""
    size = config.image_size
    for phase in config.size_phases:
        if phase.from_epoch <= epoch:
            size = phase.image_size
    return size


def train_view(
    config: DataConfig, width: int, height: int, epoch: int, uniforms: Sequence[float], *, whole: bool
) -> View:
    """Returns the training view of a sample. whole: the set's images already have their final size (arrays in
    memory)."""
    u = uniforms[_GEOMETRY:]
    flip = config.flip and uniforms[_FLIP] < 0.5
    kind = config.augment
    if kind in ("none", "shift"):
        box = eval_view(config, width, height, whole=whole).box
        dx, dy = shifts(config, uniforms) if kind == "shift" else (0, 0)
        return View(box, int(dx), int(dy), flip, config.shift_padding == "reflect")
    if kind == "random_resized_crop":
        if config.full_crop_from_epoch is not None and epoch >= config.full_crop_from_epoch:
            return View(_near_full_box(config, width, height, u), flip=flip)
        return View(_random_area_box(config, width, height, u), flip=flip)
    if kind == "scale_jitter":
        low, high = config.jitter_sides
        side = low + int(u[2] * (high - low + 1))
        return View(_resized_crop_box(width, height, side, config.image_size, u[0], u[1]), flip=flip)
    return View(_resized_crop_box(width, height, config.eval_resize, config.image_size, u[0], u[1]), flip=flip)


def eval_view(config: DataConfig, width: int, height: int, *, whole: bool) -> View:
    """Returns the centre crop after resizing the shorter side, or the full image if it already has its final size."""
    if whole:
        return View((0, 0, width, height))
    return View(_resized_crop_box(width, height, config.eval_resize, config.eval_size, None, None))


def batch_views(
    config: DataConfig,
    widths: np.ndarray,
    heights: np.ndarray,
    epochs: np.ndarray | None,
    uniforms: np.ndarray | None,
    *,
    whole: bool,
) -> np.ndarray:
    """Returns the views of a whole batch as float64[n, 7]: box, shift x, shift y, mirrored.

    The numbers equal those of `train_view` and `eval_view`. Without epochs and uniforms, they are evaluation views.
    """
    n = len(widths)
    views = np.zeros((n, 7))
    if uniforms is None or epochs is None or config.augment in ("none", "shift"):
        if whole:
            views[:, 2], views[:, 3] = widths, heights
        else:
            views[:, :4] = _resized_crop_boxes(widths, heights, config.eval_resize, config.eval_size, None)
    elif config.augment == "random_resized_crop":
        views[:, :4] = _random_area_boxes(config, widths, heights, uniforms[:, _GEOMETRY:])
        if config.full_crop_from_epoch is not None:
            for i in np.flatnonzero(epochs >= config.full_crop_from_epoch):
                views[i, :4] = _near_full_box(config, int(widths[i]), int(heights[i]), uniforms[i, _GEOMETRY:].tolist())
    else:
        u = uniforms[:, _GEOMETRY:]
        low, high = config.jitter_sides
        jitter = config.augment == "scale_jitter"
        sides = low + (u[:, 2] * (high - low + 1)).astype(np.int64) if jitter else config.eval_resize
        views[:, :4] = _resized_crop_boxes(widths, heights, sides, config.image_size, u)
    if uniforms is not None:
        if config.augment == "shift":
            views[:, 4:6] = shifts(config, uniforms)
        views[:, 6] = flips(config, uniforms)
    return views


def shifts(config: DataConfig, uniforms: np.ndarray | Sequence[float]) -> np.ndarray:
    """Returns (dx, dy) of the `shift` augmentation: whole pixels in [-shift_pixels, shift_pixels]. `uniforms` may be
    one row or many."""
    u = np.asarray(uniforms)[..., _GEOMETRY : _GEOMETRY + 2]
    return (u * (2 * config.shift_pixels + 1)).astype(np.int64) - config.shift_pixels


def color_noise(config: DataConfig, uniforms: np.ndarray) -> np.ndarray:
    """Returns float64[n, 3], to be added to pixels in [0, 1]: normal steps along the principal axes of ImageNet's
    colours."""
    u = uniforms[:, _NOISE : _NOISE + 4]
    # The Box-Muller transform gives two normals from the first pair of uniforms and one from the second pair.
    radius = np.sqrt(-2 * np.log1p(-u[:, [0, 0, 2]]))
    normals = radius * np.stack(
        [np.cos(2 * np.pi * u[:, 1]), np.sin(2 * np.pi * u[:, 1]), np.cos(2 * np.pi * u[:, 3])], axis=1
    )
    return (config.color_noise * normals * _PCA_VALUES) @ _PCA_AXES.T


def flips(config: DataConfig, uniforms: np.ndarray) -> np.ndarray:
    """Returns bool[n]: whether each view is mirrored."""
    return uniforms[:, _FLIP] < 0.5 if config.flip else np.zeros(len(uniforms), dtype=bool)


def jitter(config: DataConfig, uniforms: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (contrast, brightness), float64[n] each. Normalised pixels are multiplied by the contrast, and then the
    brightness is added."""
    if not has_jitter(config):
        return np.ones(len(uniforms)), np.zeros(len(uniforms))
    column = jitter_column(config)
    brightness, contrast = (2 * uniforms[:, column : column + 2] - 1).T
    return 1 + config.contrast_jitter * contrast, config.brightness_jitter * brightness


def has_jitter(config: DataConfig) -> bool:
    return bool(config.brightness_jitter or config.contrast_jitter)


def jitter_column(config: DataConfig) -> int:
    """Returns the column of brightness in the uniforms, after those of the geometry. The column of contrast follows."""
    geometry = {"none": 0, "shift": 2, "random_resized_crop": 4 * _CROP_ATTEMPTS, "scale_jitter": 3}
    return _GEOMETRY + geometry.get(config.augment, 2)


def operation_column(config: DataConfig) -> int:
    """Returns the column of the first operation in the uniforms. The operation's other columns follow. The two columns
    of the jitter are always reserved."""
    return jitter_column(config) + 2


def cutout_side(config: DataConfig, size: int) -> int:
    """Returns the side of the square that is cut out of views of this size. It covers the same share of a view at every
    size."""
    return round(config.cutout * size / config.image_size)


def cutout_corners(config: DataConfig, uniforms: np.ndarray, size: int) -> np.ndarray:
    """Returns int64[n, 2]: left and top of each view's square, which lies inside the view."""
    column = cutout_column(config)
    return (uniforms[:, column : column + 2] * (size - cutout_side(config, size) + 1)).astype(np.int64)


def cutout_column(config: DataConfig) -> int:
    """Returns the column of the corner's left in the uniforms, after the columns reserved for the operations. The
    column of its top follows."""
    operations = RAND_COLUMNS * config.rand_ops if config.auto_augment == "rand" else _TRIVIAL_COLUMNS
    return operation_column(config) + operations


def _reflected(places: np.ndarray, size: int) -> np.ndarray:
    """Folds places beyond the edge back at the outermost pixels. No place is further out than the image is wide."""
    places = np.abs(places)
    return np.where(places < size, places, 2 * (size - 1) - places)


def _random_area_box(config: DataConfig, width: int, height: int, u: Sequence[float]) -> Box:
    """Inception's crop: area and aspect are drawn until they fit (in whole pixels, as in torchvision). If no attempt
    fits, it is the centre crop."""
    area_low, area_high = config.crop_area
    aspect_low, aspect_high = config.crop_aspect
    for attempt in range(_CROP_ATTEMPTS):
        ua, ur, ux, uy = u[4 * attempt : 4 * attempt + 4]
        area = width * height * (area_low + ua * (area_high - area_low))
        aspect = math.exp(math.log(aspect_low) + ur * math.log(aspect_high / aspect_low))
        w, h = round(math.sqrt(area * aspect)), round(math.sqrt(area / aspect))
        if 0 < w <= width and 0 < h <= height:
            left, top = int(ux * (width - w + 1)), int(uy * (height - h + 1))
            return (left, top, left + w, top + h)
    return _centre_box(config, width, height)


def _random_area_boxes(config: DataConfig, widths: np.ndarray, heights: np.ndarray, u: np.ndarray) -> np.ndarray:
    """`_random_area_box` for many images: each attempt is made for the images that have no box yet."""
    boxes = np.zeros((len(widths), 4))
    area_low, area_high = config.crop_area
    log_low, log_range = math.log(config.crop_aspect[0]), math.log(config.crop_aspect[1] / config.crop_aspect[0])
    rest = np.arange(len(widths))
    for attempt in range(_CROP_ATTEMPTS):
        ua, ur, ux, uy = u[rest, 4 * attempt : 4 * attempt + 4].T
        width, height = widths[rest], heights[rest]
        area = width * height * (area_low + ua * (area_high - area_low))
        # `math.exp`, because numpy's exp may differ in the last bit, which can move a crop by a pixel.
        aspect = np.array([math.exp(log_low + r * log_range) for r in ur.tolist()])
        w, h = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
        left, top = np.floor(ux * (width - w + 1)), np.floor(uy * (height - h + 1))
        fits = (w > 0) & (w <= width) & (h > 0) & (h <= height)
        boxes[rest[fits]] = np.stack([left, top, left + w, top + h], axis=1)[fits]
        rest = rest[~fits]
        if not len(rest):
            return boxes
    for i in rest.tolist():
        boxes[i] = _centre_box(config, int(widths[i]), int(heights[i]))
    return boxes


def _centre_box(config: DataConfig, width: int, height: int) -> Box:
    w, h = _largest_of_aspect(config, width, height)
    left, top = (width - w) / 2, (height - h) / 2
    return (left, top, left + w, top + h)


def _near_full_box(config: DataConfig, width: int, height: int, u: Sequence[float]) -> Box:
    """Returns almost all of the image, at the image's own aspect if it is within the crop's range."""
    scale = math.sqrt(_NEAR_FULL_AREA + u[0] * (1 - _NEAR_FULL_AREA))
    w, h = (side * scale for side in _largest_of_aspect(config, width, height))
    left, top = u[2] * (width - w), u[3] * (height - h)
    return (left, top, left + w, top + h)


def _largest_of_aspect(config: DataConfig, width: int, height: int) -> tuple[float, float]:
    aspect = min(max(width / height, config.crop_aspect[0]), config.crop_aspect[1])
    return min(width, height * aspect), min(height, width / aspect)


def _resized_crop_box(width: int, height: int, short_side: int, crop: int, ux: float | None, uy: float | None) -> Box:
    """Returns the part of the image that a crop x crop window covers after the shorter side is resized to `short_side`.

    The window lies on whole pixels of the resized image, at random or (for None) in the centre. It is rounded as in
    torchvision, so that resizing this box alone gives the same pixels as resizing everything and then cropping.
    """
    if width <= height:
        w, h = short_side, max(short_side, int(short_side * height / width))
    else:
        w, h = max(short_side, int(short_side * width / height)), short_side
    side = min(crop, short_side)
    left = round((w - side) / 2) if ux is None else int(ux * (w - side + 1))
    top = round((h - side) / 2) if uy is None else int(uy * (h - side + 1))
    x_scale, y_scale = width / w, height / h
    return (left * x_scale, top * y_scale, (left + side) * x_scale, (top + side) * y_scale)


def _resized_crop_boxes(
    widths: np.ndarray, heights: np.ndarray, short_sides: np.ndarray | int, crop: int, u: np.ndarray | None
) -> np.ndarray:
    """`_resized_crop_box` for many images. Without `u`, the windows are in the centre."""
    long_sides = np.where(widths <= heights, short_sides * heights / widths, short_sides * widths / heights)
    long_sides = np.maximum(short_sides, long_sides.astype(np.int64))
    w = np.where(widths <= heights, short_sides, long_sides)
    h = np.where(widths <= heights, long_sides, short_sides)
    side = np.minimum(crop, short_sides)
    left = np.rint((w - side) / 2) if u is None else np.floor(u[:, 0] * (w - side + 1))
    top = np.rint((h - side) / 2) if u is None else np.floor(u[:, 1] * (h - side + 1))
    x_scale, y_scale = widths / w, heights / h
    return np.stack([left * x_scale, top * y_scale, (left + side) * x_scale, (top + side) * y_scale], axis=1)
