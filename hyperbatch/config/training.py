"""The config sections that say what is trained and how: model, data, optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass

from hyperbatch.config.option import (
    BELOW_ONE,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    BatchPhase,
    LayerRate,
    SizePhase,
    option,
)
from hyperbatch.vocabulary import (
    ACTIVATIONS,
    AVERAGING,
    LOSSES,
    MOMENTUM_RULES,
    MUON_ADJUSTMENTS,
    MUON_COEFFICIENTS,
    OPTIMIZERS,
    PRECISIONS,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The settings of the network, its normalisation and its initial weights."""

    model: str = option(
        "resnet50",
        "A built-in model, timm/NAME, or package.module:callable, which is called with the number of classes.",
    )
    zero_init_last_gamma: bool = option(
        False, "Initialise the last norm scale of each residual block to 0 (Goyal et al.)."
    )
    bn_momentum: float = option(0.1, "Weight of the new batch in the running batch-norm statistics.", SHARE)
    bn_eps: float = option(1e-5, "Constant added to the variance in batch norm.", POSITIVE)
    bn_group_ranks: int = option(
        1, "Number of ranks that share batch-norm statistics. With 1, each rank uses its own.", POSITIVE
    )
    activation: str | None = option(
        None,
        "Activation function of models that offer a choice (whitenet). By default, the one that the model was "
        "designed with.",
        ACTIVATIONS,
    )
    dropout: float | None = option(
        None, "Dropout rate of models that have dropout, in [0, 1). By default, the model's own.", BELOW_ONE
    )
    drop_path: float | None = option(
        None,
        "Stochastic depth of models that have it, in [0, 1): the rate at which samples skip the last block. By "
        "default, the model's own.",
        BELOW_ONE,
    )
    init: str = option(
        "default",
        "Initial weights. dirac initialises 3x3 convolutions as the identity on their first outputs.",
        ("default", "dirac"),
    )
    blurpool: bool = option(
        False, "Blur before every stride of a built-in ResNet except the first one (anti-aliased down-sampling)."
    )
    whiten_samples: int = option(
        0,
        "Number of training images from which the filters of whitenet's first layer are computed. 0 turns it off.",
        NOT_NEGATIVE,
    )
    fused: str = option(
        "auto",
        "Run forward and backward with fused kernels (GPU, 16 bits). auto uses them wherever they can run.",
        ("auto", "on", "off"),
        free=True,
    )
    compile: str = option(
        "auto",
        "Compile the repeated blocks of the model with torch.compile. auto does so on a GPU in 16 bits, for models "
        "without fused kernels, and not with --deterministic.",
        ("auto", "on", "off"),
        free=True,
    )
    init_from: str | None = option(
        None,
        "Start from the weights of a run, a checkpoint, or a .safetensors or .pt file; `timm` downloads timm's "
        "pretrained weights. The head is initialised anew if the classes differ.",
        free=True,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """The data set, and how training and evaluation images are made from it."""

    dataset: str = option(
        "images",
        "images (any layout of docs/data.md under --data), digits, cifar10, cifar100, synthetic, or "
        "package.module:callable.",
    )
    data: str | None = option(
        None, "Folder, archive or table of the data set, or its address (s3://, gs:// or https://).", free=True
    )
    data_cache_gb: float = option(
        100.0, "Disk space in GB for data from an address, shared by all runs on this host.", NOT_NEGATIVE, free=True
    )
    train_samples: int = option(
        1_281_167,
        "Number of training samples the recipe was written for. The data set determines the actual number.",
        POSITIVE,
    )
    eval_samples: int = option(
        50_000,
        "Number of validation samples the recipe was written for. The data set determines the actual number.",
        POSITIVE,
    )
    classes: int = option(
        1000, "Number of classes the recipe was written for. The data set determines the actual number.", POSITIVE
    )
    image_size: int = option(224, "Side of the training images in pixels.", POSITIVE)
    size_phases: tuple[SizePhase, ...] = option(
        (),
        "Progressive resizing, as EPOCH:PIXELS,EPOCH:PIXELS. If you change only --epochs, the phases of a recipe start "
        "at the same fractions of the run.",
    )
    eval_size: int = option(224, "Side of the evaluation crop in pixels.", POSITIVE)
    eval_resize: int = option(
        256, "Length in pixels to which the shorter side is resized before the evaluation crop.", POSITIVE
    )
    augment: str = option(
        "random_resized_crop",
        "How a training crop is taken from an image.",
        ("none", "shift", "random_resized_crop", "scale_jitter", "fixed_resize_crop"),
    )
    crop_area: tuple[float, float] = option(
        (0.08, 1.0), "Range of the crop's share of the image area for random_resized_crop, as LOW,HIGH."
    )
    crop_aspect: tuple[float, float] = option(
        (3 / 4, 4 / 3), "Range of aspect ratios for random_resized_crop, as LOW,HIGH."
    )
    full_crop_from_epoch: float | None = option(
        None, "Use crops of nearly the full image from this epoch on (Fujitsu). By default, never.", NOT_NEGATIVE
    )
    jitter_sides: tuple[int, int] = option(
        (256, 480), "Range of the shorter side in pixels for scale_jitter, as LOW,HIGH."
    )
    shift_pixels: int = option(0, "Largest shift in pixels for --augment shift.", NOT_NEGATIVE)
    shift_padding: str = option(
        "zero", "What fills the edge that a shift uncovers: black, or the reflected image.", ("zero", "reflect")
    )
    flip: bool = option(True, "Mirror half of the training images, chosen at random.")
    flip_alternates: bool = option(
        False, "Choose once for each image whether it is mirrored in the first epoch, then alternate."
    )
    brightness_jitter: float = option(
        0.0, "Largest random change of brightness, in standard deviations of the data set.", NOT_NEGATIVE
    )
    contrast_jitter: float = option(
        0.0, "Largest random change of contrast: the factor lies within 1 plus or minus this value.", BELOW_ONE
    )
    cutout: int = option(
        0,
        "Cutout: side in pixels of a random square of each training image that is set to the mean colour. 0 turns it "
        "off. With --size-phases, the square shrinks with the image.",
        NOT_NEGATIVE,
    )
    color_noise: float = option(0.0, "Standard deviation of PCA colour noise (AlexNet). 0 adds none.", NOT_NEGATIVE)
    auto_augment: str = option(
        "none",
        "Automatic augmentation of training images. trivial applies one random operation with a random strength "
        "(TrivialAugment); rand applies --rand-ops random operations with the same strength (RandAugment).",
        ("none", "trivial", "rand"),
    )
    rand_ops: int = option(2, "Number of operations of `--auto-augment rand`.", POSITIVE)
    rand_magnitude: int = option(
        9,
        "Strength of the operations of `--auto-augment rand`, from 0 to 30 as in torchvision. Level 10 in timm "
        "and in the code of the RandAugment paper is 30 here.",
        NOT_NEGATIVE,
    )
    mixup: float = option(
        0.0,
        "Alpha of mixup: training images and labels are mixed in pairs, with weights from Beta(alpha, alpha). 0 turns "
        "it off.",
        NOT_NEGATIVE,
    )
    cutmix: float = option(
        0.0,
        "Alpha of CutMix: a box of another training image is pasted into each image, with an area from "
        "Beta(alpha, alpha). 0 turns it off. With --mixup as well, each step uses one of the two at random.",
        NOT_NEGATIVE,
    )
    decoder: str = option("auto", "JPEG decoder.", ("auto", "pillow", "simplejpeg", "torchvision", "nvjpeg"))
    cpu_decode_share: float | None = option(
        None,
        "Share of the training JPEGs of up to a megapixel that CPU cores decode while nvjpeg decodes the others, in "
        "[0, 1). By default, 0.3 if --decoder auto chooses nvjpeg and a rank has at least 8 cores, otherwise 0.",
        BELOW_ONE,
    )
    data_threads: int = option(
        0, "Decoding threads per rank. 0 chooses the number from the CPU cores.", NOT_NEGATIVE, free=True
    )
    prefetch: int = option(3, "Number of batches to prepare ahead of time.", NOT_NEGATIVE, free=True)
    cache: str = option(
        "auto", "Where to keep decoded images if the data set fits.", ("auto", "none", "host", "gpu"), free=True
    )
    cache_bytes: int = option(
        0,
        "Largest amount of memory for decoded images per rank. 0 allows a quarter of the memory of the GPU or "
        "the host.",
        NOT_NEGATIVE,
        free=True,
    )
    max_bad_samples: int = option(
        100, "Number of unreadable training samples that are replaced before the run stops.", NOT_NEGATIVE, free=True
    )

    @property
    def image_sizes(self) -> tuple[int, ...]:
        """All sides that training images may have during the run, sorted."""
        return tuple(sorted({self.image_size, *(phase.image_size for phase in self.size_phases)}))

    @property
    def largest_image_size(self) -> int:
        """The side of the largest training images of the run, which must fit into memory."""
        return self.image_sizes[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, the loss, the precision and the averaging of the weights."""

    optimizer: str = option("lars", "Optimizer.", OPTIMIZERS)
    momentum: float = option(0.9, "Momentum, in [0, 1). For LAMB and AdamW, the first beta.", BELOW_ONE)
    beta2: float = option(
        0.999,
        "Second beta of LAMB and AdamW, in [0, 1): the decay of the average of squared gradients.",
        BELOW_ONE,
        needs=("optimizer", "lamb", "adamw"),
    )
    weight_decay: float = option(5e-5, "Weight decay.", NOT_NEGATIVE)
    clip_norm: float = option(
        0.0,
        "Clip the gradient to this global norm: the norm over all parameters. 0 turns clipping off.",
        NOT_NEGATIVE,
    )
    trust_coefficient: float = option(0.001, "Trust coefficient of LARS.", POSITIVE, needs=("optimizer", "lars"))
    lars_eps: float = option(
        0.0, "Constant added to the denominator of the trust ratio.", NOT_NEGATIVE, needs=("optimizer", "lars")
    )
    lars_precision: str = option(
        "fp32",
        "Precision in which LARS and SGD compute their update. fp16 is only for comparison: it loses small "
        "updates and learning rates.",
        ("fp32", "fp16"),
    )
    nesterov: bool = option(False, "Use Nesterov momentum.", needs=("optimizer", "lars", "sgd", "muon"))
    trust_clip: bool = option(
        False,
        "Limit the learning rate of each layer to the global learning rate (LARC).",
        needs=("optimizer", "lars", "lamb"),
    )
    momentum_rule: str = option(
        "lr_inside", "How the learning rate enters the momentum update.", MOMENTUM_RULES, needs=("optimizer", "lars")
    )
    decoupled_weight_decay: bool = option(
        False,
        "Apply weight decay separately from the gradient, with its own schedule (Fujitsu). For SGD, LARS and Muon; "
        "LAMB and AdamW always apply it separately.",
    )
    decay_norm_bias: bool = option(
        False, "Also apply weight decay to norm parameters, biases, position embeddings and class tokens."
    )
    adapt_norm_bias: bool = option(
        False, "Also apply the trust ratio to norm parameters, biases, position embeddings and class tokens."
    )
    bias_lr_scale: float = option(
        1.0,
        "Factor on the learning rate of norm parameters and biases. Their weight decay per step does not change.",
        POSITIVE,
    )
    head_lr_scale: float = option(
        1.0,
        "Factor on the learning rate of the weight of the last linear layer. Its weight decay per step does not "
        "change.",
        POSITIVE,
    )
    layer_rates: tuple[LayerRate, ...] = option(
        (),
        "Factors on the learning rate of layers, as LAYER:FACTOR,LAYER:FACTOR; 0 freezes a layer. `*` matches "
        "all layers, `head` is the last linear layer, and the last match counts: `*:0,head:1` trains only the head.",
    )
    layer_decay: float = option(
        1.0,
        "Layer-wise learning-rate decay: the head has the full learning rate, and each block has this factor times "
        "that of the next block. 1 turns it off; 0.65 to 0.8 is usual for fine-tuning.",
        SHARE,
    )
    whiten_bias_epochs: float | None = option(
        None,
        "Number of epochs in which the bias of the whitening layer is trained; its learning rate completes the "
        "schedule in this time. 0 freezes it. By default, all epochs.",
        NOT_NEGATIVE,
    )
    muon_steps: int = option(
        5, "Number of orthogonalisation iterations of Muon.", POSITIVE, needs=("optimizer", "muon")
    )
    muon_coefficients: str = option(
        "original", "Polynomials of Muon's iterations.", MUON_COEFFICIENTS, needs=("optimizer", "muon")
    )
    muon_adjust_lr: str = option(
        "original",
        "How Muon's learning rate depends on the shape of a matrix.",
        MUON_ADJUSTMENTS,
        needs=("optimizer", "muon"),
    )
    muon_normalize_weights: bool = option(
        False, "Scale each matrix to the norm sqrt(rows) before Muon's update.", needs=("optimizer", "muon")
    )
    rest_momentum: float | None = option(
        None,
        "Momentum of biases, norm parameters and the head with Muon. By default, --momentum.",
        BELOW_ONE,
        needs=("optimizer", "muon"),
    )
    loss: str = option(
        "cross_entropy",
        "Training loss: the cross entropy of the classes, or the binary cross entropy of each class (bce). "
        "Evaluation always reports the cross entropy.",
        LOSSES,
    )
    bce_threshold: float = option(
        0.0,
        "With --loss bce and mixed images, the share of an image above which a class counts as fully present. 0 uses "
        "the shares themselves.",
        BELOW_ONE,
    )
    label_smoothing: float = option(0.1, "Label smoothing, in [0, 1).", BELOW_ONE)
    precision: str = option(
        "fp32",
        "Precision of forward and backward. auto is bf16 on GPUs and x86 CPUs with instructions for it, fp16 on other "
        "GPUs, and fp32 on other CPUs. fp16_on_gpu is fp16 on every GPU, and the same as auto on CPUs.",
        PRECISIONS,
    )
    averaging: str = option(
        "none",
        "Averaging of the weights over steps. ema evaluates and exports the average; lookahead resets the "
        "weights to it.",
        AVERAGING,
    )
    averaging_every_steps: int = option(
        1, "Steps between two updates of the average.", POSITIVE, needs=("averaging", "ema", "lookahead")
    )
    averaging_decay: float = option(
        0.999,
        "Share of the old average that an update keeps, in [0, 1).",
        BELOW_ONE,
        needs=("averaging", "ema", "lookahead"),
    )
    averaging_power: float = option(
        0.0,
        "Multiply the decay by the completed share of the run to this power. 0 keeps it constant.",
        NOT_NEGATIVE,
        needs=("averaging", "ema", "lookahead"),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The settings of the length of the run, the global batch and the learning rate over time."""

    epochs: float = option(90.0, "Number of passes over the training set.", POSITIVE)
    batch_phases: tuple[BatchPhase, ...] = option(
        (BatchPhase(0, 256),), "Global batch over time, as EPOCH:SAMPLES,EPOCH:SAMPLES."
    )
    lr: float = option(0.1, "Peak learning rate, at a global batch of --lr-batch.", POSITIVE)
    lr_batch: int = option(
        0, "Global batch that --lr is given for. 0 stands for the batch of the first phase.", NOT_NEGATIVE
    )
    lr_scaling: str = option(
        "linear", "How the learning rate scales with the global batch.", ("none", "linear", "sqrt")
    )
    warmup: str = option("linear", "Shape of the warm-up.", ("linear", "goyal", "slow_start"))
    warmup_epochs: float = option(5.0, "Length of the warm-up in epochs.", NOT_NEGATIVE)
    warmup_lr: float = option(0.0, "Learning rate of the first step.", NOT_NEGATIVE)
    decay: str = option(
        "polynomial",
        "Shape of the learning-rate decay after the warm-up.",
        ("constant", "polynomial", "step", "cosine"),
    )
    decay_epochs: float | None = option(
        None, "Length of the decay in epochs. By default, it lasts until the end of the run.", POSITIVE
    )
    decay_power: float = option(2.0, "Power of the polynomial decay.", POSITIVE, needs=("decay", "polynomial"))
    end_lr: float = option(1e-4, "Learning rate at the end of a polynomial or cosine decay.", NOT_NEGATIVE)
    milestones: tuple[float, ...] = option(
        (30.0, 60.0, 80.0), "Epochs at which `--decay step` reduces the learning rate.", needs=("decay", "step")
    )
    decay_factor: float = option(
        0.1, "Factor of each reduction with `--decay step`.", NOT_NEGATIVE, needs=("decay", "step")
    )
