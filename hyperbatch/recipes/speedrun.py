"""Recipes for the shortest time to an accuracy on a small data set, with the methods of the CIFAR-10 speed runs."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config, SizePhase
from hyperbatch.recipes import recipe
from hyperbatch.recipes.everyday import CIFAR10_ADDRESS

# The speed runs sum the loss over a batch and divide logits by 256. Here the loss is a mean, and logits are divided by
# 9. The rates of parameters that are not orthogonalised follow from this: batch x rate for shifts, and batch x rate x
# (9 / 256)^2 for the head. Each step subtracts the same fraction, rate x decay, of every parameter.
_SHIFT_LR_PER_SAMPLE = 0.0573
_HEAD_LR_PER_SAMPLE = 0.5415 * (9 / 256) ** 2
_DECAY_PER_STEP = 0.0016

_BATCH = 1_536
_LR = 0.205
_SHIFT_LR = _BATCH * _SHIFT_LR_PER_SAMPLE
_HEAD_LR = _BATCH * _HEAD_LR_PER_SAMPLE
_STEPS = 310

# airbench96 uses 9 / 11.5 of airbench94's rate for its wider network and longer run. An orthogonal update turns a
# matrix equally far whatever its width; for five times the steps its rate is about 0.6 times as large.
_BATCH_96 = 1_024
_LR_96 = 0.12
_SHIFT_LR_96 = _BATCH_96 * _SHIFT_LR_PER_SAMPLE * 9 / 11.5
_HEAD_LR_96 = _BATCH_96 * _HEAD_LR_PER_SAMPLE * 9 / 11.5
_STEPS_96 = 1_758

# Common fields of both recipes: data, whitening, Muon, a rate that falls linearly to 0, and test-time augmentation.
_SHARED = {
    "activation": "silu",
    "bn_eps": 1e-12,
    "init": "dirac",
    "whiten_samples": 5_000,
    "whiten_bias_epochs": 0.0,
    "dataset": "cifar10",
    "train_samples": 50_000,
    "eval_samples": 10_000,
    "classes": 10,
    "image_size": 32,
    "eval_size": 32,
    "eval_resize": 32,
    "augment": "shift",
    "shift_padding": "reflect",
    "flip_alternates": True,
    "optimizer": "muon",
    "momentum": 0.655,
    "nesterov": True,
    "muon_steps": 3,
    "muon_adjust_lr": "none",
    "muon_normalize_weights": True,
    "rest_momentum": 0.825,
    "decay_norm_bias": True,
    "precision": "fp16_on_gpu",
    "warmup_epochs": 0.0,
    "decay_power": 1.0,
    "end_lr": 0.0,
    "tta": "mirror_shift",
    "tta_share": 0.25,
}


@recipe(
    claim="94.08 % test accuracy in 0.76 s on one H200, evaluation included (9.5 epochs, mean of 200 seeds)",
    source="CIFAR-10 (Krizhevsky, 2009); network of airbench94 (Keller Jordan, arXiv 2404.00498), figures of "
    "hiverge/cifar10-speedrun",
    chosen=(
        "9.5 epochs, the first four of them with images of 24 pixels. hiverge trains 7.6 epochs at 32 pixels, which "
        "takes the same time.",
        "Label smoothing is 0.25 (hiverge: 0.09).",
        "The bias of the whitening layer is not trained, because its gradient would take a tenth of the time of a "
        "step.",
        "Matrices are scaled to a fixed norm before every update (hiverge: every few updates).",
    ),
    cluster="h200x8",
    record="2026-11-16_cifar10_200_seeds",
    data=CIFAR10_ADDRESS,
)
def cifar10() -> Config:
    """A network with a whitening first layer and convolutions that start as the identity, trained with Muon. Training
    starts with small images. Images are mirrored in alternating epochs and shifted with reflected edges. The quarter
    of the test images with the least certain predictions is evaluated in six views.

    hyperbatch train cifar10 --data DIR
    """
    return Config(recipe="cifar10").override(
        **_SHARED,
        model="whitenet",
        bn_momentum=0.4434,
        size_phases=(SizePhase(0, 24), SizePhase(4, 32)),
        shift_pixels=2,
        brightness_jitter=0.14,
        contrast_jitter=0.13,
        bias_lr_scale=_SHIFT_LR / _LR,
        head_lr_scale=_HEAD_LR / _LR,
        weight_decay=_DECAY_PER_STEP / _LR,
        label_smoothing=0.25,
        epochs=_STEPS * _BATCH / 50_000,
        batch_phases=(BatchPhase(0, _BATCH),),
        lr=_LR,
        target_top1=0.94,
        eval_every_epochs=10,
    )


@recipe(
    claim="96.00 % test accuracy in 9.45 s on one H200, evaluation included (36 epochs, mean of 28 seeds)",
    source="CIFAR-10 (Krizhevsky, 2009); network, cutout and shifts of airbench96 (Keller Jordan, arXiv 2404.00498)",
    chosen=(
        "Muon instead of SGD with lookahead, and 36 epochs. airbench96 takes 37 epochs, or 45 with half of the images.",
        "The first 14.4 epochs use images of 24 pixels.",
        "Momentum and SiLU are those of `cifar10`. The learning rates are those of `cifar10`, scaled for a longer run.",
        "The bias of the whitening layer is not trained.",
        "Six views of the quarter of the test images with the least certain predictions (airbench96: of all test "
        "images).",
    ),
    cluster="h200x8",
    record="2026-11-16_cifar10_96_50_seeds",
    published=False,
    data=CIFAR10_ADDRESS,
)
def cifar10_96() -> Config:
    """The CIFAR-10 speed run to 96 %: a wider network of ten convolutions with shortcuts, cutout of 12 pixels and
    shifts of up to 4 pixels. Everything else is as in `cifar10`.

    hyperbatch train cifar10_96 --data DIR
    """
    return Config(recipe="cifar10_96").override(
        **_SHARED,
        model="whitenet_deep",
        size_phases=(SizePhase(0, 24), SizePhase(14.4, 32)),
        shift_pixels=4,
        cutout=12,
        bias_lr_scale=_SHIFT_LR_96 / _LR_96,
        head_lr_scale=_HEAD_LR_96 / _LR_96,
        weight_decay=_DECAY_PER_STEP / _LR_96,
        label_smoothing=0.2,
        epochs=_STEPS_96 * _BATCH_96 / 50_000,
        batch_phases=(BatchPhase(0, _BATCH_96),),
        lr=_LR_96,
        target_top1=0.96,
        eval_every_epochs=40,  # only at the end
    )
