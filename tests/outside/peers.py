"""Other implementations of LARS, LAMB and Muon beside ours: 20 steps in float64 under a rising rate.

Every peer is listed with the variant of ours that should give the same numbers. One that cannot be imported is
reported as such: `pip install --no-deps --target DIR` installs them without touching torch.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from hyperbatch import LAMB, LARS, AdamW, Muon

LARGEST_DIFFERENCE = 1e-12
SHAPES = ((8, 5), (4, 3, 3, 3), (6,))
RATES = torch.logspace(-4, 0, 20, dtype=torch.float64).tolist()  # LARC clips at the low ones only

Settings = dict[str, Any]
# Takes settings, weights and each step's gradients, and returns the weights after the last step.
Run = Callable[[Settings, list[Tensor], list[list[Tensor]]], list[Tensor]]

SGD_LIKE: list[Settings] = [
    {"momentum": 0.9, "weight_decay": 0.01},
    {"momentum": 0.0, "weight_decay": 0.01},
    {"momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
]
LARS_LIKE = [{**settings, "eps": 1e-8, "trust_coefficient": 0.002} for settings in SGD_LIKE]
ADAM_LIKE: list[Settings] = [
    {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.01},
    {"betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0},
]


@dataclass(frozen=True, slots=True)
class Peer:
    name: str
    run: Run
    ours: type
    variant: Settings  # ours alone has these
    settings: list[Settings]
    shapes: tuple[tuple[int, ...], ...] = SHAPES


def compare_with_peers() -> list[dict[str, Any]]:
    rows = []
    for peer in PEERS:
        variant = ", ".join(f"{key}={value!r}" for key, value in peer.variant.items())
        row: dict[str, Any] = {"peer": peer.name, "version": None, "ours": f"{peer.ours.__name__}({variant})"}
        with suppress(metadata.PackageNotFoundError):  # a formula has none
            row["version"] = metadata.version(peer.name.split()[0])
        try:
            row |= {"difference": largest_difference(peer), "settings": len(peer.settings), "why_not": None}
        except ImportError as error:
            row |= {"difference": None, "settings": 0, "why_not": f"not compared: {error}"}
        rows.append(row)
    return rows


def largest_difference(peer: Peer) -> float:
    """Relative to a tensor's largest element, over all tensors, settings and paths of ours."""
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Tensor]:
        return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in peer.shapes]

    weights, grads = draw(), [draw() for _ in RATES]
    differences = []
    for settings in peer.settings:
        expected = peer.run(settings, weights, grads)
        for foreach in (None, False, True):

            def ours(params: list[Tensor], foreach: bool | None = foreach, **group: Any) -> torch.optim.Optimizer:
                return peer.ours([{"params": params, **group, **peer.variant}], lr=1.0, foreach=foreach)

            for a, b in zip(steps_of(ours)(settings, weights, grads), expected, strict=True):
                differences.append((a - b).abs().max() / b.abs().max())
    return float(torch.stack(differences).max())  # nan where one of them is


