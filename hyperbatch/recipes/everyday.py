"""The everyday recipes: the default (digits), small data sets, and ImageNet on one machine.

They repeat fields that other recipes also set, so that each can be read, copied and changed as a whole. Recipes that
people may try on a laptop leave the precision to the device, because on most CPUs 16 bits take many times as long as
fp32.
"""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config, LayerRate
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import POINTS, from_point

CIFAR10_ADDRESS = "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"

# Common fields of the small data sets. LARS changes a weight by lr x trust of its own length per step; these data sets
# need 2 % at the peak. The split into 1.0 x 0.02 keeps the rate of norm parameters and biases, to which no trust ratio
# applies, as large as plain SGD would use.
_SMALL = {"momentum": 0.9, "trust_coefficient": 0.02, "label_smoothing": 0.1, "lr": 1.0}
_PHOTOS = _SMALL | {"weight_decay": 5e-4, "precision": "auto", "warmup_epochs": 3, "end_lr": 1e-3}


@recipe(
    claim="99 % test accuracy in seconds on two CPU cores, with each of ten seeds",
    source="UCI's handwritten digits (Alpaydin, Kaynak), as scikit-learn has them: 1,797 of 8x8; 1,433 train, 364 test",
    chosen=("All values. They were tuned on this data set.",),
    ranks=2,
    record="2026-11-15_digits_10_seeds",
    published=False,
)
def digits() -> Config:
    """The default recipe. It needs no download and runs the same code as a run on 2,048 GPUs: LARS, label smoothing,
    warm-up, one change of the batch size, and gradient groups. It starts two processes on a CPU and one per GPU
    otherwise.

    hyperbatch train
    """
    return Config(recipe="digits").override(
        **_SMALL,
        model="resnet8",
        dataset="digits",
        train_samples=1_433,
        eval_samples=364,
        classes=10,
        image_size=8,
        eval_size=8,
        eval_resize=8,
        augment="shift",
        shift_pixels=1,
        flip=False,
        weight_decay=1e-3,
        # The rate has decayed by epoch 14 and stays low: later epochs are for seeds that reach the target late.
        epochs=20,
        batch_phases=(BatchPhase(0, 64), BatchPhase(5, 128)),
        warmup_epochs=2,
        decay_epochs=12,
        end_lr=0.01,
        grouping="cubic",
        target_top1=0.99,
        eval_every_epochs=1,
    )


@recipe(
    claim="goal: 93 % test accuracy after 30 epochs on one GPU (not measured yet)",
    source="CIFAR-10 (Krizhevsky, 2009); network of He et al., arXiv 1512.03385, four times as wide",
    chosen=("All values. The learning rate and the trust coefficient are those of `digits`.",),
    published=False,
    data=CIFAR10_ADDRESS,
)
def cifar10_resnet() -> Config:
    """A residual network with 20 layers and 64 to 256 channels. Images are shifted by up to 4 pixels and mirrored.

    hyperbatch train cifar10_resnet --data DIR
    """
    return Config(recipe="cifar10_resnet").override(
        **_PHOTOS,
        model="resnet20x4",
        dataset="cifar10",
        train_samples=50_000,
        eval_samples=10_000,
        classes=10,
        image_size=32,
        eval_size=32,
        eval_resize=32,
        augment="shift",
        shift_pixels=4,
        epochs=30,
        batch_phases=(BatchPhase(0, 512),),
        target_top1=0.93,
        eval_every_epochs=1,
    )


@recipe(
    claim="goal: 90 % test accuracy after 100 epochs on one GPU (two runs reached 88.57 and 89.06 %; five seeds are "
    "not measured yet)",
    source="CIFAR-10 (Krizhevsky, 2009); network of Beyer et al., arXiv 2205.01580, with patches of 4 pixels",
    chosen=(
        "All values. Learning rate, weight decay and clipping are those of `vit_s16`; nothing was tuned on this "
        "data set.",
    ),
    published=False,
    data=CIFAR10_ADDRESS,
)
def vit_cifar10() -> Config:
    """A plain vision transformer with 64 tokens, trained from scratch with AdamW, RandAugment and mixup. Images are
    shifted by up to 4 pixels and mirrored.

    hyperbatch train vit_cifar10 --data DIR
    """
    return Config(recipe="vit_cifar10").override(
        model="vit_cifar",
        dataset="cifar10",
        train_samples=50_000,
        eval_samples=10_000,
        classes=10,
        image_size=32,
        eval_size=32,
        eval_resize=32,
        augment="shift",
        shift_pixels=4,
        auto_augment="rand",
        rand_ops=2,
        rand_magnitude=9,
        mixup=0.2,
        optimizer="adamw",
        momentum=0.9,
        weight_decay=0.1,
        clip_norm=1.0,
        label_smoothing=0.1,
        precision="auto",
        epochs=100,
        batch_phases=(BatchPhase(0, 512),),
        lr=1e-3,
        warmup_epochs=5,
        decay="cosine",
        end_lr=0.0,
        target_top1=0.90,
        eval_every_epochs=2,
    )


