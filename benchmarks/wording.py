"""The names of points in docs/evidence.md: words of the field instead of config fields and short arm names.

Rows and plans keep their original names, because `hyperbatch sweep` continues a record by these names.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hyperbatch.sweep.table import PointResult
from hyperbatch.sweep.values import Values, show

FIELDS = {"lr": "learning_rate", "nproc": "ranks"}
ARMS = {
    "and no decay on biases and norms": "+ no decay on biases and norms",
    "and label smoothing": "+ label smoothing",
    "and small batches first": "+ small batches first",
    "rate 0.08": "learning rate 0.08",
    "rate 0.17": "learning rate 0.17",
    "243 steps, rate 0.24": "243 steps, learning rate 0.24",
    "243 steps, rate 0.175": "243 steps, learning rate 0.175",
    "243 steps, no jitter": "243 steps, no color jitter",
    "243 steps, shifts x 0.6, head x 1.5": "243 steps, rate of biases x 0.6, rate of the head x 1.5",
    "365 steps of 1,024": "365 steps, batch 1,024",
    "shifts and head x 0.5": "rates of biases and head x 0.5",
    "shifts and head x 2": "rates of biases and head x 2",
    "24 px for 20 epochs": "24 px for 20 epochs, then 32 px",
    "36 epochs, 20 px for 10, 24 to 20": "36 epochs, 20 px until epoch 10, 24 px until 20",
    "294 steps, 24 px for 3 epochs": "294 steps, 24 px until epoch 3",
    "306 steps, 24 px for 4 epochs": "306 steps, 24 px until epoch 4",
    "293 steps, 20 px for 2 epochs": "293 steps, 20 px until epoch 2",
    "295 steps, 24 px for 2 epochs, 28 to 4": "295 steps, 24 px until epoch 2, 28 px until 4",
    "311 steps, 20 px for 1 epoch, 24 to 3, 28 to 5": "311 steps, 20 px until epoch 1, 24 px until 3, 28 px until 5",
    "310 steps, 24 px for 4 epochs": "the recipe: 310 steps, 24 px until epoch 4",
    "digits_10_seeds": "the recipe",
    "host_loss_seeds": "undisturbed runs",
}


def readable(point: PointResult) -> PointResult:
    """Returns the point with the names that the page shows."""
    settings = [_readable(values) for values in (point.conditions, point.search)]
    return dataclasses.replace(point, arm=ARMS.get(point.arm, point.arm), conditions=settings[0], search=settings[1])


def _readable(settings: Values) -> Values:
    return dict(_setting(name, value) for name, value in settings.items())


def _setting(name: str, value: Any) -> tuple[str, Any]:
    """`batch_phases = "0:64"` means one batch for the whole run."""
    if name == "batch_phases" and len(phase := show(value).split(":")) == 2 and phase[0] == "0" and phase[1].isdigit():
        return "batch", int(phase[1])
    return FIELDS.get(name, name), value
