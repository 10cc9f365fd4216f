"""A set in device memory: its batches are the host's, drawn by kernels that repeat the stream bit for bit.

The kernels run on CPU tensors, by Triton's interpreter.
"""

from __future__ import annotations

import dataclasses
import re

import numpy as np
import pytest
import torch
from hopper import compile_launches
from interpreter import inside, outside, run_by_the_interpreter

from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data import augment, loader, stream
from hyperbatch.data.batch import BatchPlan, StreamPlan
from hyperbatch.data.cache import DeviceCache
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.host import HostMaker
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import ArraySource
from hyperbatch.data.stream import Stretches
from hyperbatch.schedule import resolve_phases, steps

CPU = torch.device("cpu")
RECORD = DataConfig(  # all at once
    image_size=8,
    eval_size=8,
    augment="shift",
    shift_pixels=2,
    shift_padding="reflect",
    flip_alternates=True,
    brightness_jitter=0.1,
    contrast_jitter=0.2,
    cutout=3,
)
PLAIN = dataclasses.replace(
    RECORD, shift_padding="zero", flip_alternates=False, brightness_jitter=0, contrast_jitter=0, cutout=0
)


@outside
def test_resident_sets_by_the_interpreter():
    run_by_the_interpreter(__file__)


def arrays(n=40, size=8, channels=3, distinct=None):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (distinct or n, size, size, channels), dtype=np.uint8)
    return ArraySource("array", images, rng.integers(0, 10, n), classes=tuple(map(str, range(10))))


def on_device(source, config, dtype=torch.float32):
    """As the loader makes it on a GPU."""
    cache = DeviceCache(len(source), source.images.nbytes)
    cache.put_array(source, CPU)
    return DeviceMaker(source, config, device=CPU, dtype=dtype, decoder="pillow", cpu_decoder="pillow", cache=cache)


def on_host(source, config, dtype=torch.float32):
    return HostMaker(source, config, device=CPU, dtype=dtype, decoder="pillow")


def planned(source, config, places, seed=5):
    return StreamPlan(places=places, length=len(source), seed=seed, config=config, size=config.image_size)


def made(maker, *plans):
    return [batch for batch, _ in maker.run(iter(plans))]


# --- drawing


