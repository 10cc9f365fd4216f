"""Mixup and CutMix: what is drawn, how images and labels are mixed, and that batches do not depend on how they are cut.

The kernels run by Triton's interpreter.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hopper import compile_launches
from interpreter import INTERPRETED, inside, outside, run_by_the_interpreter
from torch.nn import functional as F

from hyperbatch.config import BatchPhase, Config, DataConfig
from hyperbatch.data import mix
from hyperbatch.data.cache import DeviceCache
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import ArraySource
from hyperbatch.data.stream import Stretches
from hyperbatch.errors import InputError
from hyperbatch.models import mixed_cross_entropy, smoothed_cross_entropy
from hyperbatch.schedule import resolve_phases, steps, strides

CPU = torch.device("cpu")
BOTH = DataConfig(image_size=8, eval_size=8, augment="none", flip=False, mixup=0.2, cutmix=1.0)


@outside
def test_kernels_by_the_interpreter():
    run_by_the_interpreter(__file__)


def drawn(config, places=None, length=1000, micro_batches=None, seed=3, size=32, step_start=0):
    places = places or Stretches.single(0, 400)
    parts = micro_batches or (places.share,)
    return mix.draw(config, seed, length, places, step_start=step_start, micro_batches=parts, size=size)


def arrays(n=60, size=8, channels=3):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, size, size, channels), dtype=np.uint8)
    return ArraySource("array", images, rng.integers(0, 10, n), classes=tuple(map(str, range(10))))


# --- what is drawn


@outside
@pytest.mark.parametrize("alpha", [0.1, 0.2, 0.5, 1.0, 2.0, 8.0])
def test_weights_are_quantiles_of_the_beta_distribution(alpha):
    stats = pytest.importorskip("scipy.stats")
    table = mix.beta_quantiles(alpha)
    assert (np.diff(table) >= 0).all()
    low, high = table[:32768], table[:32767:-1]
    np.testing.assert_allclose(
        stats.beta.cdf(low, alpha, alpha), (np.arange(32768) + 0.5) / 65536, rtol=1e-4, atol=1e-8
    )
    np.testing.assert_array_equal(high, 1 - low)


@outside
def test_boxes_are_those_of_torchvision_and_timm():
    rng = np.random.default_rng(0)
    weights, ux, uy = rng.random((3, 500))
    boxes = mix.cut_boxes(weights, ux, uy, 33)
    for weight, x, y, box in zip(weights, (ux * 33).astype(int), (uy * 33).astype(int), boxes, strict=True):
        half = int(0.5 * np.sqrt(1.0 - weight) * 33)  # torchvision's CutMix
        assert box.tolist() == [max(x - half, 0), max(y - half, 0), min(x + half, 33), min(y + half, 33)]
        cut = int(33 * np.sqrt(1 - weight))  # timm's rand_bbox
        assert box.tolist() == np.clip([x - cut // 2, y - cut // 2, x + cut // 2, y + cut // 2], 0, 33).tolist()


@outside
def test_neighbours_are_partners_and_draw_once():
    for config in (dataclasses.replace(BOTH, cutmix=0.0), dataclasses.replace(BOTH, mixup=0.0), BOTH):
        found = drawn(config, Stretches.single(10, 7))
        assert found.partners.tolist() == [1, 0, 3, 2, 5, 4, 6]
        for part in (found.boxes, found.weights, found.shares):
            assert (part[0] == part[1]).all()
            assert (part[2] == part[3]).all()
        # The last of an odd number stays what it is.
        assert found.weights[6] == found.shares[6] == 1
        assert not found.boxes[6].any()
    assert drawn(BOTH, Stretches.single(10, 5), micro_batches=(3, 2)).partners.tolist() == [1, 0, 2, 4, 3]


@outside
def test_a_step_is_mixed_in_one_way_and_both_occur():
    ways = []
    for step in range(40):
        found = drawn(BOTH, Stretches.single(400 * step, 400), length=1000, step_start=400 * step)
        cut = (found.boxes[:, 2] > found.boxes[:, 0]).any()
        assert (found.weights == 1).all() if cut else not found.boxes.any()
        ways.append(cut)
    assert 10 < sum(ways) < 30
    share = drawn(dataclasses.replace(BOTH, mixup=0.0)).shares
    weight = drawn(dataclasses.replace(BOTH, cutmix=0.0)).weights
    assert 0.45 < weight.mean() < 0.55
    assert 0.55 < share.mean() < 0.75  # boxes are cut off at the edge
    assert len(np.unique(weight)) > 150


@outside
@pytest.mark.parametrize("field", ["mixup", "cutmix"])
def test_alpha_must_not_be_negative(field):
    with pytest.raises(InputError, match=f"--{field} -1: must not be negative"):
        Config().override(**{field: -1.0})


# --- images and labels


def plainly_mixed(images, found):
    """Row by row."""
    out = images.clone()
    for i, j in enumerate(found.partners):
        weight = float(found.weights[i])
        out[i] = weight * images[i] + (1 - weight) * images[j]
        left, top, right, bottom = found.boxes[i]
        out[i, :, top:bottom, left:right] = images[j, :, top:bottom, left:right]
    return out


@pytest.mark.parametrize("config", [dataclasses.replace(BOTH, cutmix=0.0), dataclasses.replace(BOTH, mixup=0.0)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize(("n", "size", "channels"), [(7, 9, 3), (4, 20, 1), (1, 5, 3)])
def test_images_are_mixed_in_pairs(config, dtype, n, size, channels):
    """By the reference, and inside the interpreter by the kernel."""
    images = torch.randn(n, channels, size, size, generator=torch.Generator().manual_seed(n)).to(dtype)
    images = images.to(memory_format=torch.channels_last)
    found = drawn(config, Stretches.single(3, n), size=size)
    mixed = mix.mix_images(images, found)
    assert mixed.dtype == dtype
    assert mixed.is_contiguous(memory_format=torch.channels_last)
    expected = plainly_mixed(images.double(), found).to(dtype)
    torch.testing.assert_close(
        mixed, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-6 if dtype != torch.float16 else 1e-3
    )
    tables = [torch.from_numpy(part) for part in found[:3]]
    # The kernel may fuse its last product and addition: a unit in the last place of fp32, before it is rounded.
    torch.testing.assert_close(mixed, mix.mix_reference(images, *tables), rtol=torch.finfo(dtype).eps, atol=2e-7)


def one_hot(labels, classes, smoothing):
    """timm's: on and off values."""
    return F.one_hot(labels.long(), classes).double() * (1 - smoothing) + smoothing / classes


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
def test_loss_is_that_of_the_mixed_targets_of_timm_and_torchvision(smoothing, dtype):
    generator = torch.Generator().manual_seed(1)
    logits = (3 * torch.randn(8, 13, generator=generator)).to(dtype).requires_grad_()
    labels = torch.randint(13, (8,), generator=generator)
    table = mix.mix_labels(labels, drawn(dataclasses.replace(BOTH, cutmix=0.0), Stretches.single(0, 8)))
    assert table.dtype == torch.float32
    assert table[:, 0].tolist() == labels.tolist()
    assert table[:, 1].tolist() == labels.view(4, 2).flip(1).flatten().tolist()
    loss = mixed_cross_entropy(logits, table, smoothing)
    if INTERPRETED and dtype != torch.float64:
        assert "SmoothedCrossEntropy" in type(loss.grad_fn).__name__
    (gradient,) = torch.autograd.grad(loss, logits)

    wide, share = logits.detach().double().requires_grad_(), table[:, 2:].double()
    target = one_hot(table[:, 0], 13, smoothing) * share + one_hot(table[:, 1], 13, smoothing) * (1 - share)
    expect = (-target * F.log_softmax(wide, dim=1)).sum(1).mean()  # timm's SoftTargetCrossEntropy
    plain = one_hot(table[:, 0], 13, 0.0) * share + one_hot(table[:, 1], 13, 0.0) * (1 - share)
    torch.testing.assert_close(F.cross_entropy(wide, plain, label_smoothing=smoothing), expect)  # torchvision's
    torch.testing.assert_close(loss.double(), expect, rtol=1e-6, atol=2e-6)
    atol = 1e-7 if dtype != torch.float16 else 1e-5
    torch.testing.assert_close(
        gradient.double(),
        torch.autograd.grad(expect, wide)[0],
        rtol=2e-3 if dtype == torch.float16 else 1e-5,
        atol=atol,
    )