def steps_of(make: Callable[..., Any]) -> Run:
    """A run of a torch optimizer. make: called with the parameters and the settings."""

    def run(settings: Settings, weights: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        params = [torch.nn.Parameter(weight.clone()) for weight in weights]
        optimizer = make(params, **settings)
        for rate, step_grads in zip(RATES, grads, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate
            for param, grad in zip(params, step_grads, strict=True):
                param.grad = grad.clone()  # some write into it
            optimizer.step()
        return [param.detach() for param in params]

    return run


def imported(module: str, name: str, renamed: dict[str, str] | None = None, **extra: Any) -> Run:
    """A run of somebody's torch optimizer. renamed: our setting -> theirs. extra: settings that only theirs has."""

    def make(params: list[Tensor], **settings: Any) -> Any:
        if module.startswith("timm"):
            stand_in_for_torchvision()
        cls = getattr(importlib.import_module(module), name)
        return cls(params, lr=1.0, **extra, **{(renamed or {}).get(key, key): settings[key] for key in settings})

    return steps_of(make)


def optax(name: str) -> Run:
    def run(settings: Settings, weights: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        jax = importlib.import_module("jax")
        jax.config.update("jax_enable_x64", True)
        library = importlib.import_module("optax")
        rates = jax.numpy.asarray(RATES)
        given = dict(settings)
        if "betas" in given:
            given["b1"], given["b2"] = given.pop("betas")
        transform = getattr(library, name)(lambda count: rates[count], **given)
        params = [jax.numpy.asarray(weight.numpy()) for weight in weights]
        state = transform.init(params)
        for step_grads in grads:
            updates, state = transform.update([jax.numpy.asarray(grad.numpy()) for grad in step_grads], state, params)
            params = library.apply_updates(params, updates)
        return [torch.tensor(param.tolist(), dtype=torch.float64) for param in params]

    return run


def formula(*, lr_inside: bool, clip: bool) -> Run:
    """LARS as MLPerf's rules write it (lr_inside), and as apex's LARC lays it around torch's SGD."""

    def run(settings: Settings, weights: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        decay, mu = settings["weight_decay"], settings["momentum"]
        after = []
        for i, start in enumerate(weights):
            w, buffer = start.clone(), torch.zeros_like(start)
            for rate, step_grads in zip(RATES, grads, strict=True):
                g = step_grads[i]
                trust = settings["trust_coefficient"] * w.norm() / (g.norm() + decay * w.norm() + settings["eps"])
                if clip:
                    trust = min(trust / rate, 1.0)
                buffer = mu * buffer + (rate if lr_inside else 1.0) * trust * (g + decay * w)
                w = w - (1.0 if lr_inside else rate) * buffer
            after.append(w)
        return after

    return run


def in_full_precision(run: Run) -> Run:
    """torch's Muon rounds to bfloat16 before its products; here it does not."""

    def patched(settings: Settings, weights: list[Tensor], grads: list[list[Tensor]]) -> list[Tensor]:
        with mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone):
            return run(settings, weights, grads)

    return patched


def stand_in_for_torchvision() -> None:
    """timm imports torchvision for its models and transforms, which its optimizers and schedulers do not use."""
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # RuntimeError: torchvision was built for another torch
        parts = ("", ".datasets", ".models", ".models.feature_extraction", ".ops", ".ops.misc", ".transforms")
        for part in (*parts, ".transforms.functional"):
            sys.modules[f"torchvision{part}"] = mock.MagicMock()


OUTSIDE = {"momentum_rule": "lr_outside"}
LARC = {**OUTSIDE, "trust_clip": True}
SGD = {"adapt": False, **OUTSIDE}
PLAIN = LARS_LIKE[:2]  # no Nesterov momentum
NO_DECAY = [{**settings, "weight_decay": 0.0} for settings in LARS_LIKE]  # optax takes the norm of g + wd w
TIMM = {"renamed": {"trust_coefficient": "trust_coeff"}, "always_adapt": True}
FIXED_EPS = [{key: value for key, value in settings.items() if key != "eps"} for settings in LARS_LIKE]

PEERS = [
    Peer("torch SGD", imported("torch.optim", "SGD"), LARS, SGD, SGD_LIKE),
    Peer("torch AdamW", imported("torch.optim", "AdamW"), AdamW, {}, ADAM_LIKE),
    Peer("MLPerf's formula", formula(lr_inside=True, clip=False), LARS, {}, PLAIN),
    Peer("apex's LARC, formula", formula(lr_inside=False, clip=True), LARS, LARC, PLAIN),
    Peer("timm Lars", imported("timm.optim", "Lars", **TIMM), LARS, OUTSIDE, LARS_LIKE + NO_DECAY),
    Peer("timm Lars, clipped", imported("timm.optim", "Lars", trust_clip=True, **TIMM), LARS, LARC, LARS_LIKE),
    Peer("torch_optimizer LARS", imported("torch_optimizer", "LARS"), LARS, OUTSIDE, LARS_LIKE),
    Peer("lightly LARS", imported("lightly.utils.lars", "LARS"), LARS, OUTSIDE, LARS_LIKE),
    # Vectors are left out of this one's trust ratio and decay, and it has no eps.
    Peer("pytorch_optimizer LARS", imported("pytorch_optimizer", "LARS"), LARS, OUTSIDE, FIXED_EPS, SHAPES[:2]),
    Peer("optax lars", optax("lars"), LARS, {}, NO_DECAY),
    Peer("timm Lamb", imported("timm.optim", "Lamb", max_grad_norm=None, always_adapt=True), LAMB, {}, ADAM_LIKE),
    Peer("optax lamb", optax("lamb"), LAMB, {}, ADAM_LIKE),
    Peer("torch Muon", in_full_precision(imported("torch.optim", "Muon")), Muon, {}, SGD_LIKE, SHAPES[:1]),
]