@recipe(
    claim="goal: 88 % top-1 after 40 epochs on one GPU (not measured yet)",
    source="Imagenette (fast.ai), 10 classes of ImageNet: 9,469 train, 3,925 validation",
    chosen=("All values. The learning rate and the trust coefficient are those of `digits`.",),
    published=False,
    data="https://s3.amazonaws.com/fast-ai-imageclas/imagenette2.tgz",
)
def imagenette() -> Config:
    """ResNet-18, trained from scratch on 10 easy classes of ImageNet at 160 px. It takes minutes and uses the same
    folder layout and code as ImageNet.

    hyperbatch train imagenette --data DIR
    """
    return Config(recipe="imagenette").override(
        **_PHOTOS,
        model="resnet18",
        train_samples=9_469,
        eval_samples=3_925,
        classes=10,
        image_size=160,
        eval_size=160,
        eval_resize=184,
        crop_area=(0.25, 1.0),
        epochs=40,
        batch_phases=(BatchPhase(0, 256),),
        target_top1=0.88,
        eval_every_epochs=2,
    )


@recipe(
    claim="goal: 55 % top-1 after 30 epochs on one GPU (not measured yet)",
    source="Tiny ImageNet (Stanford CS231n): 200 classes of 64 px, 100,000 train, 10,000 validation",
    chosen=("All values. The learning rate and the trust coefficient are those of `digits`.",),
    published=False,
    data="http://cs231n.stanford.edu/tiny-imagenet-200.zip",
)
def tinyimagenet() -> Config:
    """The network of `cifar10_resnet` at 64 px.

    hyperbatch train tinyimagenet --data DIR
    """
    return Config(recipe="tinyimagenet").override(
        **_PHOTOS,
        model="resnet20x4",
        train_samples=100_000,
        eval_samples=10_000,
        classes=200,
        image_size=64,
        eval_size=64,
        eval_resize=64,
        crop_area=(0.35, 1.0),
        epochs=30,
        batch_phases=(BatchPhase(0, 512),),
        target_top1=0.55,
        eval_every_epochs=2,
    )


@recipe(
    claim="fine-tunes pretrained weights on your own images; the accuracy is not measured yet",
    source="SGD with a cosine decay and a faster head, as fine-tuning is done (Kornblith et al., arXiv 1805.08974)",
    chosen=("All values. Neither the learning rate nor the number of epochs was tuned on any data set.",),
    published=False,
)
def finetune() -> Config:
    """Fine-tunes the weights of --init-from on your classes: ResNet-50 at 224 px for ten epochs, with ten times the
    learning rate for the head. docs/finetune.md is the tutorial.

    hyperbatch train finetune --data DIR --init-from FILE
    """
    return Config(recipe="finetune").override(
        model="resnet50",
        optimizer="sgd",
        momentum=0.9,
        nesterov=True,
        weight_decay=1e-4,
        label_smoothing=0.1,
        precision="auto",
        crop_area=(0.25, 1.0),
        layer_rates=(LayerRate("head", 10.0),),
        train_samples=3_000,
        eval_samples=1_000,
        classes=10,
        epochs=10,
        batch_phases=(BatchPhase(0, 64),),
        lr=0.01,
        warmup_epochs=0.5,
        decay="cosine",
        end_lr=0.0,
        eval_every_epochs=1,
    )


@recipe(
    claim="75.9 % top-1 after 35.2 epochs on 8 GPUs (MLPerf's reference point at batch 3,264; not run here yet)",
    source="MLPerf training 4.0.0 reference convergence points (mlcommons/logging)",
    chosen=(
        "On fewer than 8 GPUs, the same batch is split into micro-steps. Batch norm then uses the samples of one "
        "micro-step on one rank.",
        "The gradient groups are cubic.",
    ),
    ranks=8,
    cluster="h200x8",
)
def resnet50() -> Config:
    """ImageNet on 1 to 8 GPUs in fp16, with MLPerf's values for one machine: 408 images per GPU on 8 GPUs.

    hyperbatch train resnet50 --data DIR
    """
    return from_point(POINTS[3_264], 3_264, name="resnet50")
