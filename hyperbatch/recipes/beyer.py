"""Google's plain ViT-S/16 (2022): a transformer on ImageNet alone, with little augmentation and no tricks."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

_LR = 1e-3
_DECAY_PER_STEP = (
    1e-4  # at the peak of the rate: the source's decay follows the schedule, but is not multiplied by 1e-3
)
_WARMUP_STEPS = 10_000
_BATCH = 1_024


@recipe(
    claim="76.5 % top-1 after 90 epochs in 6 to 7 hours on a TPUv3-8 (batch 1,024)",
    source="Beyer, Zhai and Kolesnikov, Better plain ViT baselines for ImageNet-1k, arXiv 2205.01580; vit_s16_i1k.py "
    "of google-research/big_vision",
    chosen=(
        "The head is linear. The file of big_vision has a hidden tanh layer before it, which makes little "
        "difference according to the paper.",
        "RandAugment uses torchvision's operations at full strength and fills with black. That of big_vision also "
        "has cutout, inversion and SolarizeAdd, fills with grey, and its enhancing operations work in one direction "
        "only.",
        "Mixup weights are drawn for each pair of images, not for each batch.",
        "All training images are used (big_vision: 99 %), normalised with ImageNet's mean and deviation "
        "(big_vision: -1 to 1), in bf16.",
        "The devices are eight H200 instead of a TPUv3-8.",
    ),
    ranks=8,
    cluster="h200x8",
)
def vit_s16() -> Config:
    """AdamW with a learning rate of 1e-3, 10,000 steps of warm-up and a cosine decay, RandAugment with two operations,
    mixup of 0.2, and gradients clipped to a norm of 1.

    The source applies a weight decay of 1e-4 that follows the schedule, but is not multiplied by the learning rate.
    Here the learning rate multiplies the weight decay, which is therefore 1e-4 / 1e-3 = 0.1. Both reduce every weight
    by the same fraction. Norm parameters and biases are not decayed.

    hyperbatch train vit_s16 --data DIR
    """
    return Config(recipe="vit_s16").override(
        model="vit_s16",
        auto_augment="rand",
        rand_ops=2,
        rand_magnitude=30,  # level 10 of 10
        mixup=0.2,
        crop_area=(0.05, 1.0),  # TensorFlow's inception crop
        optimizer="adamw",
        momentum=0.9,
        beta2=0.999,
        weight_decay=_DECAY_PER_STEP / _LR,
        clip_norm=1.0,
        label_smoothing=0.0,
        precision="bf16",
        epochs=90,
        batch_phases=(BatchPhase(0, _BATCH),),
        lr=_LR,
        warmup_epochs=_WARMUP_STEPS * _BATCH / 1_281_167,
        decay="cosine",
        end_lr=0.0,
        target_top1=0.765,
        eval_every_epochs=5,
    )
