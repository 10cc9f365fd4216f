"""Facebook's ResNet-50 in one hour (2017): linear scaling and gradual warm-up."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe

# Linear scaling, as others adopted it: 0.1 per 256 images, reached over 5 epochs from the unscaled rate.
GOYAL_SGD = {
    "optimizer": "sgd",
    "momentum": 0.9,
    "weight_decay": 1e-4,
    "momentum_rule": "lr_outside",
    "label_smoothing": 0.0,
    "epochs": 90,
    "lr": 0.1,
    "lr_batch": 256,
    "warmup": "goyal",
    "warmup_epochs": 5,
    "decay": "step",
    "milestones": (30, 60, 80),
}


@recipe(
    claim="76.26 % top-1 in 65 minutes on 256 P100 (90 epochs, batch 8,192; 76.40 % at batch 256)",
    source="Goyal et al., Accurate, Large Minibatch SGD: Training ImageNet in 1 Hour, arXiv 1706.02677",
    chosen=(
        "The smallest crop area is 0.08 and the aspect ratio 3/4 to 4/3, as in the augmentation that the paper "
        "refers to.",
    ),
    ranks=256,
    cluster="facebook_p100",
)
def facebook_resnet50() -> Config:
    """SGD with a learning rate of 0.1 per 256 images. The warm-up starts at 0.1 and takes 5 epochs, and the learning
    rate is divided by 10 at epochs 30, 60 and 80.

    The last norm scale of each residual block starts at 0, and norm parameters are not decayed. Gradients are sent
    layer by layer, and are first reduced inside each server of 8 GPUs.

    hyperbatch train facebook_resnet50 --data DIR
    """
    return Config(recipe="facebook_resnet50").override(
        **GOYAL_SGD,
        model="resnet50",
        batch_phases=(BatchPhase(0, 8_192),),
        zero_init_last_gamma=True,
        nesterov=True,
        algorithm="hierarchical",
        grouping="per_layer",
        target_top1=0.7626,
    )
