"""TrivialAugment and RandAugment against Pillow, operation by operation, and through the loader."""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from hopper import compile_launches
from interpreter import inside, outside, run_by_the_interpreter
from PIL import Image, ImageEnhance, ImageOps

from hyperbatch.config import BatchPhase, Config, DataConfig
from hyperbatch.data import rand_augment, trivial
from hyperbatch.data.augment import check_options, operation_column
from hyperbatch.data.batch import StreamPlan
from hyperbatch.data.cache import DeviceCache
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import ArraySource
from hyperbatch.data.stream import Stretches
from hyperbatch.data.trivial import OPERATIONS, STRENGTHS, Drawn
from hyperbatch.errors import InputError
from hyperbatch.schedule import resolve_phases, steps

CPU = torch.device("cpu")
NAMES = list(OPERATIONS)
CONFIG = DataConfig(image_size=16, eval_size=16, augment="shift", shift_pixels=2, auto_augment="trivial")


@outside
def test_the_device_path_by_the_interpreter():
    run_by_the_interpreter(__file__)


def photos(channels=3, height=24, width=31):
    """A noisy one, one of few levels, a dark one, and one of a single colour."""
    rng = np.random.default_rng(channels)
    noisy = rng.integers(0, 256, (height, width, channels))
    few = rng.integers(3, 6, (height, width, channels)) * 30
    dark = rng.integers(10, 40, (height, width, channels))
    return np.stack([noisy, few, dark, np.full_like(noisy, 77)]).astype(np.uint8)


def arguments_of(name):
    """All that can be drawn for an operation."""
    index = NAMES.index(name)
    uniforms = np.array(
        [
            ((index + 0.5) / len(NAMES), (strength + 0.5) / STRENGTHS, sign)
            for strength in range(STRENGTHS)
            for sign in (0.0, 0.9)
        ]
    )
    drawn = trivial.draw(uniforms)
    assert (drawn.operations == index).all()
    return sorted(set(drawn.arguments.tolist()))


def by_pillow(image, name, argument):
    """As torchvision's `_apply_op` calls Pillow."""
    enhance = {
        "Brightness": ImageEnhance.Brightness,
        "Color": ImageEnhance.Color,
        "Contrast": ImageEnhance.Contrast,
        "Sharpness": ImageEnhance.Sharpness,
    }
    if name in enhance:
        return enhance[name](image).enhance(1 + argument)
    if name == "Posterize":
        return ImageOps.posterize(image, int(argument))
    if name == "Solarize":
        return ImageOps.solarize(image, argument)
    return {"AutoContrast": ImageOps.autocontrast, "Equalize": ImageOps.equalize, "Identity": lambda i: i}[name](image)


@outside
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "name",
    ["Identity", "Brightness", "Color", "Contrast", "Sharpness", "Posterize", "Solarize", "AutoContrast", "Equalize"],
)
def test_colours_are_pillows(name, channels):
    pictures = photos(channels)
    for argument in arguments_of(name):
        operations = np.full(len(pictures), NAMES.index(name))
        found = trivial.apply(torch.from_numpy(pictures), Drawn(operations, np.full(len(pictures), argument)))
        for picture, result in zip(pictures, found.numpy(), strict=True):
            image = Image.fromarray(picture.squeeze(2) if channels == 1 else picture)
            expected = np.asarray(by_pillow(image, name, argument)).reshape(picture.shape)
            np.testing.assert_array_equal(result, expected, err_msg=f"{name} {argument}")


def coefficients(name, argument, width, height):
    """Pillow's affine coefficients of torchvision's geometry, and the same as a function of edge coordinates."""
    if name == "Rotate":
        angle = np.deg2rad(argument)
        cos, sin = np.cos(angle), np.sin(angle)
        x, y = width / 2, height / 2
        return (cos, -sin, x - cos * x + sin * y, sin, cos, y - sin * x - cos * y)
    whole = int(argument)
    return {
        "ShearX": (1, argument, 0, 0, 1, 0),
        "ShearY": (1, 0, 0, argument, 1, 0),
        "TranslateX": (1, 0, -whole, 0, 1, 0),
        "TranslateY": (1, 0, 0, 0, 1, -whole),
    }[name]


@outside
@pytest.mark.parametrize("name", ["ShearX", "ShearY", "TranslateX", "TranslateY", "Rotate"])
def test_geometry_is_pillows(name):
    picture = photos()[0]
    height, width, _ = picture.shape
    y, x = np.mgrid[:height, :width] + 0.5
    for argument in arguments_of(name):
        drawn = Drawn(np.array([NAMES.index(name)]), np.array([argument]))
        found = trivial.apply(torch.from_numpy(picture[None]), drawn)[0].numpy()
        a, b, c, d, e, f = coefficients(name, argument, width, height)
        image = Image.fromarray(picture)
        expected = image.transform(image.size, Image.Transform.AFFINE, (a, b, c, d, e, f))
        differ = (found != np.asarray(expected)).any(axis=2)
        # Pillow counts in 1/65536 of a pixel: where a source coordinate lies on an edge, either neighbour is right.
        edge = [np.abs(at - np.rint(at)) < 1e-3 for at in (a * x + b * y + c, d * x + e * y + f)]
        assert not (differ & ~(edge[0] | edge[1])).any(), (name, argument)
        if name.startswith("Translate"):
            assert not differ.any()


