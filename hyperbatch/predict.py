"""Classifies images with a trained model: files, folders of them, or pixels in memory.

    classifier = load_model("runs/flowers")                 a run, a checkpoint, or an exported .safetensors file
    classifier.predict(["rose.jpg"])[0].top                 [("rose", 0.97), ("tulip", 0.02), ...]

Images are preprocessed as in evaluation: decoded exactly, resized, cropped to their centre, normalised. Threads prepare
the next batch while the model processes the current one.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from hyperbatch.config import Config, DataConfig
from hyperbatch.data import augment
from hyperbatch.data.decode import as_rgb, choose_decoder, decode_full, decode_view, render_array
from hyperbatch.data.folders import FolderTree
from hyperbatch.data.remote.store import is_address
from hyperbatch.data.source import BadSample
from hyperbatch.errors import InputError, check_kind, check_whole, shown
from hyperbatch.export import TrainedModel, load_trained
from hyperbatch.models.layers import to_channels_last

BATCH = 64  # images per batch

Picture = str | os.PathLike[str] | np.ndarray | Image.Image  # a file, uint8[height, width(, channels)], or Pillow's


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The most probable classes of one image, the most probable first."""

    image: str  # the file's path; for pixels, the index among the given images
    top: tuple[tuple[str, float], ...] = ()  # (class, probability)
    error: str = ""  # why the image could not be read; `top` is then empty

    def to_dict(self) -> dict[str, Any]:
        top = [{"class": name, "probability": probability} for name, probability in self.top]
        return {"image": self.image, "top": top} | ({"error": self.error} if self.error else {})


@dataclass(frozen=True, kw_only=True, slots=True)
class Preprocessing:
    """The preprocessing of images for a model. A call returns normalised float32[channels, size, size]."""

    size: int  # side length in pixels
    resize: int | None  # shorter side before the centre is cropped; None: the whole image is resized to size x size
    channels: int
    mean: tuple[float, ...]  # of pixels in [0, 1]
    std: tuple[float, ...]

    def __call__(self, image: Picture) -> Tensor:
        return self.normalised(torch.from_numpy(self.pixels(image)[None].copy()))[0]

    def pixels(self, image: Picture) -> np.ndarray:
        """Returns uint8[size, size, channels]. Raises BadSample if a file cannot be read, and InputError if the pixels
        have a wrong type or shape."""
        if isinstance(image, str | os.PathLike):
            where = os.fspath(image)
            try:
                data = Path(where).read_bytes()
            except OSError as error:
                raise BadSample(f"{where}: {error.strerror}") from error
            if self.channels == 3:
                return decode_view(data, where, self._view, self.size, decoder=choose_decoder("auto"), exact=True)
            found = decode_full(data, where)
        else:
            found = np.asarray(as_rgb(image) if isinstance(image, Image.Image) else image)
        found = self._in_channels(found)
        return render_array(found, self._view(found.shape[1], found.shape[0]), self.size)

    def normalised(self, pixels: Tensor) -> Tensor:
        """Converts uint8[n, size, size, channels] to float32[n, channels, size, size], on the device of the pixels."""
        std = np.asarray(self.std)
        scale, offset = (torch.from_numpy(v).float() for v in (1 / (255 * std), -np.asarray(self.mean) / std))
        wide = pixels.float() * scale.to(pixels.device) + offset.to(pixels.device)
        return wide.permute(0, 3, 1, 2)  # in channels-last memory, as in training

    def _view(self, width: int, height: int) -> augment.View:
        config = DataConfig(eval_size=self.size, eval_resize=self.resize or self.size)
        return augment.eval_view(config, width, height, whole=self.resize is None)

    def _in_channels(self, found: np.ndarray) -> np.ndarray:
        """Converts the channels: grey is repeated for models of colour images, and colours are converted to grey for
        models of grey images."""
        if found.ndim == 2:
            found = found[:, :, None]
        if found.dtype != np.uint8 or found.ndim != 3 or not found.size:
            raise InputError(f"pixels must be uint8[height, width, channels], got {found.dtype}{list(found.shape)}")
        given = found.shape[2]
        if given == self.channels:
            return np.ascontiguousarray(found)
        if (given, self.channels) == (1, 3):
            return found.repeat(3, axis=2)
        if (given, self.channels) == (3, 1):
            return np.asarray(Image.fromarray(np.ascontiguousarray(found)).convert("L"))[:, :, None]
        raise InputError(f"the model takes images of {self.channels} channels, this one has {given}")