@inside
@pytest.mark.parametrize("length", [1, 2, 5, 300, 1433, 50_000, 65_537])
@pytest.mark.parametrize("seed", [0, 2**63 - 1])
def test_the_device_draws_what_the_stream_says(length, seed):
    from hyperbatch.kernels.augment import draw

    labels = np.random.default_rng(1).integers(0, 1000, length)
    keys = torch.from_numpy(np.array(stream.keys(seed), dtype=np.uint64).view(np.int64))
    ranges = torch.tensor([RECORD.brightness_jitter, RECORD.contrast_jitter], dtype=torch.float64)
    for places in (
        Stretches.single(0, 1),
        Stretches.single(2 * length - length // 3 - 1, 300),  # from one epoch into the next
        Stretches(7 * 10**9 + 3, 260, share=50, stride=120),  # a rank's shares of several steps, the last cut short
    ):
        drawn = draw(
            torch.from_numpy(labels),
            keys,
            ranges,
            places=places,
            grid=stream.grid(length),
            images=max(1, length // 2),
            shift=2,
            flip="alternating",
            jitter_column=augment.jitter_column(RECORD),
            corner_column=augment.cutout_column(RECORD),
            corners=6,
        )
        epochs, ids = places.samples(length, seed)
        uniforms = augment.draw(RECORD, seed, epochs, ids)
        expected = ids % max(1, length // 2), *augment.shifts(RECORD, uniforms).T, augment.flips(RECORD, uniforms)
        assert (drawn.picks.numpy() == np.stack(expected, axis=1)).all()
        assert (drawn.colors.numpy() == np.stack(augment.jitter(RECORD, uniforms), axis=1).astype(np.float32)).all()
        assert (drawn.labels.numpy() == labels[ids]).all()
        assert (drawn.corners.numpy() == augment.cutout_corners(RECORD, uniforms, 8)).all()


@inside
@pytest.mark.parametrize("flip", ["none", "random"])
def test_the_device_draws_what_is_asked_for(flip):
    from hyperbatch.kernels.augment import draw

    config = DataConfig(augment="none", flip=flip == "random")
    keys = torch.from_numpy(np.array(stream.keys(3), dtype=np.uint64).view(np.int64))
    drawn = draw(
        torch.zeros(100, dtype=torch.int64),
        keys,
        torch.ones(2, dtype=torch.float64),
        places=Stretches.single(150, 100),
        grid=stream.grid(100),
        images=100,
        shift=0,
        flip=flip,
        jitter_column=0,
    )
    epochs, ids = stream.stretch(150, 100, 100, 3)
    mirrored = augment.flips(config, augment.draw(config, 3, epochs, ids))
    assert (drawn.picks.numpy() == np.stack([ids, 0 * ids, 0 * ids, mirrored], axis=1)).all()
    assert drawn.colors.tolist() == [[1, 0]] * 100
    assert drawn.corners is None


def test_stretches_are_one_ranks_samples_of_several_steps():
    for world_size, rank in ((1, 0), (3, 1)):
        share, length = 4, 13
        whole = Stretches(20 + rank * share, 22, share=share, stride=share * world_size).samples(length, 1)
        parts = [
            stream.stretch(stream.rank_share(20 + k * share * world_size, share, world_size, rank), share, length, 1)
            for k in range(6)
        ]
        for ours, theirs in zip(whole, zip(*parts, strict=True), strict=True):
            assert ours.tolist() == np.concatenate(theirs)[:22].tolist()


# --- batches


@inside
@pytest.mark.parametrize("config", [RECORD, PLAIN, dataclasses.replace(RECORD, augment="none")])
@pytest.mark.parametrize(("size", "channels", "distinct"), [(8, 3, None), (7, 1, None), (8, 1, 11), (20, 3, None)])
def test_batches_are_the_hosts(config, size, channels, distinct):
    source = arrays(40, size, channels, distinct)
    config = dataclasses.replace(config, image_size=size)
    plans = [planned(source, config, places) for places in (Stretches.single(30, 25), Stretches(3, 8, 4, 16))]
    maker = on_device(source, config)
    assert all(maker.needs_no_host(plan) for plan in plans)
    for ours, theirs in zip(made(maker, *plans), made(on_host(source, config), *plans), strict=True):
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.allclose(ours.images, theirs.images, rtol=0, atol=1e-6)  # brightness is rounded once more there
        assert torch.equal(ours.images == 0, theirs.images == 0)  # the squares
        assert torch.equal(ours.labels, theirs.labels)
        assert ours.mask is None


@inside
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_batches_have_the_learners_precision(dtype):
    source = arrays()
    plan = planned(source, RECORD, Stretches.single(0, 20))
    ours, theirs = (made(make(source, RECORD, dtype), plan)[0].images for make in (on_device, on_host))
    assert ours.dtype == theirs.dtype == dtype
    assert torch.allclose(ours, theirs, rtol=0, atol=2e-3 if dtype == torch.float16 else 1e-5)


@inside
@pytest.mark.parametrize("config", [RECORD, PLAIN])
def test_resized_batches_are_those_of_the_general_way(config):
    source = arrays(40, distinct=23)
    config = dataclasses.replace(config, image_size=6)
    plan, maker = planned(source, config, Stretches.single(30, 25)), on_device(source, config)
    listed = BatchPlan(ids=plan.ids, epochs=plan.epochs, uniforms=plan.uniforms, size=6, padding=0)
    assert maker.needs_no_host(plan)
    assert not maker.needs_no_host(listed)
    ours, theirs = made(maker, plan, listed)
    assert torch.allclose(ours.images, theirs.images, rtol=0, atol=2e-6)
    assert torch.equal(ours.labels, theirs.labels)


@inside
def test_other_views_take_the_general_way():
    source = arrays()
    for config in (
        dataclasses.replace(RECORD, augment="random_resized_crop"),
        dataclasses.replace(RECORD, color_noise=0.1),
    ):
        plan, maker = planned(source, config, Stretches.single(0, 20)), on_device(source, config)
        assert not maker.needs_no_host(plan)
        ours, theirs = made(maker, plan)[0], made(on_host(source, config), plan)[0]
        assert torch.equal(ours.labels, theirs.labels)
        assert (ours.images - theirs.images).abs().mean() < 0.02  # the host rounds to grey levels


@inside
def test_evaluation_batches_are_the_hosts_bit_for_bit():
    source = arrays(30)
    for config in (RECORD, PLAIN):
        plan = BatchPlan(ids=np.minimum(np.arange(20, 36), 29), epochs=None, uniforms=None, size=8, padding=6)
        ours, theirs = (made(make(source, config), plan)[0] for make in (on_device, on_host))
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.mask, theirs.mask)
        assert torch.equal(ours.labels[:10], theirs.labels[:10])


# --- the loader


@pytest.fixture
def device_loader(monkeypatch):
    """Loaders make their batches as they would on a GPU."""
    makers = []

    def make(source, config, device, dtype, *_, **__):
        makers.append(on_device(source, config, dtype))
        return makers[-1]

    monkeypatch.setattr(loader, "_make_maker", make)
    return makers


def train(source, config, plan, *, rank=0, world_size=1):
    with TrainLoader(source, config, seed=5, rank=rank, world_size=world_size, device=CPU, dtype=torch.float32) as made:
        return list(made.batches(plan))


@inside
def test_a_resumed_run_and_two_ranks_see_the_same_stream(device_loader):
    source = arrays(12)
    plan = {n: list(steps(resolve_phases((BatchPhase(0, 8),), 12, n), 12, 4.0)) for n in (1, 2)}
    whole = train(source, RECORD, plan[1])
    for ours, theirs in zip(train(source, RECORD, plan[1][3:]), whole[3:], strict=True):
        assert torch.equal(ours.images, theirs.images)
    ranks = [train(source, RECORD, plan[2], rank=rank, world_size=2) for rank in (0, 1)]
    for first, second, theirs in zip(*ranks, whole, strict=True):
        assert torch.equal(torch.cat([first.images, second.images]), theirs.images)
        assert torch.equal(torch.cat([first.labels, second.labels]), theirs.labels)
    # Every image is mirrored in every other epoch.
    ids = torch.from_numpy(stream.stretch(0, 4 * 12, 12, 5)[1])
    plain = dataclasses.replace(PLAIN, augment="none", flip_alternates=True)
    images = torch.cat([batch.images for batch in train(source, plain, plan[1])])[: 4 * 12]
    for sample in range(12):
        seen = images[(ids == sample).nonzero().flatten()]
        assert torch.equal(seen[:-1], seen[1:].flip(-1))


@inside
def test_a_rehearsal_makes_what_lies_ready_at_once_and_leaves_no_trace(device_loader, monkeypatch):
    source = arrays(12)
    plan = list(steps(resolve_phases((BatchPhase(0, 4),), 12, 1), 12, 2.0))
    before = train(source, RECORD, plan)
    strides = [(plan[0],), tuple(plan[1:4])]
    with TrainLoader(source, RECORD, seed=5, rank=0, world_size=1, device=CPU, dtype=torch.float32) as made_by:
        made, make = [], DeviceMaker._resident_batch
        monkeypatch.setattr(DeviceMaker, "_resident_batch", lambda *a: (made.append(make(*a)), made[-1])[1])
        made_by.rehearse(strides)
        assert [len(batch.labels) for batch in made] == [4] * 4 + [12] * 4  # three ahead, and the one in use
        for ours, theirs in zip(made_by.batches(plan), before, strict=True):
            assert torch.equal(ours.images, theirs.images)
            assert torch.equal(ours.labels, theirs.labels)


@inside
def test_one_plan_of_many_steps_holds_their_batches():
    source = arrays(30)
    for rank in (0, 1):
        together = planned(source, RECORD, Stretches(3 + rank * 8, 40, share=8, stride=16))
        apart = [planned(source, RECORD, Stretches.single(3 + rank * 8 + k * 16, 8)) for k in range(5)]
        maker = on_device(source, RECORD)
        (one,), many = made(maker, together), made(maker, *apart)
        assert torch.equal(one.images, torch.cat([batch.images for batch in many]))
        assert torch.equal(one.labels, torch.cat([batch.labels for batch in many]))


# --- what is compiled


@outside
def test_the_kernels_compile_for_hopper(monkeypatch):
    """16-byte stores of the 16-bit images, and one byte loaded for each element."""
    kernels = pytest.importorskip("hyperbatch.kernels.augment")
    compiled = compile_launches(monkeypatch, kernels)
    for config in (RECORD, PLAIN):
        maker = on_device(arrays(40, 32), dataclasses.replace(config, image_size=32), torch.float16)
        made(maker, planned(arrays(40), dataclasses.replace(config, image_size=32), Stretches.single(0, 7)))
    assert {"draw_kernel", "cut_kernel"} <= set(compiled)
    assert "st.global.v4.b32" in compiled["cut_kernel"]
    loads = re.findall(r"ld\.global\.[bu]8", compiled["cut_kernel"])
    assert len(loads) == kernels._CUT_BLOCK // (32 * kernels._WARPS)
