"""Models and losses: resnet, alexnet, whitenet, vit. Models do not know about ranks; a norm layer may be given a
process group."""

from hyperbatch.models.build import create_from, create_model, model_names, pretrained_weights, without_values
from hyperbatch.models.loss import Loss, binary_cross_entropy, mixed_cross_entropy, smoothed_cross_entropy
from hyperbatch.models.norm import merge_norm_statistics, merged_buffers, norm_buffers, set_norm_group

__all__ = [
    "Loss",
    "binary_cross_entropy",
    "create_from",
    "create_model",
    "merge_norm_statistics",
    "merged_buffers",
    "mixed_cross_entropy",
    "model_names",
    "norm_buffers",
    "pretrained_weights",
    "set_norm_group",
    "smoothed_cross_entropy",
    "without_values",
]
