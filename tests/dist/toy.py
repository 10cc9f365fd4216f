"""A model without batch norm, one with it, and a small data set: what the training tests train."""

import io
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from hyperbatch import checkpoint
from hyperbatch.config import BatchPhase, Config
from hyperbatch.data.source import ArraySource, EncodedSource
from hyperbatch.errors import InputError
from hyperbatch.models.whitenet import WhiteNet


def data(config):
    """Four classes of noisy 8x8 images; 240 to train on, 50 to validate on."""
    generator = np.random.default_rng(7)
    # One bright quadrant per class: a shift by a pixel leaves it recognisable.
    prototypes = np.kron(np.eye(4).reshape(4, 2, 2), np.ones((1, 4, 4)))[..., None] * 120 + 60

    def split(name, count):
        labels = np.arange(count) % 4
        images = prototypes[labels] + generator.normal(0, 40, size=(count, 8, 8, 1))
        images = images.clip(0, 255).astype(np.uint8)
        return ArraySource(name, images, labels.astype(np.int64), classes=("a", "b", "c", "d"))

    return split("train", 240), split("val", 50)


def renamed(config):
    """The same images under other names of their classes."""
    parts = data(config)
    for part in parts:
        part.classes = ("e", "f", "g", "h")
    return parts


class Files(EncodedSource):
    """8x8 PNGs of four classes; every tenth is none."""

    def __init__(self, name, count):
        super().__init__(name, ("a", "b", "c", "d"), np.arange(count) % 4)
        self.bad = [self.describe(index) for index in range(0, count, 10)]

    def read(self, index):
        if index % 10 == 0:
            return b"not an image"
        file = io.BytesIO()
        Image.new("RGB", (8, 8), (60 * int(self.labels[index]), 0, 0)).save(file, "PNG")
        return file.getvalue()


def files(config):
    return Files("train", 240), Files("val", 50)


def data_on_rank_0(config):
    if torch.distributed.get_rank() != 0:
        raise InputError("the data is not on this host")
    return data(config)


def data_without_a_sample_on_rank_1(config):
    train, val = data(config)
    if torch.distributed.get_rank() != 1:
        return train, val
    return ArraySource(train.name, train.images[1:], train.labels[1:], classes=train.classes), val


def plain(classes, in_channels):
    """No batch norm: every sample is independent of the others, so splitting a batch changes nothing but rounding."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1),
        nn.Tanh(),
        nn.Conv2d(8, 8, 3, padding=1, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8 * 16, 16),
        nn.Tanh(),
        nn.Linear(16, classes),
    )


def normed(classes, in_channels):
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Dropout(0.1),
        nn.Flatten(),
        nn.Linear(8 * 64, classes),
    )


class Masked(nn.Module):
    """A part of its input counts for nothing, by a buffer that is in no state dict."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.norm = nn.BatchNorm2d(in_channels)
        self.head = nn.Linear(64 * in_channels, classes)
        mask = torch.where(torch.arange(64 * in_channels) < 8, -torch.inf, 0.0)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, x):
        return self.head(torch.sigmoid(self.norm(x).flatten(1) + self.mask))


class Centred(nn.Module):
    """Takes a running mean off its input, and keeps it in a new tensor at each step."""

    def __init__(self, classes, in_channels):
        super().__init__()
        self.head = nn.Linear(64 * in_channels, classes)
        self.register_buffer("mean", torch.ones(64 * in_channels))

    def forward(self, x):
        x = x.flatten(1)
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.head(x - self.mean)


class Dropping(nn.Module):
    """Dropout and stochastic depth at rates that a config sets; it keeps what was dropped in training."""

    def __init__(self, classes, in_channels, dropout=0.5, drop_path=0.25):
        super().__init__()
        self.inputs = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.branch = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.Tanh(), nn.Dropout(dropout))
        self.head = nn.Linear(8 * 64, classes)
        self.drop_path, self.dropped = drop_path, []

    def forward(self, x):
        x = torch.tanh(self.inputs(x))
        branch = self.branch(x)
        if self.training and self.drop_path:
            kept = torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(1 - self.drop_path)
            branch = branch * (kept / (1 - self.drop_path))
        if self.training and len(x) > 2:  # the probe of a run has two
            self.dropped.append((branch == 0).detach().cpu())
        return self.head((x + branch).flatten(1))


def config(**values):
    """A few steps of LARS on the toy data."""
    defaults = {
        "dataset": "toy:data",
        "model": "toy:plain",
        "image_size": 8,
        "eval_size": 8,
        "eval_resize": 8,
        "augment": "shift",
        "shift_pixels": 1,
        "flip": False,
        "epochs": 4.0,
        "warmup_epochs": 1.0,
        "batch_phases": (BatchPhase(0, 24), BatchPhase(2, 48)),
        "lr": 0.3,
        "trust_coefficient": 0.05,  # biases take the plain rate, so it stays small
        "weight_decay": 1e-3,
        "eval_every_epochs": 1.0,
        "group_base": 1,
        "device": "cpu",
    }
    return Config(recipe="toy").override(**{**defaults, **values})


def flat_weights(folder):
    """Weights, batch-norm statistics of each rank and optimizer state of a run's newest checkpoint, by name."""
    saved = checkpoint.load(Path(folder))
    norm = {f"norm.{name}": tensor for name, tensor in saved.norm.items()}
    return {**saved.model, **norm, **{f"optimizer.{name}": tensor for name, tensor in saved.optimizer.items()}}


def same_bits(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def pooled(classes, in_channels):
    """Takes images of any size."""
    return nn.Sequential(
        nn.Conv2d(in_channels, 8, 3, padding=1),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4, classes),
    )


def whitened(classes, in_channels):
    """A whitening layer whose filters are frozen, as whitenet's; 2x2 patches of one channel have 4 elements."""
    model = nn.Sequential(
        nn.Conv2d(in_channels, 8 * in_channels, 2),
        nn.Tanh(),
        nn.BatchNorm2d(8 * in_channels),
        nn.Flatten(),
        nn.Linear(8 * in_channels * 49, classes),
    )
    model[0].weight.requires_grad_(False)
    model[2].weight.requires_grad_(False)
    return model


def whitened_and_trained(classes, in_channels):
    model = whitened(classes, in_channels)
    model[0].weight.requires_grad_(True)
    return model


def apart(classes, in_channels):
    """Its frozen parameters differ from rank to rank."""
    model = whitened(classes, in_channels).to(memory_format=torch.channels_last)
    for param in model.parameters():
        if not param.requires_grad:
            param.data.add_(torch.distributed.get_rank())
    return model


def narrow_deep(classes, in_channels):
    """`whitenet_deep`, narrow."""
    return WhiteNet((8, 16, 24), 3, classes=classes, in_channels=in_channels, bn_momentum=0.1, bn_eps=1e-5)


def pictures(config):
    """CIFAR-10's shape: ten classes of 32x32 colour images, each a coarse pattern of its own under noise."""
    generator = np.random.default_rng(3)
    patterns = np.kron(generator.uniform(60, 190, size=(10, 4, 4, 3)), np.ones((1, 8, 8, 1)))

    def split(name, count):
        labels = np.arange(count) % 10
        images = patterns[labels] + generator.normal(0, 20, size=(count, 32, 32, 3))
        classes = tuple(str(label) for label in range(10))
        return ArraySource(name, images.clip(0, 255).astype(np.uint8), labels, classes=classes)

    return split("train", 120), split("val", 30)
