"""Names and defaults that several rooms use. Each is defined once here, without torch."""

from __future__ import annotations

ALGORITHMS = ("flat", "hierarchical", "torus", "hybrid")  # how an all-reduce travels
HYBRID_SWITCH_BYTES = 1 << 20  # `hybrid` is hierarchical up to this message size and flat above it

STRATEGIES = ("single", "per_layer", "threshold", "equal", "cubic", "optimal")  # how gradients are grouped
GROUP_COUNT = 4  # groups of `equal`
GROUP_THRESHOLD_BYTES = 16 << 20  # a group of `threshold` is sent once it has this size
GROUP_BASE = 3  # tensors in the first group of `cubic`

OPTIMIZERS = ("lars", "lamb", "adamw", "muon", "sgd")  # update rules
MUON_COEFFICIENTS = ("original", "polar_express")  # polynomials of its iterations
MUON_ADJUSTMENTS = ("original", "match_rms_adamw", "none")  # how its learning rate depends on a matrix's shape
MOMENTUM_RULES = ("lr_inside", "lr_outside", "rescaled", "unscaled")  # where the rate enters the momentum of LARS

ACTIVATIONS = ("gelu", "silu")  # activations of models that offer a choice
TTA = ("none", "mirror", "mirror_shift")  # views of an image that evaluation averages over
TIMM = "timm"  # the value of --init-from that is not a file: timm's pretrained weights
TIMM_MODEL = f"{TIMM}/"  # prefix of the names of timm's models
LOSSES = ("cross_entropy", "bce")  # training losses
AVERAGING = ("none", "ema", "lookahead")  # averages of the weights over steps

TRACKERS = ("wandb", "mlflow", "tensorboard")  # services that curves can be sent to; their packages have these names

PRECISION_DTYPE = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
DEVICE_PRECISIONS = ("auto", "fp16_on_gpu")  # the precision that these mean depends on the device
PRECISIONS = (*PRECISION_DTYPE, *DEVICE_PRECISIONS)
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
HALF_DTYPES = tuple(name for name, nbytes in DTYPE_BYTES.items() if nbytes == 2)

IMAGENET_MEAN = (0.485, 0.456, 0.406)  # of red, green and blue in [0, 1]; image files are normalised with these
IMAGENET_STD = (0.229, 0.224, 0.225)


def is_foreign(model: str) -> bool:
    """Whether the name is that of timm's model or the user's own: `timm/NAME`, `package.module:callable`."""
    return model.startswith(TIMM_MODEL) or ":" in model
