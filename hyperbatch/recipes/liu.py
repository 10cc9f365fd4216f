"""Facebook's ConvNeXt-T (2022): a convolutional network with the recipe of transformers."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe


@recipe(
    claim="82.1 % top-1 after 300 epochs at a batch of 4,096",
    source="Liu et al., A ConvNet for the 2020s, arXiv 2201.03545; TRAINING.md and main.py of "
    "facebookresearch/ConvNeXt",
    chosen=(
        "There is no random erasing (the source erases a quarter of the images) and no colour jitter.",
        "RandAugment applies two operations with strength 27 of 30 (torchvision's scale) to every image. timm's "
        "level 9 of 10 varies by 0.5, and each operation is applied with a probability of one half.",
        "Mixup or CutMix is chosen for a whole step, with a weight for each pair of images. The source draws both "
        "for each batch.",
        "Images are resized bilinearly (the source: bicubically), and the precision is bf16.",
        "32 GPUs in four A100 machines. The source says four machines of eight GPUs, but not which GPUs.",
    ),
    ranks=32,
    cluster="dgx_a100",
)
def convnext_t() -> Config:
    """AdamW with a learning rate of 4e-3 at a batch of 4,096, 20 epochs of warm-up and a cosine decay; mixup, CutMix,
    RandAugment, label smoothing and stochastic depth. The averaged weights are evaluated. The network is timm's: pip
    install 'hyperbatch[timm]'.

    hyperbatch train convnext_t --data DIR
    """
    return Config(recipe="convnext_t").override(
        model="timm/convnext_tiny",
        drop_path=0.1,
        auto_augment="rand",
        rand_ops=2,
        rand_magnitude=27,  # level 9 of 10
        mixup=0.8,
        cutmix=1.0,
        optimizer="adamw",
        momentum=0.9,
        beta2=0.999,
        weight_decay=0.05,
        label_smoothing=0.1,
        precision="bf16",
        averaging="ema",
        averaging_decay=0.9999,
        epochs=300,
        batch_phases=(BatchPhase(0, 4_096),),
        lr=4e-3,
        warmup_epochs=20,
        decay="cosine",
        end_lr=1e-6,
        target_top1=0.821,
        eval_every_epochs=10,
    )
