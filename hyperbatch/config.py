"""The dataclasses a recipe fills in. No torch here: a config can be read, printed and checked anywhere.

A config is a tree of sections, but every field name is unique in the whole tree, so a command line flag
(`--label-smoothing 0.1`), an override (`config.override(label_smoothing=0.1)`) and an error message name it by itself.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple, Self

from hyperbatch.errors import InputError, nearest
from hyperbatch.vocabulary import (
    ACTIVATIONS,
    ALGORITHMS,
    AVERAGING,
    GROUP_BASE,
    GROUP_COUNT,
    GROUP_THRESHOLD_BYTES,
    HYBRID_SWITCH_BYTES,
    MOMENTUM_RULES,
    MUON_ADJUSTMENTS,
    MUON_COEFFICIENTS,
    OPTIMIZERS,
    PRECISIONS,
    STRATEGIES,
    TRACKERS,
    TTA,
)

# What a number must do or be, by the words an error says it with
RULES: dict[str, Callable[[float], bool]] = {
    "be positive": lambda value: value > 0,
    "not be negative": lambda value: value >= 0,
    "be in [0, 1)": lambda value: 0 <= value < 1,
    "be in (0, 1]": lambda value: 0 < value <= 1,
}
POSITIVE, NOT_NEGATIVE, BELOW_ONE, SHARE = RULES
NEVER_SEEN = ("KILL", "STOP", "INT")  # Ctrl-C always ends a run at once, and nobody can handle the other two


class BatchPhase(NamedTuple):
    """From this epoch on, this many samples a step over all ranks (Sony's batch-size control)."""

    from_epoch: float
    global_batch: int


class SizePhase(NamedTuple):
    """From this epoch on, training images of this many pixels a side (progressive resizing)."""

    from_epoch: float
    image_size: int


class LayerRate(NamedTuple):
    """A layer, and all in it, takes this factor of the rate; 0: it is frozen (hyperbatch/schedule/layers.py)."""

    layer: str
    factor: float


def option(
    default: Any, help: str, allowed: tuple[str, ...] | str = (), *, free: bool = False, repeated: bool = True
) -> Any:
    """A field and what is known of it: the help text of its flag, and the names it may be or the rule a number obeys.

    free: a resumed run may change it, because it says where things are or how the work is cut, not what is computed.
    repeated=False: a command that does the run again leaves it out.
    """
    return field(default=default, metadata={"help": help, "allowed": allowed, "free": free, "repeated": repeated})


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """The network, its normalisation and its initial weights."""

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
    init: str = option(
        "default",
        "Initial weights. dirac initialises 3x3 convolutions as the identity on their first outputs.",
        ("default", "dirac"),
    )
    whiten_samples: int = option(
        0,
        "Number of training images from which the filters of whitenet's first layer are computed. 0 uses none.",
        NOT_NEGATIVE,
    )
    fused: str = option(
        "auto",
        "Run forward and backward with fused kernels (GPU, 16 bits). auto uses them wherever they can run.",
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
    size_phases: tuple[SizePhase, ...] = option((), "Progressive resizing, as EPOCH:PIXELS,EPOCH:PIXELS.")
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
        "Side in pixels of a square at a random place of each training image that is set to the mean colour. 0 cuts "
        "out none. With --size-phases, smaller images lose as large a share.",
        NOT_NEGATIVE,
    )
    color_noise: float = option(0.0, "Standard deviation of PCA colour noise (AlexNet). 0 adds none.", NOT_NEGATIVE)
    auto_augment: str = option(
        "none",
        "Automatic augmentation; trivial applies one random operation of random strength to each training image "
        "(TrivialAugment).",
        ("none", "trivial"),
    )
    mixup: float = option(
        0.0,
        "Mix training images and labels in pairs, with weights drawn from Beta(ALPHA, ALPHA). 0 turns it off.",
        NOT_NEGATIVE,
    )
    cutmix: float = option(
        0.0,
        "Paste a box of another training image into each one, of an area drawn from Beta(ALPHA, ALPHA). 0 turns it "
        "off. Together with --mixup, each step does one of the two.",
        NOT_NEGATIVE,
    )
    decoder: str = option("auto", "JPEG decoder.", ("auto", "pillow", "simplejpeg", "torchvision", "nvjpeg"))
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
    def largest_image_size(self) -> int:
        """Side of the largest training images of the run: memory must hold those."""
        return max([self.image_size, *(phase.image_size for phase in self.size_phases)])


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimConfig:
    """The optimizer, the loss, the precision and the averaging of the weights."""

    optimizer: str = option("lars", "Optimizer.", OPTIMIZERS)
    momentum: float = option(0.9, "Momentum, in [0, 1). For LAMB and AdamW, the first beta.", BELOW_ONE)
    beta2: float = option(
        0.999, "Second beta of LAMB and AdamW, in [0, 1): the decay of the average of squared gradients.", BELOW_ONE
    )
    weight_decay: float = option(5e-5, "Weight decay.", NOT_NEGATIVE)
    trust_coefficient: float = option(0.001, "Trust coefficient of LARS.", POSITIVE)
    lars_eps: float = option(0.0, "Constant added to the denominator of the trust ratio.", NOT_NEGATIVE)
    nesterov: bool = option(False, "Use Nesterov momentum.")
    trust_clip: bool = option(False, "Never exceed the plain learning rate (LARC).")
    momentum_rule: str = option("lr_inside", "How the learning rate enters the momentum update.", MOMENTUM_RULES)
    decoupled_weight_decay: bool = option(
        False, "Apply weight decay separately from the gradient, with its own schedule (Fujitsu)."
    )
    decay_norm_bias: bool = option(False, "Apply weight decay to norm parameters and biases, too.")
    adapt_norm_bias: bool = option(False, "Apply the trust ratio to norm parameters and biases, too.")
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
    whiten_bias_epochs: float | None = option(
        None,
        "Number of epochs over which the bias of the whitening layer follows the whole schedule; 0 freezes it. "
        "By default, all epochs.",
        NOT_NEGATIVE,
    )
    muon_steps: int = option(5, "Number of orthogonalisation iterations of Muon.", POSITIVE)
    muon_coefficients: str = option("original", "Polynomials of Muon's iterations.", MUON_COEFFICIENTS)
    muon_adjust_lr: str = option(
        "original", "How Muon's learning rate depends on the shape of a matrix.", MUON_ADJUSTMENTS
    )
    muon_normalize_weights: bool = option(False, "Scale each matrix to the norm sqrt(rows) before Muon's update.")
    rest_momentum: float | None = option(
        None, "Momentum of biases, norm parameters and the head with Muon. By default, --momentum.", BELOW_ONE
    )
    label_smoothing: float = option(0.1, "Label smoothing, in [0, 1).", BELOW_ONE)
    precision: str = option(
        "fp32",
        "Precision of forward and backward. auto is fp32 on a CPU, and bf16 on a GPU that supports it, else fp16.",
        PRECISIONS,
    )
    averaging: str = option(
        "none",
        "Averaging of the weights over steps. ema evaluates and exports the average; lookahead resets the "
        "weights to it.",
        AVERAGING,
    )
    averaging_every_steps: int = option(1, "Steps between two updates of the average.", POSITIVE)
    averaging_decay: float = option(0.999, "Share of the old average that an update keeps, in [0, 1).", BELOW_ONE)
    averaging_power: float = option(
        0.0, "The decay grows as the completed share of the run to this power. 0 keeps it constant.", NOT_NEGATIVE
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """The length of the run, and the global batch and the learning rate over time."""

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
    decay_power: float = option(2.0, "Power of the polynomial decay.", POSITIVE)
    end_lr: float = option(1e-4, "Learning rate at the end of a polynomial or cosine decay.", NOT_NEGATIVE)
    milestones: tuple[float, ...] = option(
        (30.0, 60.0, 80.0), "Epochs at which `--decay step` reduces the learning rate."
    )
    decay_factor: float = option(0.1, "Factor of each reduction with `--decay step`.", NOT_NEGATIVE)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig:
    """How gradients are grouped and exchanged between ranks."""

    grid: str | None = option(
        None, "Grid of the ranks, as ROWSxCOLUMNS; a row is one node. By default, hosts x ranks per host.", free=True
    )
    algorithm: str = option("flat", "Algorithm of the all-reduce.", ALGORITHMS)
    hybrid_switch_bytes: int = option(
        HYBRID_SWITCH_BYTES,
        "Largest message that the hybrid all-reduce sends hierarchically; larger ones are sent flat.",
        NOT_NEGATIVE,
    )
    wire_dtype: str | None = option(
        None,
        "Precision in which gradients are sent. By default, the precision they are computed in.",
        ("fp16", "bf16", "fp32"),
    )
    grouping: str = option("cubic", "Strategy that groups gradients for the all-reduce.", STRATEGIES)
    group_count: int = option(GROUP_COUNT, "Number of groups with `--grouping equal`.", POSITIVE)
    group_threshold_bytes: int = option(
        GROUP_THRESHOLD_BYTES, "Fusion threshold in bytes with `--grouping threshold`.", POSITIVE
    )
    group_base: int = option(
        GROUP_BASE,
        "Number of tensors in the first group with `--grouping cubic`, whose boundaries are at base * k^3.",
        POSITIVE,
    )
    plan: str | None = option(
        None,
        "Take the gradient groups from this file, written by `hyperbatch plan --output`, instead of --grouping.",
        free=True,
    )
    sharded_update: bool = option(False, "Let each rank update its shard of the weights (Google).")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The target, evaluations, checkpoints, processes and everything else about one run."""

    target_top1: float | None = option(None, "Accuracy to train to, in (0, 1]. By default, the run trains all epochs.")
    stop_at_target: bool = option(True, "Stop at the first evaluation that reaches the target.", free=True)
    patience_evals: int = option(
        0,
        "Stop after this many evaluations in a row without a better accuracy. 0 never stops early.",
        NOT_NEGATIVE,
        free=True,
    )
    eval_every_epochs: float = option(4.0, "Epochs between evaluations.", POSITIVE)
    final_eval: bool = option(True, "Evaluate after the last step, also if --max-steps ends the run.", free=True)
    eval_offset_epochs: float = option(0.0, "Shift of the evaluations in epochs (MLPerf: 0 to 3).", NOT_NEGATIVE)
    eval_batch_per_rank: int = option(
        0,
        "Samples per rank in each evaluation step. 0 uses at most the training batch, or on a GPU as many pixels "
        "as 2,500 images of 32 px if that is more.",
        NOT_NEGATIVE,
        free=True,
    )
    tta: str = option("none", "Test-time augmentation: the views of each image that evaluation averages over.", TTA)
    tta_share: float = option(
        1.0, "Share of each batch, the least certain images, that gets more than one view.", SHARE
    )
    seed: int = option(0, "Seed of the initial weights, the sample order and the augmentation.", NOT_NEGATIVE)
    deterministic: bool = option(False, "Use bit-exact kernels on GPUs. CPU runs are always bit-exact.")
    device: str = option("auto", "Where to run.", ("auto", "cpu", "cuda"), free=True)
    graph: str = option(
        "auto",
        "Capture whole steps in CUDA graphs. auto does so on a GPU if the step can be captured.",
        ("auto", "on", "off"),
        free=True,
    )
    steps_per_launch: int = option(
        0,
        "Steps per launch of a CUDA graph. 0 chooses several where steps are short, otherwise 1.",
        NOT_NEGATIVE,
        free=True,
    )
    nproc: int = option(
        0, "Number of processes on this host. 0 starts one per GPU, or two on a CPU.", NOT_NEGATIVE, free=True
    )
    accumulate: int = option(
        0, "Number of micro-steps per step. 0 uses as few as fit into memory.", NOT_NEGATIVE, free=True
    )
    max_steps: int = option(0, "Stop after this many steps. 0 runs all epochs.", NOT_NEGATIVE, free=True)
    checkpoint_every_epochs: float | None = option(
        None,
        "Epochs between checkpoints; 0 saves only at the end. By default, one is saved with each evaluation.",
        NOT_NEGATIVE,
        free=True,
    )
    checkpoint_every_steps: int = option(
        0, "Steps between additional checkpoints. 0 saves none.", NOT_NEGATIVE, free=True
    )
    checkpoint_every_minutes: float = option(
        0.0,
        "Save an additional checkpoint when this many minutes have passed since the last one. 0 saves none.",
        NOT_NEGATIVE,
        free=True,
    )
    keep_checkpoints: int = option(
        2, "Number of newest checkpoints to keep. 0 saves none at all.", NOT_NEGATIVE, free=True
    )
    keep_best: bool = option(True, "Also keep the checkpoint of the best evaluation.", free=True)
    log_every_steps: int = option(1, "Steps between two lines of metrics.", POSITIVE, free=True)
    tracker: str | None = option(
        None,
        "Also send the config and the curves to this service. By default, they are only written to --out.",
        TRACKERS,
        free=True,
    )
    max_skipped_steps: int = option(
        50,
        "Number of consecutive steps that may be skipped for inf or nan gradients. 0 sets no limit.",
        NOT_NEGATIVE,
        free=True,
    )
    max_rollbacks: int = option(
        3,
        "How many times the run may return to its newest checkpoint and continue with other samples when the "
        "loss becomes nan or jumps (see --spike-factor). With 0, nan ends the run.",
        NOT_NEGATIVE,
        free=True,
    )
    spike_factor: float = option(
        4.0,
        "A loss has jumped if it is this many times the median of the last steps and worse than guessing. 0 "
        "turns the check off.",
        NOT_NEGATIVE,
        free=True,
    )
    compare_every_steps: int | None = option(
        None,
        "Steps between comparisons of the weights and the optimizer state across ranks; 0 never compares. By "
        "default, they are compared before evaluations and checkpoints.",
        NOT_NEGATIVE,
        free=True,
    )
    timeout_s: float = option(
        300.0, "Seconds after which a rank that does not respond fails the run.", POSITIVE, free=True
    )
    out: str | None = option(None, "Folder of the run. By default, `runs/<recipe>-<time>`.", free=True, repeated=False)
    resume: str = option(
        "no",
        "Continue the run in --out from its newest checkpoint; without a value, the same as yes. auto starts a "
        "new run if there is no checkpoint.",
        ("no", "yes", "auto"),
        free=True,
        repeated=False,
    )
    max_restarts: int = option(
        0,
        "How many times the ranks are restarted after a fault. They continue from the newest checkpoint in --out.",
        NOT_NEGATIVE,
        free=True,
    )
    preempt_signals: str | None = option(
        "TERM,USR1", "Signals that end the run with a checkpoint after the current step, or none.", free=True
    )

    def __post_init__(self) -> None:
        if isinstance(self.resume, bool):  # what older records and scripts say
            object.__setattr__(self, "resume", "yes" if self.resume else "no")


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """Everything a run needs. `recipe` is only a label; the sections hold the values."""

    recipe: str = "custom"
    model: ModelConfig = field(default_factory=ModelConfig, metadata={"title": "model"})
    data: DataConfig = field(default_factory=DataConfig, metadata={"title": "data and augmentation"})
    optim: OptimConfig = field(default_factory=OptimConfig, metadata={"title": "optimizer and precision"})
    schedule: ScheduleConfig = field(
        default_factory=ScheduleConfig, metadata={"title": "epochs, batch and learning rate"}
    )
    comm: CommConfig = field(default_factory=CommConfig, metadata={"title": "gradient exchange"})
    run: RunConfig = field(default_factory=RunConfig, metadata={"title": "run"})

    def __post_init__(self) -> None:
        check(self)

    @property
    def global_batch(self) -> int:
        """Samples of the first step over all ranks."""
        return self.schedule.batch_phases[0].global_batch

    def with_precision(self, found: str) -> Self:
        """A copy in which a precision of `auto` is replaced by the one that was found for the device."""
        return self.override(precision=found) if self.optim.precision == "auto" else self

    @property
    def scatters_gradients(self) -> bool:
        """Whether a rank gets its shard of the gradients only. Muon needs whole ones: its ranks share the products."""
        return self.comm.sharded_update and self.optim.optimizer != "muon"

    def override(self, **values: Any) -> Self:
        """A copy with fields replaced by their unique names. `global_batch=N` scales every batch phase."""
        global_batch = values.pop("global_batch", None)
        by_section: dict[str, dict[str, Any]] = {}
        known = {spec.name: spec for spec in fields()}
        for name, value in values.items():
            if name not in known:
                raise InputError(f"unknown config field {name!r}{nearest(name, [*known, 'global_batch'])}")
            by_section.setdefault(known[name].section, {})[name] = value
        config = dataclasses.replace(
            self,
            **{name: dataclasses.replace(getattr(self, name), **part) for name, part in by_section.items()},
        )
        if global_batch is None:
            return config
        if not isinstance(global_batch, int):
            raise InputError(f"global batch {global_batch!r} is not a whole number")
        return config._rescaled(global_batch)

    def _rescaled(self, global_batch: int) -> Self:
        first = self.global_batch
        if global_batch == first:
            return self
        phases = []
        for phase in self.schedule.batch_phases:
            scaled, rest = divmod(phase.global_batch * global_batch, first)
            if rest:
                raise InputError(
                    f"global batch {global_batch} does not scale the batch phases "
                    f"{format_value(self.schedule.batch_phases)} to whole numbers; give --batch-phases instead"
                )
            phases.append(BatchPhase(phase.from_epoch, scaled))
        # The rate stays the recipe's at the recipe's batch: linear scaling then finds the new one.
        lr_batch = self.schedule.lr_batch or first
        schedule = dataclasses.replace(self.schedule, batch_phases=tuple(phases), lr_batch=lr_batch)
        return dataclasses.replace(self, schedule=schedule)

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts, lists and numbers, as JSON would give back."""
        return _plain(dataclasses.asdict(self))

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_dict`. A field that an older version saved and that is gone is left out."""
        saved = ((spec, values.get(spec.section, {})) for spec in fields())
        known = {spec.name: spec.coerce(part[spec.name]) for spec, part in saved if spec.name in part}
        return cls(recipe=values.get("recipe", "custom")).override(**known)


@dataclass(frozen=True, slots=True)
class FieldSpec:
    """One config field as the command line sees it."""

    name: str
    section: str
    type: Any
    default: Any
    help: str
    allowed: tuple[str, ...] | str  # names, or a rule
    free: bool
    repeated: bool

    def of(self, config: Config) -> Any:
        return getattr(getattr(config, self.section), self.name)

    @property
    def choices(self) -> tuple[str, ...]:
        return () if isinstance(self.allowed, str) else self.allowed

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def parse(self, text: str) -> Any:
        """The value a command line text stands for; InputError names the field and what it expects."""
        try:
            return self.coerce(_parse(self.type, text))
        except ValueError as error:
            raise InputError(f"{self.flag}: {text!r} is not {_describe(self.type)}") from error

    def read(self, value: Any) -> Any:
        """The value that a TOML file gives: a text is read as on the command line, lists become tuples."""
        if isinstance(value, str):
            return self.parse(value)
        if isinstance(value, list):
            value = _tuples(value)
            pairs = value and all(isinstance(part, tuple) and len(part) == 2 for part in value)
            return self.coerce(value) if pairs else value
        # A whole number is a number: 30 and 30.0 are the same run.
        return float(value) if type(value) is int and "float" in str(self.type) else value

    def coerce(self, value: Any) -> Any:
        """JSON lists become the tuples the field declares."""
        item = _tuple_item(self.type)
        if item is None or value is None:
            return value
        return tuple(item(*v) if hasattr(item, "_fields") else v for v in value)


@cache
def fields() -> tuple[FieldSpec, ...]:
    """Every field of every section, in declaration order."""
    hints = typing.get_type_hints(Config)
    return tuple(
        FieldSpec(f.name, section, typing.get_type_hints(hints[section])[f.name], f.default, **f.metadata)
        for section in section_titles()
        for f in dataclasses.fields(hints[section])
    )


def section_titles() -> dict[str, str]:
    """The sections, in declaration order, with the heading of each."""
    return {f.name: f.metadata["title"] for f in dataclasses.fields(Config) if "title" in f.metadata}


def format_value(value: Any) -> str:
    """The text `FieldSpec.parse` reads back."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ",".join(
            ":".join(format_value(v) for v in item) if isinstance(item, tuple) else format_value(item) for item in value
        )
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() else repr(value)
    return str(value)


def _tuples(value: Any) -> Any:
    return tuple(_tuples(part) for part in value) if isinstance(value, list | tuple) else value


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple) else value


def _tuple_item(hint: Any) -> Any:
    return typing.get_args(hint)[0] if typing.get_origin(hint) is tuple else None


def _parse(hint: Any, text: str) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if text.lower() == "none":
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    if hint is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise ValueError(text)
        return text.lower() in ("true", "1", "yes")
    item = _tuple_item(hint)
    if item is None:
        return hint(text)
    parts = [part for part in text.split(",") if part]
    if hasattr(item, "_fields"):
        kinds = list(typing.get_type_hints(item).values())
        rows = [part.split(":") for part in parts]
        if any(len(row) != len(kinds) for row in rows):
            raise ValueError(text)
        return tuple(tuple(kind(v) for kind, v in zip(kinds, row, strict=True)) for row in rows)
    args = typing.get_args(hint)
    if args[-1] is not Ellipsis and len(parts) != len(args):
        raise ValueError(text)
    return tuple(item(part) for part in parts)


def _describe(hint: Any) -> str:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return " or ".join("none" if arg is type(None) else _describe(arg) for arg in typing.get_args(hint))
    if hint is bool:
        return "true or false"
    item = _tuple_item(hint)
    if item is None:
        return {int: "a whole number", float: "a number", str: "a text"}[hint]
    if hasattr(item, "_fields"):
        pair = "LAYER:FACTOR" if item is LayerRate else "EPOCH:VALUE"
        return f"a list {pair},{pair}"
    args = typing.get_args(hint)
    return "a list of numbers" if args[-1] is Ellipsis else f"{len(args)} numbers LOW,HIGH"


def _fits(hint: Any, value: Any) -> bool:
    """Whether a value has a field's type. A whole number is a number; true and false are neither."""
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        return any(_fits(arg, value) for arg in typing.get_args(hint))
    item = _tuple_item(hint)
    if item is not None:
        args = typing.get_args(hint)
        if not isinstance(value, tuple | list) or (args[-1] is not Ellipsis and len(value) != len(args)):
            return False
        return all(_fits(item, part) for part in value)
    if hasattr(hint, "_fields"):
        kinds = typing.get_type_hints(hint).values()
        return isinstance(value, hint) and all(_fits(kind, part) for kind, part in zip(kinds, value, strict=True))
    if isinstance(value, bool):
        return hint is bool
    return isinstance(value, int | float if hint is float else hint)


def _finite(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return all(_finite(part) for part in value)
    return not isinstance(value, float) or math.isfinite(value)


def check(config: Config) -> None:
    """Raises InputError for a value no run could use; names the flag and the range."""
    for spec in fields():
        value = spec.of(config)
        if not _fits(spec.type, value):
            raise InputError(f"{spec.flag}: {value!r} is not {_describe(spec.type)}")
        if spec.choices and value is not None and value not in spec.choices:
            raise InputError(f"{spec.flag}: {value!r} is not one of {', '.join(spec.choices)}")
        if not _finite(value):
            raise InputError(f"{spec.flag} {format_value(value)}: must be a finite number")
        if isinstance(spec.allowed, str) and value is not None and not RULES[spec.allowed](value):
            raise InputError(f"{spec.flag} {format_value(value)}: must {spec.allowed}")

    def need(ok: bool, name: str, what: str) -> None:
        if not ok:
            spec = next(spec for spec in fields() if spec.name == name)
            raise InputError(f"{spec.flag} {format_value(spec.of(config))}: {what}")

    o, s, d, r = config.optim, config.schedule, config.data, config.run
    need(s.warmup_epochs <= s.epochs, "warmup_epochs", f"must be between 0 and the {s.epochs:g} epochs")
    need(bool(s.batch_phases) and s.batch_phases[0].from_epoch == 0, "batch_phases", "must start at epoch 0")
    need(all(p.global_batch > 0 for p in s.batch_phases), "batch_phases", "every global batch must be positive")
    starts = [p.from_epoch for p in s.batch_phases]
    need(starts == sorted(set(starts)), "batch_phases", "epochs must increase")
    need(all(p.image_size > 0 for p in d.size_phases), "size_phases", "every image size must be positive")
    need(all(epoch >= 0 for epoch in s.milestones), "milestones", "must not be negative")
    need(r.seed < 1 << 63, "seed", "must be below 2^63")
    need(0 < d.crop_area[0] <= d.crop_area[1] <= 1, "crop_area", "must be LOW,HIGH with 0 < LOW <= HIGH <= 1")
    need(0 < d.crop_aspect[0] <= d.crop_aspect[1], "crop_aspect", "must be LOW,HIGH with 0 < LOW <= HIGH")
    need(0 < d.jitter_sides[0] <= d.jitter_sides[1], "jitter_sides", "must be LOW,HIGH with 0 < LOW <= HIGH")
    need(d.flip or not d.flip_alternates, "flip_alternates", "needs --flip")
    need(all(layer and factor >= 0 for layer, factor in o.layer_rates), "layer_rates", "no factor may be negative")
    need(not o.nesterov or o.momentum > 0, "nesterov", "needs a momentum above 0")
    need(
        o.averaging == "none" or not config.comm.sharded_update or o.precision in ("fp32", "fp64"),
        "averaging",
        "with --sharded-update no rank has all fp32 weights of a 16-bit run; leave one of the two out",
    )
    need(r.spike_factor == 0 or r.spike_factor > 1, "spike_factor", "must be above 1, or 0")
    signals = () if r.preempt_signals is None else r.preempt_signals.split(",")
    known = all(hasattr(signal, f"SIG{name}") and name not in NEVER_SEEN for name in signals)
    need(known, "preempt_signals", "must be names of signals that a process may handle, e.g. TERM,USR1")
    sharded = config.comm.sharded_update
    need(not sharded or o.optimizer != "adamw", "sharded_update", "supports lars, sgd and muon, not adamw")
    need(r.target_top1 is None or 0 < r.target_top1 <= 1, "target_top1", "must be in (0, 1], e.g. 0.759")
