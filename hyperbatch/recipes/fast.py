"""ImageNet in fewer epochs, most of them with small images, as in MLPerf's open division and DAWNBench."""

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
        "LARS with MLPerf's learning rate at 1,632 images, scaled by the square root of the batch. Mild uses SGD "
        "with a learning rate of 2.0, momentum 0.875, a decoupled weight decay of 5e-4 and a cosine decay.",
        "Cross entropy with a label smoothing of 0.08. Mild uses binary cross entropy with this smoothing.",
        "There are six image sizes instead of one every 4 pixels, because a CUDA graph is captured for each size.",
    ),
    ranks=8,
    cluster="h200x8",
)
def resnet50_fast() -> Config:
    """ResNet-50 with a third of the epochs and a quarter of the pixels of `resnet50`. Training starts with small images
    and ends at 176 px, and evaluation uses 224 px (FixRes). Strided convolutions are blurred (BlurPool), and the
    weights are averaged (EMA).

    hyperbatch train resnet50_fast --data DIR
    """
    # As in Mild: half the size for 40 % of the run, growth until 80 % of it, and the rest at 176 px.
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
        averaging_decay=0.5 ** (20 / 100),  # half of the average is older than 100 steps
    )
