"""Sony (2018): batch-size control, label smoothing and the 2D-torus all-reduce."""

from __future__ import annotations

from hyperbatch.config import BatchPhase, Config
from hyperbatch.recipes import recipe
from hyperbatch.recipes.mlperf import POINTS, Point

_PAPER = "Mikami et al., Massively Distributed SGD: ImageNet/ResNet-50 Training in a Flash, arXiv 1811.05233"
_CHOSEN = (
    "The sources with the learning rates were not available. The recipe uses MLPerf's point with the nearest batch "
    "and scales its learning rate linearly.",
    "The polynomial decay of power 2 takes the rest of the 90 epochs.",
    "The grid is hosts x ranks per host. On all GPUs, a squarer grid has shorter rings.",
    "The tensor fusion is not described. The recipe uses cubic groups.",
)


def _resnet50(name: str, phases: tuple[BatchPhase, ...], point: Point, target_top1: float) -> Config:
    return Config(recipe=name).override(
        model="resnet50",
        momentum=point.momentum,
        weight_decay=point.weight_decay,
        label_smoothing=0.1,
        precision="fp16",
        epochs=90,
        batch_phases=phases,
        lr=point.lr,
        lr_batch=point.global_batch,
        warmup_epochs=point.warmup_epochs,
        algorithm="torus",
        target_top1=target_top1,
    )


@recipe(
    claim="75.29 % top-1 in 122 s on 3,456 V100 (90 epochs, batch 55,296)",
    source=_PAPER,
    chosen=_CHOSEN,
    ranks=3_456,
    cluster="abci",
)
def sony_resnet50() -> Config:
    """Each GPU has 16 images per step. The all-reduce runs along the rows, then the columns, then the rows of a 2D
    grid.

    Each column exchanges only one row's share of the bytes. On all 3,456 GPUs, add `--grid 48x72`.

    hyperbatch train sony_resnet50 --data DIR
    """
    return _resnet50("sony_resnet50", (BatchPhase(0, 55_296),), POINTS[58_880], 0.7529)


@recipe(
    claim="75.03 % top-1 in 224 s on 2,176 V100 (90 epochs, batch 34,816 then 69,632); 91.62 % scaling at 1,088",
    source=f"{_PAPER} (first version); NVIDIA's note on that record",
    chosen=(
        "The epoch of the batch change was not available. The recipe changes it after 30 of the 90 epochs.",
        *_CHOSEN,
    ),
    ranks=2_176,
    cluster="abci",
)
def sony_resnet50_2018() -> Config:
    """Batch-size control: 16 images per GPU at first, and 32 later, when the loss is smooth. The learning rate is not
    changed with the batch.

    On all 2,176 GPUs, add `--grid 34x64`.

    hyperbatch train sony_resnet50_2018 --data DIR
    """
    phases = (BatchPhase(0, 34_816), BatchPhase(30, 69_632))
    return _resnet50("sony_resnet50_2018", phases, POINTS[32_768], 0.7503)
