"""resnet, alexnet, loss; nothing here knows of ranks."""

from hyperbatch.models.build import create_model, model_names
from hyperbatch.models.loss import smoothed_cross_entropy

__all__ = ["create_model", "model_names", "smoothed_cross_entropy"]
