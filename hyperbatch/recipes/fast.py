"""ImageNet in fewer epochs, most of them at a fraction of the size: what the open division and DAWNBench used."""

from __future__ import annotations

from hyperbatch.config import Config, SizePhase
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import from_point, nearest_point

_BATCH = 2_048


@recipe(
    claim="MosaicML's Mild reached 75.9 % top-1 after 27 epochs at 88 to 176 px (the cost of 8.9 epochs at 224 px; "
    "1,427 s on 8 A100); this schedule costs 8.8 and was not run on ImageNet here",
    source="MosaicML's Mild: MLPerf v2.0 open division logs and mosaicml/examples (resnet_imagenet); sizes that grow, "
    "with LARS, as in Alibaba's DAWNBench entries",
    chosen=(
        "LARS with MLPerf's rate at 1,632 images, scaled by the square root (Mild: SGD with a rate of 2.0, momentum "
        "0.875, decoupled decay of 5e-4, cosine)",
        "cross entropy with label smoothing of 0.08 (Mild: binary cross entropy with that smoothing)",
        "six sizes in place of one every 4 pixels: each costs a captured graph",
    ),
    ranks=8,
    cluster="h200x8",
)
def resnet50_fast() -> Config:
    """ResNet-50 in a third of the epochs and a quarter of the pixels of `resnet50`: small images first, evaluation at
    224 px after training at 176 (FixRes), blurred strides (BlurPool), and an average of the weights (EMA).

    hyperbatch train resnet50_fast --data DIR
    """
    # As Mild: half the size for 40 % of the run, growth until 80 % of it, and the rest at 176 px.
    sizes = ((0, 88), (12, 112), (14.4, 128), (16.8, 144), (19.2, 160), (21.6, 176))
    return from_point(nearest_point(_BATCH), _BATCH, name="resnet50_fast").override(
        blurpool=True,
        epochs=27.0,
        image_size=176,
        size_phases=tuple(SizePhase(*size) for size in sizes),
        crop_area=(0.08, 1.0),
        eval_size=224,
        eval_resize=232,
        label_smoothing=0.08,
        averaging="ema",
        averaging_every_steps=20,
        averaging_decay=0.5 ** (20 / 100),  # half of it is older than 100 steps
    )
