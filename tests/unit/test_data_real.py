"""Real images, found through HYPERBATCH_TEST_DATA: CIFAR-10, tiny-imagenet and imagenette tars."""

import os
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data.cifar import CIFAR10, _find, count_cifar
from hyperbatch.data.folders import TarSource, tar_paths
from hyperbatch.data.loader import TrainLoader, eval_batches
from hyperbatch.data.pack import pack
from hyperbatch.data.source import open_data
from hyperbatch.data.verify import verify
from hyperbatch.schedule import resolve_phases, steps

ROOT = Path(os.environ.get("HYPERBATCH_TEST_DATA", ""))
pytestmark = pytest.mark.skipif(
    "HYPERBATCH_TEST_DATA" not in os.environ, reason="HYPERBATCH_TEST_DATA does not name the folder of the test data"
)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def imagenette():
    config = DataConfig(data=str(ROOT / "imagenette224_4k"), image_size=64, eval_size=64, eval_resize=72)
    return config, *open_data(config)


def test_imagenette_opens_and_loads(imagenette):
    config, train, val = imagenette
    assert (len(train), len(val), len(train.classes)) == (3000, 1000, 10)
    assert np.bincount(train.labels).tolist() == [300] * 10
    plan = steps(resolve_phases((BatchPhase(0, 64),), len(train), 1), len(train), 0.2)
    with TrainLoader(train, config, seed=0, rank=0, world_size=1, device=CPU, dtype=torch.float32) as loader:
        images = torch.cat([batch.images for batch in loader.batches(plan)])
        assert loader.bad_samples == []
    # Normalised photographs: near zero mean and unit deviation in every channel.
    assert abs(images.mean(dim=(0, 2, 3))).max() < 0.3
    assert (images.std(dim=(0, 2, 3)) - 1).abs().max() < 0.3
    batches = eval_batches(val, config, batch_per_rank=100, rank=1, world_size=2, device=CPU, dtype=torch.float32)
    assert sum(int(batch.mask.sum()) for batch in batches if batch.mask is not None) == 500


def test_a_subset_packs_verifies_and_reads_back_byte_for_byte(imagenette, tmp_path):
    _, train, val = imagenette
    (tmp_path / "src").mkdir()
    expected = {}
    for split, source, step in (("train", train, 30), ("val", val, 20)):
        with tarfile.open(tmp_path / "src" / f"{split}.tar", "w") as tar:
            for i in range(0, len(source), step):
                path = tmp_path / "image"
                path.write_bytes(source.read(i))
                tar.add(path, source.describe(i).partition(":")[2])
        labels = source.labels[::step]
        expected[split] = sorted(zip([source.read(i) for i in range(0, len(source), step)], labels.tolist()))
        assert len(set(labels.tolist())) == 10  # the tars are shuffled, so a stride meets every class
    assert pack(tmp_path / "src", tmp_path / "dst", shard_bytes=1 << 20).unreadable == 0
    assert verify(tmp_path / "dst").to_dict() == {
        "ok": True,
        "samples": 150,
        "bytes": sum(len(data) for rows in expected.values() for data, _ in rows),
        "problem_count": 0,
        "problems": [],
        "notes": [],
    }
    for split, source in zip(("train", "val"), open_data(DataConfig(data=str(tmp_path / "dst"))), strict=True):
        assert sorted((source.read(i), int(source.labels[i])) for i in range(len(source))) == expected[split]


def test_tiny_imagenet_opens_and_decodes():
    """The validation part: unpacking the other takes seconds and shows nothing more."""
    val = TarSource(tar_paths(ROOT / "tinyimagenet50", "val"), "val")
    assert (len(val), len(val.classes)) == (2_500, 50)
    assert np.bincount(val.labels).tolist() == [50] * 50
    assert all(val.image(i).shape == (64, 64, 3) for i in range(0, 2500, 25))


def test_cifar10_opens():
    """One part only: all of it takes a quarter of a minute to unpack."""
    folder = ROOT / "cifar10"
    assert count_cifar(CIFAR10, folder).train_samples == 50_000
    read, train, test = _find(folder)
    assert len(train) == 5
    images, labels = read(test[0])
    assert np.bincount(labels).tolist() == [1000] * 10
    # The known channel means of the set (of its training part; the test part is within 0.004).
    assert np.allclose(images.mean(axis=(0, 1, 2)) / 255, (0.4914, 0.4822, 0.4465), atol=0.006)
