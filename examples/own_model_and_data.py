"""Your own model and data set in our trainer. Run it from this folder:

hyperbatch train own_model_and_data:recipe
"""

import numpy as np
from torch import nn

from hyperbatch import ArraySource, BatchPhase, Config


def stripes(config):
    """Called with the data config; returns the training and the validation split. Here: two kinds of stripes."""
    generator = np.random.default_rng(0)

    def split(name: str, count: int) -> ArraySource:
        labels = np.arange(count) % 2
        rows = np.broadcast_to((np.arange(16) % 4 < 2) * 160 + 40, (count, 16, 16))
        images = np.where(labels[:, None, None], rows, rows.transpose(0, 2, 1))
        images = (images + generator.normal(0, 30, images.shape)).clip(0, 255).astype(np.uint8)
        return ArraySource(name, images[..., None], labels.astype(np.int64), classes=("upright", "lying"))

    return split("train", 2048), split("val", 512)


def network(classes: int, in_channels: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(in_channels, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, classes),
    )


def recipe() -> Config:
    return Config(recipe="stripes").override(
        dataset="own_model_and_data:stripes",
        model="own_model_and_data:network",
        image_size=16,
        eval_size=16,
        augment="none",
        flip=False,
        epochs=8.0,
        warmup_epochs=1.0,
        batch_phases=(BatchPhase(0, 64),),
        lr=0.5,
        trust_coefficient=0.02,
        target_top1=0.97,
        eval_every_epochs=1.0,
    )
