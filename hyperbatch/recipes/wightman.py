"""timm's ResNet-50 in 100 epochs (2021): "ResNet strikes back", its cheapest procedure."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe


@recipe(
    claim="78.1 % top-1 at 224 px after 100 epochs at 160 px (procedure A3, batch 2,048)",
    source="Wightman, Touvron and Jegou, ResNet strikes back: An improved training procedure in timm, arXiv "
    "2110.00476, table 2",
    chosen=(
        "a class counts as present above a share of 0.2 in a mixed image, the rate starts at 1e-4 and ends at 1e-6: "
        "from reimplementations",
        "gradients no longer than 1 and last norm scales that start at 0: timm's defaults",
        "RandAugment of two operations at torchvision's 18 of 30, always applied; timm's level 6 of 10 varies by 0.5 "
        "and applies each operation half of the time",
        "mixup or CutMix for a whole step, weights drawn for each pair of images; timm draws both for each batch",
        "bilinear resizing (timm: bicubic)",
        "four V100",
    ),
    ranks=4,
    cluster="dgx1_v100",
)
def resnet50_a3() -> Config:
    """LAMB at 8e-3, five epochs of warm-up and a cosine decay, binary cross entropy, RandAugment, mixup of 0.1 and
    CutMix of 1, at 160 pixels; evaluated at 224 with a crop of 95 %. Norms and biases neither decay nor adapt.

    hyperbatch train resnet50_a3 --data DIR
    """
    return Config(recipe="resnet50_a3").override(
        model="resnet50",
        zero_init_last_gamma=True,
        image_size=160,
        eval_size=224,
        eval_resize=235,
        auto_augment="rand",
        rand_ops=2,
        rand_magnitude=18,  # level 6 of 10
        mixup=0.1,
        cutmix=1.0,
        optimizer="lamb",
        momentum=0.9,
        beta2=0.999,
        weight_decay=0.02,
        clip_norm=1.0,
        loss="bce",
        bce_threshold=0.2,
        label_smoothing=0.0,
        precision="fp16",
        epochs=100,
        batch_phases=(BatchPhase(0, 2_048),),
        lr=8e-3,
        warmup_epochs=5,
        warmup_lr=1e-4,
        decay="cosine",
        end_lr=1e-6,
        target_top1=0.781,
        eval_every_epochs=5,
    )