@outside
def test_rotation_turns_as_pillow_does():
    picture = photos(height=20, width=20)[0]
    found = trivial.apply(torch.from_numpy(picture[None]), Drawn(np.array([NAMES.index("Rotate")]), np.array([90.0])))
    np.testing.assert_array_equal(found[0].numpy(), np.asarray(Image.fromarray(picture).rotate(90)))


@outside
def test_every_operation_and_strength_is_drawn_equally_often():
    uniforms = np.random.default_rng(0).random((28_000, 3))
    drawn = trivial.draw(uniforms)
    counts = np.bincount(drawn.operations, minlength=14)
    assert len(NAMES) == 14
    assert counts.min() > 1800
    assert counts.max() < 2200
    largest = {name: np.abs(drawn.arguments[drawn.operations == i]).max() for i, name in enumerate(NAMES)}
    assert [largest[name] for name in ("ShearX", "TranslateY", "Rotate", "Color")] == [0.99, 32, 135, 0.99]
    posterized = drawn.arguments[drawn.operations == NAMES.index("Posterize")]
    # torchvision: 8 - (torch.arange(31) / ((31 - 1) / 6)).round().int()
    assert set(posterized) == set((8 - (torch.arange(31) / 5).round()).tolist())
    signs = np.sign(drawn.arguments[drawn.operations == NAMES.index("Rotate")])
    assert 0.4 < (signs > 0).mean() < 0.6


@outside
@pytest.mark.parametrize("magnitude", range(31))
def test_rand_augments_strengths_are_torchvisions(magnitude):
    """Written down from torchvision's RandAugment._augmentation_space of 31 bins, for images of 224 pixels."""
    bins = 31
    space = {
        "Identity": 0.0,
        "ShearX": torch.linspace(0.0, 0.3, bins)[magnitude].item(),
        "ShearY": torch.linspace(0.0, 0.3, bins)[magnitude].item(),
        "TranslateX": torch.linspace(0.0, 150.0 / 331.0 * 224, bins)[magnitude].item(),
        "TranslateY": torch.linspace(0.0, 150.0 / 331.0 * 224, bins)[magnitude].item(),
        "Rotate": torch.linspace(0.0, 30.0, bins)[magnitude].item(),
        "Brightness": torch.linspace(0.0, 0.9, bins)[magnitude].item(),
        "Color": torch.linspace(0.0, 0.9, bins)[magnitude].item(),
        "Contrast": torch.linspace(0.0, 0.9, bins)[magnitude].item(),
        "Sharpness": torch.linspace(0.0, 0.9, bins)[magnitude].item(),
        "Posterize": (8 - (torch.arange(bins) / ((bins - 1) / 4)).round().int())[magnitude].item(),
        "Solarize": torch.linspace(255.0, 0.0, bins)[magnitude].item(),
        "AutoContrast": 0.0,
        "Equalize": 0.0,
    }
    places = (np.arange(len(NAMES)) + 0.5) / len(NAMES)
    for sign in (0.9, 0.1):
        uniforms = np.stack([places, np.full(14, sign)], axis=1)
        (drawn,) = rand_augment.draw(uniforms, 1, magnitude, 224)
        assert drawn.operations.tolist() == list(range(14))
        signed = {"Identity", "Posterize", "Solarize", "AutoContrast", "Equalize"}.isdisjoint
        expected = [value * (-1 if sign < 0.5 and signed([name]) else 1) for name, value in space.items()]
        assert drawn.arguments.tolist() == pytest.approx(expected, rel=1e-6, abs=1e-5)


@outside
def test_rand_augment_applies_its_operations_one_after_the_other():
    picture = photos()[0]
    chain = ("Posterize", "Color", "Solarize")
    uniforms = np.array([[value for name in chain for value in ((NAMES.index(name) + 0.5) / 14, 0.2)]])
    maker, config = on_device(dataclasses.replace(CONFIG, auto_augment="rand", rand_ops=3, rand_magnitude=12), arrays())
    column = operation_column(config)

    class Plan:
        training = True

    plan = Plan()
    plan.uniforms = np.concatenate([np.zeros((1, column)), uniforms], axis=1)
    found = maker.retouched(plan, torch.from_numpy(picture[None]))[0].numpy()
    image = Image.fromarray(picture)
    for name, argument in zip(chain, (8 - round(12 / 7.5), -0.9 * 12 / 30, 255 * (1 - 12 / 30)), strict=True):
        image = by_pillow(image, name, argument)
    np.testing.assert_array_equal(found, np.asarray(image))