def test_a_whole_share_is_the_plain_loss():
    logits = torch.randn(6, 5, generator=torch.Generator().manual_seed(2))
    labels = torch.tensor([0, 1, 2, 3, 4, 0])
    table = torch.stack([labels.float(), labels.flip(0).float(), torch.ones(6)], dim=1)
    torch.testing.assert_close(
        mixed_cross_entropy(logits, table, 0.1), smoothed_cross_entropy(logits, labels, 0.1), rtol=1e-6, atol=0
    )


@inside
def test_labels_that_name_no_class_make_nan():
    for bad in (-1.0, 5.0):
        for column in (0, 1):
            table = torch.tensor([[0.0, 1.0, 0.5], [2.0, 2.0, 0.5]])
            table[1, column] = bad
            assert mixed_cross_entropy(torch.randn(2, 5, requires_grad=True), table, 0.1).isnan()


@outside
def test_kernels_compile_for_hopper(monkeypatch):
    pytest.importorskip("triton")
    from hyperbatch.kernels import loss
    from hyperbatch.kernels import mix as kernels

    compiled_loss = compile_launches(monkeypatch, loss)
    loss.SmoothedCrossEntropy.apply(torch.zeros(4, 10, dtype=torch.float16, requires_grad=True), torch.zeros(4, 3), 0.1)
    assert "_loss_kernel" in compiled_loss
    compiled = compile_launches(monkeypatch, kernels)
    kernels.mix(
        torch.zeros(4, 32, 32, 3, dtype=torch.float16),
        torch.zeros(4, dtype=torch.int64),
        torch.zeros(4, 4, dtype=torch.int64),
        torch.zeros(4),
    )
    assert "st.global.v4.b32" in compiled["mix_kernel"]  # 16 bytes at a time


