"""A small network learns real images through the whole data path: tars, packed shards, decoding, views, training."""

import io
import os
import tarfile
from pathlib import Path

import pytest

from hyperbatch.config import BatchPhase, Config, DataConfig, ModelConfig, OptimConfig, RunConfig, ScheduleConfig
from hyperbatch.data.folders import TarSource, tar_paths
from hyperbatch.data.pack import pack
from hyperbatch.data.verify import verify
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks

ROOT = Path(os.environ.get("HYPERBATCH_TEST_DATA", ""))


@pytest.mark.slow
@pytest.mark.skipif(
    "HYPERBATCH_TEST_DATA" not in os.environ, reason="HYPERBATCH_TEST_DATA does not name the folder of the test data"
)
def test_five_classes_of_tiny_imagenet_pass_50_percent(tmp_path):
    """ResNet-8 at 32 px, at most 6 epochs of 2,500 images."""
    (tmp_path / "tars").mkdir()
    for split in ("train", "val"):
        source = TarSource(tar_paths(ROOT / "tinyimagenet50", split), split)
        with tarfile.open(tmp_path / "tars" / f"{split}.tar", "w") as tar:
            for i in (source.labels % 10 == 0).nonzero()[0].tolist():
                data, member = source.read(i), tarfile.TarInfo(source.describe(i).partition(":")[2])
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    pack(tmp_path / "tars", tmp_path / "shards")
    assert verify(tmp_path / "shards").ok

    config = Config(
        recipe="five classes",
        model=ModelConfig(model="resnet8"),
        data=DataConfig(
            data=str(tmp_path / "shards"), image_size=32, eval_size=32, eval_resize=32, crop_area=(0.7, 1.0)
        ),
        optim=OptimConfig(optimizer="sgd", nesterov=True, weight_decay=5e-4),
        schedule=ScheduleConfig(
            epochs=6, batch_phases=(BatchPhase(0, 32),), lr=0.08, warmup_epochs=0.5, decay="cosine", end_lr=0.0
        ),
        run=RunConfig(device="cpu", target_top1=0.5, eval_every_epochs=1, out=str(tmp_path / "run")),
    )
    record = run(config, Ranks())  # with one thread: beside other tests, two would wait for each other
    assert record.result.reached, record.result
    assert record.warnings == []