@outside
def test_rand_augment_draws_every_operation_equally_often():
    first, second = rand_augment.draw(np.random.default_rng(0).random((28_000, 4)), 2, 30, 32)
    for drawn in (first, second):
        counts = np.bincount(drawn.operations, minlength=14)
        assert counts.min() > 1800
        assert counts.max() < 2200
    assert (first.operations == second.operations).mean() < 0.1  # drawn apart
    signs = first.arguments[first.operations == NAMES.index("Rotate")]
    assert set(signs) == {-30.0, 30.0}
    with pytest.raises(InputError, match="--rand-magnitude 31: must be at most 30"):
        Config().override(rand_magnitude=31)


@outside
def test_other_channels_are_refused():
    with pytest.raises(InputError, match="--auto-augment trivial: needs grey or RGB images, these have 4 channels"):
        check_options(CONFIG, 4, whole=True)


# --- through the loader


@outside
@pytest.mark.parametrize("size", [16, 12])
def test_kernels_write_grey_levels_on_hopper(monkeypatch, size):
    pytest.importorskip("triton")
    from hyperbatch.kernels import augment as kernels

    compiled = compile_launches(monkeypatch, kernels)
    maker, config = on_device(dataclasses.replace(CONFIG, image_size=size), arrays())
    plan = StreamPlan(places=Stretches.single(0, 7), length=40, seed=2, config=config, size=size)
    next(maker.run(iter([plan])))
    assert re.search(r"st\.global(\.v\d)?\.b(8|32)", compiled["cut_kernel" if size == 16 else "views_kernel"])


def on_device(config, source, whole=True):
    cache = None
    if whole:
        cache = DeviceCache(len(source), source.images.nbytes)
        cache.put_array(source, CPU)
    maker = DeviceMaker(
        source, config, device=CPU, dtype=torch.float32, decoder="pillow", cpu_decoder="pillow", cache=cache
    )
    return maker, config


def arrays(n=40, size=16):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, size, size, 3), dtype=np.uint8)
    return ArraySource("array", images, rng.integers(0, 10, n), classes=tuple(map(str, range(10))))


def loaded(config, source, world_size=1):
    phases = resolve_phases((BatchPhase(0, 20),), len(source), world_size)
    todo = list(steps(phases, len(source), 4))[:4]
    found = []
    for rank in range(world_size):
        loader = TrainLoader(source, config, seed=2, rank=rank, world_size=world_size, device=CPU, dtype=torch.float32)
        with loader:
            found.append([batch.images for batch in loader.batches(todo)])
    return [torch.cat(parts) for parts in zip(*found, strict=True)], todo


@outside
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"augment": "random_resized_crop"},
        {"brightness_jitter": 0.2},
        {"auto_augment": "rand", "rand_magnitude": 20, "augment": "random_resized_crop"},
    ],
)
def test_views_depend_on_the_sample_and_epoch_alone(values):
    config, source = dataclasses.replace(CONFIG, **values), arrays()
    whole, _ = loaded(config, source)
    parts, _ = loaded(config, source, world_size=2)
    plain, _ = loaded(dataclasses.replace(config, auto_augment="none"), source)
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))
    changed = [((a - c).abs().flatten(1).amax(1) > 1e-3) for a, c in zip(whole, plain, strict=True)]
    share = torch.cat(changed).float().mean()
    assert share > 0.6
    # One in fourteen is the identity, some others change nothing; two in a row hardly ever are.
    assert share < 1 or config.auto_augment == "rand"


@inside
def test_the_device_makes_the_hosts_views_with_rand_augment():
    config, source = dataclasses.replace(CONFIG, auto_augment="rand", rand_magnitude=20), arrays()
    expected, todo = loaded(config, source)
    maker, _ = on_device(config, source)
    with TrainLoader(source, config, seed=2, rank=0, world_size=1, device=CPU, dtype=torch.float32) as loader:
        found = [batch.images for batch, _ in maker.run(loader._plans(todo[:1], 0))]
    torch.testing.assert_close(found[0], expected[0], rtol=1e-5, atol=1e-5)


@inside
@pytest.mark.parametrize("size", [16, 12])
def test_the_device_makes_the_hosts_views(size):
    """At the images' own size exactly; resized, the host rounds twice: to a level, where no operation stretches it."""
    config, source = dataclasses.replace(CONFIG, image_size=size, brightness_jitter=0.2, cutout=5), arrays()
    expected, todo = loaded(config, source)
    expected, todo = expected[:1], todo[:1]
    for whole in (True, False):
        maker, _ = on_device(config, source, whole)
        loader = TrainLoader(source, config, seed=2, rank=0, world_size=1, device=CPU, dtype=torch.float32)
        with loader:
            found = [batch.images for batch, _ in maker.run(loader._plans(todo, 0))]
            plans = list(loader._plans(todo, 0))
        for host, device, plan in zip(expected, found, plans, strict=True):
            if size == 16:
                torch.testing.assert_close(device, host, rtol=1e-5, atol=1e-5)
                continue
            moved = trivial.draw(plan.uniforms[:, operation_column(config) :]).operations <= NAMES.index("Rotate")
            assert moved.sum() > 1
            level = float(1 / (255 * np.min(source.std)))
            torch.testing.assert_close(device[moved], host[moved], rtol=0, atol=1.001 * level)
