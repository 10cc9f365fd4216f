"""timm's ResNet-50 in 100 epochs (2021): the cheapest procedure of "ResNet strikes back"."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe


@recipe(
    claim="78.1 % top-1 at 224 px after 100 epochs at 160 px (procedure A3, batch 2,048)",
    source="Wightman, Touvron and Jegou, ResNet strikes back: An improved training procedure in timm, arXiv "
    "2110.00476, table 2",
    chosen=(
        "From reimplementations: in a mixed image, a class counts as present above a share of 0.2; the learning "
        "rate starts at 1e-4 and ends at 1e-6.",
        "Clipping to a norm of 1 and last norm scales that start at 0 are timm's defaults.",
        "RandAugment applies two operations with strength 18 of 30 (torchvision's scale) to every image. timm's "
        "level 6 of 10 varies by 0.5, and each operation is applied with a probability of one half.",
        "Mixup or CutMix is chosen for a whole step, with a weight for each pair of images. timm draws both for "
        "each batch.",
        "Images are resized bilinearly (timm: bicubically).",
        "The devices are four V100.",
    ),
    ranks=4,
    cluster="dgx1_v100",
)
def resnet50_a3() -> Config:
    """LAMB with a learning rate of 8e-3, five epochs of warm-up and a cosine decay, binary cross entropy, RandAugment,
    mixup of 0.1 and CutMix of 1, at 160 px. Evaluation is at 224 px with a crop of 95 %. Norm parameters and biases
    have neither weight decay nor a trust ratio.

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