# --- batches of the loader


def batches(world_size=1, accumulate=1, length=1, config=BOTH, global_batch=12, count=6):
    """{step: (images, labels) of all ranks, in the order of the stream}"""
    source = arrays()
    found = [[] for _ in range(count)]
    for rank in range(world_size):
        phases = resolve_phases((BatchPhase(0, global_batch),), len(source), world_size, accumulate=accumulate)
        todo = list(steps(phases, len(source), 10))[:count]
        loader = TrainLoader(source, config, seed=1, rank=rank, world_size=world_size, device=CPU, dtype=torch.float32)
        groups = list(strides(iter(todo), length=lambda _: length, shape=lambda _: 0, ends=lambda _: False))
        with loader:
            made = loader.batches(groups)
            for group in groups:
                share = phases[0].share_per_rank
                launches = 1 if len(group) > 1 else accumulate
                parts = [next(made) for _ in range(launches)]
                images = torch.cat([part.images for part in parts]).split(share)
                labels = torch.cat([part.labels for part in parts]).split(share)
                for step, *both in zip(group, images, labels, strict=True):
                    found[step.index].append(both)
    return [[torch.cat(parts) for parts in zip(*ranks, strict=True)] for ranks in found]


def same(left, right):
    return all(torch.equal(a, b) for pair in zip(left, right, strict=True) for a, b in zip(*pair, strict=True))


@outside
def test_batches_do_not_depend_on_ranks_accumulation_or_strides():
    expected = batches()
    assert expected[0][1].shape == (12, 3)
    assert same(batches(world_size=2), expected)
    assert same(batches(accumulate=3), expected)
    assert same(batches(world_size=3, accumulate=2, length=3), expected)
    assert not same(batches(config=dataclasses.replace(BOTH, mixup=0.0)), expected)


@outside
def test_strides_of_odd_micro_batches_give_the_batches_of_single_steps():
    assert same(batches(accumulate=2, global_batch=10, length=3), batches(accumulate=2, global_batch=10))


@outside
def test_resumed_batches_go_on_and_evaluation_is_not_mixed():
    source, whole = arrays(), batches(count=6)
    phases = resolve_phases((BatchPhase(0, 12),), len(source), 1)
    loader = TrainLoader(source, BOTH, seed=1, rank=0, world_size=1, device=CPU, dtype=torch.float32)
    with loader:
        later = list(loader.batches(list(steps(phases, len(source), 10, index=4, position=48))[:2]))
        plain = next(loader.plain(5))
    assert same([[batch.images, batch.labels] for batch in later], whole[4:])
    assert plain.labels.tolist() == source.labels[:5].tolist()


@inside
def test_a_set_in_device_memory_is_mixed_as_on_the_host():
    source = arrays()
    cache = DeviceCache(len(source), source.images.nbytes)
    cache.put_array(source, CPU)
    maker = DeviceMaker(
        source, BOTH, device=CPU, dtype=torch.float32, decoder="pillow", cpu_decoder="pillow", cache=cache
    )
    phases = resolve_phases((BatchPhase(0, 12),), len(source), 1)
    loader = TrainLoader(source, BOTH, seed=1, rank=0, world_size=1, device=CPU, dtype=torch.float32)
    todo = list(steps(phases, len(source), 10))[:4]
    with loader:
        expected = list(loader.batches(todo))
        found = [batch for batch, _ in maker.run(loader._plans(todo, 0))]
    for host, device in zip(expected, found, strict=True):
        torch.testing.assert_close(device.images, host.images, rtol=1e-6, atol=1e-6)
        assert torch.equal(device.labels, host.labels)