class Classifier:
    """A trained model with its preprocessing and the names of its classes."""

    def __init__(self, trained: TrainedModel, device: torch.device, *, trust_code: bool = False) -> None:
        if not trained.mean:
            raise InputError(
                f"{trained.path} has no normalisation of its images, because an older version wrote it; train one more "
                "step with --resume"
            )
        self.config: Config = trained.config
        self.classes: tuple[str, ...] = trained.classes
        self.preprocess = Preprocessing(
            size=trained.size, resize=trained.resize, channels=trained.channels, mean=trained.mean, std=trained.std
        )
        model = trained.build(trust_code=trust_code)
        self.model: nn.Module = to_channels_last(model.to(device))
        self.device = device

    def predict(self, images: Picture | Iterable[Picture], *, top: int = 5) -> list[Prediction]:
        """Returns the `top` most probable classes of each image: a path, pixels, or several of them (see `stream`)."""
        single = isinstance(images, str | os.PathLike | Image.Image) or (
            isinstance(images, np.ndarray) and images.ndim <= 3
        )
        several: Any = [images] if single else images
        check_kind("images", several, Iterable, "give a path, pixels or a list of them")
        return list(self.stream(several, top=top))

    def stream(self, images: Iterable[Picture], *, top: int = 5) -> Iterator[Prediction]:
        """Yields the predictions one by one, in order, for more images than fit into memory. The prediction of a file
        that cannot be read has an `error` instead of classes."""
        check_whole("top", top)
        count = min(top, len(self.classes))
        numbered, make = enumerate(images), self.preprocess.pixels
        with ThreadPoolExecutor(thread_name_prefix="hyperbatch-images") as pool:

            def start() -> list[tuple[str, Future[np.ndarray]]]:
                """Starts the next batch. Returns its names, and futures of the pixels, which threads prepare."""
                return [
                    (
                        os.fspath(image) if isinstance(image, str | os.PathLike) else str(number),
                        pool.submit(make, image),
                    )
                    for number, image in itertools.islice(numbered, BATCH)
                ]

            batch = start()
            while batch:
                ahead = start()
                yield from self._answers(batch, count)
                batch = ahead

    def _answers(self, batch: Sequence[tuple[str, Future[np.ndarray]]], count: int) -> Iterator[Prediction]:
        pixels, errors = [], {}
        for place, (_, made) in enumerate(batch):
            try:
                pixels.append(made.result())
            except BadSample as error:
                errors[place] = str(error)
        answers: Iterator[tuple[list[float], list[int]]] = iter(())
        if pixels:
            with torch.no_grad():
                images = self.preprocess.normalised(torch.from_numpy(np.stack(pixels)).to(self.device))
                shares = self.model(images).float().softmax(1)
                best = shares[:, : len(self.classes)].topk(count, dim=1)  # a network may have more outputs than classes
            answers = zip(best.values.tolist(), best.indices.tolist(), strict=True)
        for place, (name, _) in enumerate(batch):
            if place in errors:
                yield Prediction(image=name, error=errors[place])
            else:
                top = zip(*next(answers), strict=True)
                yield Prediction(image=name, top=tuple((self.classes[index], share) for share, index in top))


def load_model(
    path: str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    averaged: bool = True,
    trust_code: bool = False,
) -> Classifier:
    """Loads the model of a run's folder, of a checkpoint, or of a .safetensors file that `hyperbatch export` wrote.

    device: "auto" uses a GPU if there is one. averaged: for a run with --averaging ema, whether to use the averaged
    weights or the trained ones. trust_code: allows importing the code of a custom model (package.module:callable).
    """
    check_kind("path", path, (str, os.PathLike), "give the folder of a run, a checkpoint or an exported model")
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError):
        raise InputError(f"device is {shown(device)}; give auto, cpu, cuda or a torch.device") from None
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no GPU here; use --device cpu or check the driver")
    return Classifier(load_trained(Path(path), averaged=averaged), place, trust_code=trust_code)


def find_images(paths: Iterable[str | os.PathLike[str]]) -> list[str]:
    """Returns the given files, and the images in the given folders at any depth, in order."""
    found = []
    for given in paths:
        path = Path(given)
        if path.is_dir():
            inside = [str(path / name) for name in FolderTree(path).images()]
            if not inside:
                raise InputError(f"{path} has no images")
            found += inside
        elif path.exists():
            found.append(str(path))
        elif is_address(given):
            raise InputError(f"{given} is an address; fetch the image first, and give the file")
        else:
            raise InputError(f"{path} does not exist; give image files or folders of them")
    return found
