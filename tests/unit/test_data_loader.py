"""The loader: batches are what the stream says, on every world size and thread count; evaluation counts once."""

import dataclasses
import gc
import io
import itertools
import os
import threading
import time
import weakref

import numpy as np
import pytest
import torch
from PIL import Image

from hyperbatch.config import BatchPhase, DataConfig, SizePhase
from hyperbatch.data import augment, maker, stream
from hyperbatch.data.cache import cache_of
from hyperbatch.data.loader import TrainLoader, eval_batches
from hyperbatch.data.meter import Meter
from hyperbatch.data.source import ArraySource, DataError, EncodedSource, open_data
from hyperbatch.engine.loop import run
from hyperbatch.engine.ranks import Ranks
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.recipes import find_recipe
from hyperbatch.schedule import resolve_phases, steps

CPU = torch.device("cpu")
SHIFT = DataConfig(dataset="digits", image_size=8, eval_size=8, augment="shift", shift_pixels=2, flip=True)
CROP = DataConfig(image_size=16, eval_size=16, eval_resize=18, data_threads=3)


def numbered(n, size=8, channels=1):
    """Images that carry their own index in every pixel, so a batch shows which samples it holds."""
    assert n <= 256
    images = np.broadcast_to(np.arange(n, dtype=np.uint8)[:, None, None, None], (n, size, size, channels)).copy()
    return ArraySource(
        "numbered", images, np.arange(n), classes=tuple(map(str, range(n))), mean=(0,) * channels, std=(1,) * channels
    )


class Encoded(EncodedSource):
    """JPEGs in memory; `broken` ones are cut short."""

    def __init__(self, n=24, broken=(), size=(40, 30)):
        super().__init__("encoded", tuple(map(str, range(n))), np.arange(n))
        rng = np.random.default_rng(0)
        self.files = []
        for i in range(n):
            buffer = io.BytesIO()
            coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
            coarse.resize(size, Image.Resampling.BICUBIC).save(buffer, "JPEG")
            self.files.append(buffer.getvalue()[: 300 if i in broken else None])

    def read(self, index):
        return self.files[index]


def loader(source, config, *, rank=0, world_size=1, seed=5, dtype=torch.float32):
    return TrainLoader(source, config, seed=seed, rank=rank, world_size=world_size, device=CPU, dtype=dtype)


def walk(source, world_size, global_batch=24, epochs=3.0, accumulate=1):
    phases = resolve_phases((BatchPhase(0, global_batch),), len(source), world_size, accumulate=accumulate)
    return list(steps(phases, len(source), epochs))


def stream_of_batches(source, config, world_size, accumulate=1, **options):
    """All ranks' images and labels, put back into the order of the stream."""
    plan = walk(source, world_size, accumulate=accumulate, **options)
    parts = []
    for rank in range(world_size):
        with loader(source, config, rank=rank, world_size=world_size) as made:
            parts.append(list(made.batches(plan)))
    images, labels = [], []
    for step in range(len(plan)):
        for rank in range(world_size):
            for batch in parts[rank][step * accumulate : (step + 1) * accumulate]:
                images.append(batch.images)
                labels.append(batch.labels)
    return torch.cat(images), torch.cat(labels)


@pytest.mark.parametrize(("make", "config"), [(lambda: numbered(50), SHIFT), (Encoded, CROP)], ids=["array", "jpeg"])
def test_batches_do_not_depend_on_world_size_or_accumulation(make, config):
    source = make()
    images, labels = stream_of_batches(source, config, 1)
    _, ids = stream.stretch(0, len(labels), len(source), 5)
    assert labels.tolist() == source.labels[ids].tolist()
    assert len(images[0].unique()) > 1 or config is SHIFT
    for world_size, accumulate in ((2, 1), (3, 2), (4, 3), (1, 5), (2, 7)):  # the last two: micro-steps differ
        others, other_labels = stream_of_batches(source, config, world_size, accumulate)
        assert torch.equal(others, images)
        assert torch.equal(other_labels, labels)


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize(("make", "config"), [(lambda: numbered(50), SHIFT), (Encoded, CROP)], ids=["array", "jpeg"])
def test_a_stride_of_steps_is_one_batch_of_their_samples(make, config, world_size):
    source = make()
    plan = walk(source, world_size, accumulate=2)  # the first steps straddle epochs
    for rank in range(world_size):
        with loader(source, config, rank=rank, world_size=world_size) as made:
            single = list(made.batches(plan))
            strides = list(made.batches([(plan[0],), tuple(plan[1:])]))
        assert len(strides) == 2 + 1, "the micro-steps of a step alone, and one"
        for name in ("images", "labels"):
            parts = [getattr(batch, name) for batch in single]
            assert torch.equal(torch.cat(parts[:2]), torch.cat([getattr(batch, name) for batch in strides[:2]]))
            assert torch.equal(torch.cat(parts[2:]), getattr(strides[2], name))


def test_batches_do_not_depend_on_threads():
    source, plan = Encoded(), walk(Encoded(), 1)
    seen = []
    for threads in (1, 2, 5):
        with loader(source, dataclasses.replace(CROP, data_threads=threads)) as made:
            seen.append(torch.cat([batch.images for batch in made.batches(plan)]))
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])


def test_a_sample_looks_different_in_each_epoch_but_the_same_on_resume():
    source = Encoded()
    plan = walk(source, 1, epochs=4)
    with loader(source, CROP) as made:
        whole = [batch.images for batch in made.batches(plan)]
    with loader(source, CROP) as made:
        rest = [batch.images for batch in made.batches(plan[2:])]
    assert all(torch.equal(a, b) for a, b in zip(whole[2:], rest, strict=True))
    first = [stream.stretch(24 * k, 24, 24, 5)[1].tolist().index(7) for k in (0, 1)]
    assert not torch.equal(whole[0][first[0]], whole[1][first[1]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_images_are_normalised_and_channels_last(dtype):
    train, _ = open_data(DataConfig(dataset="digits"))
    config = DataConfig(dataset="digits", image_size=8, eval_size=8, augment="none", flip=False)
    with loader(train, config, dtype=dtype) as made:
        batch = next(iter(made.batches(walk(train, 1, 32))))
    assert batch.images.dtype == dtype
    assert batch.images.shape == (32, 1, 8, 8)
    assert batch.images.is_contiguous(memory_format=torch.channels_last)
    assert batch.labels.dtype == torch.int64
    ids = stream.stretch(0, 32, len(train), 5)[1]
    expected = (train.images[ids].astype(np.float64) / 255 - train.mean[0]) / train.std[0]
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype]
    assert torch.allclose(batch.images.double(), torch.tensor(expected).permute(0, 3, 1, 2), atol=tolerance)


def test_color_noise_shifts_whole_channels():
    config = DataConfig(image_size=8, eval_size=8, augment="none", flip=False, color_noise=0.5)
    source = numbered(24, channels=3)
    with loader(source, config) as made:
        noisy = next(iter(made.batches(walk(source, 1)))).images
    with loader(source, dataclasses.replace(config, color_noise=0.0)) as made:
        plain = next(iter(made.batches(walk(source, 1)))).images
    difference = noisy - plain
    assert torch.allclose(difference, difference[:, :, :1, :1].expand_as(difference), atol=1e-5)
    assert difference.std() > 0.01
    with pytest.raises(InputError, match="RGB"):
        loader(numbered(4), config)


@pytest.mark.parametrize(("make", "size"), [(lambda: numbered(24, channels=3), 8), (Encoded, 16)])
def test_jitter_is_one_factor_and_one_addend_of_each_normalised_image(make, size):
    source = make()
    plain = DataConfig(image_size=size, eval_size=size, eval_resize=size, augment="none")
    jittered = dataclasses.replace(plain, brightness_jitter=0.3, contrast_jitter=0.5)
    images = {}
    for config in (plain, jittered):
        with loader(source, config, dtype=torch.float64) as made:
            images[config] = next(iter(made.batches(walk(source, 1)))).images
    ids = stream.stretch(0, 24, 24, 5)[1]
    contrast, brightness = augment.jitter(jittered, augment.draw(jittered, 5, np.zeros(24, dtype=int), ids))
    factor, addend = (torch.from_numpy(values)[:, None, None, None] for values in (contrast, brightness))
    assert torch.allclose(images[jittered], images[plain] * factor + addend, atol=1e-12)
    assert contrast.std() > 0.1


@pytest.mark.parametrize("more", [{}, {"brightness_jitter": 0.3}, {"auto_augment": "trivial"}])
@pytest.mark.parametrize(("make", "size"), [(lambda: numbered(24, channels=3), 8), (Encoded, 16)])
def test_a_cutout_is_a_square_of_the_mean_colour_and_changes_nothing_else(make, size, more):
    source = make()
    plain = DataConfig(image_size=size, eval_size=size, eval_resize=size, augment="none", **more)
    config = dataclasses.replace(plain, cutout=3)
    images = {}
    for each in (plain, config):
        with loader(source, each, dtype=torch.float64) as made:
            images[each] = next(iter(made.batches(walk(source, 1)))).images
            assert torch.equal(
                next(made.plain(24)).images, next(loader(source, plain, dtype=torch.float64).plain(24)).images
            )
    ids = stream.stretch(0, 24, 24, 5)[1]
    corners = augment.cutout_corners(config, augment.draw(config, 5, np.zeros(24, dtype=int), ids), size)
    for image, expected, (left, top) in zip(images[config], images[plain], corners, strict=True):
        expected[:, top : top + 3, left : left + 3] = 0
        assert torch.equal(image, expected)


@pytest.mark.parametrize("world_size", [1, 2])
def test_alternating_mirrors_continue_on_resume_and_on_every_rank(world_size):
    """An image seen in all epochs: it is mirrored in every other one, though batches straddle epochs."""
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (30, 8, 8, 1), dtype=np.uint8)
    source = ArraySource("array", images, np.arange(30), classes=tuple(map(str, range(30))))
    config = DataConfig(image_size=8, augment="none", flip_alternates=True)
    shown, labels = stream_of_batches(source, config, world_size, epochs=4.0)
    plain, _ = stream_of_batches(source, dataclasses.replace(config, flip=False, flip_alternates=False), 1, epochs=4.0)
    mirrored = [torch.equal(image, other.flip(-1)) for image, other in zip(shown, plain)]
    assert all(torch.equal(image, other) != turned for image, other, turned in zip(shown, plain, mirrored))
    seen = {label: [] for label in range(30)}
    for label, turned in zip(labels.tolist(), mirrored):
        seen[label].append(turned)
    assert all(a != b for turns in seen.values() for a, b in itertools.pairwise(turns))
    assert {turns[0] for turns in seen.values()} == {True, False}
    plan = walk(source, 1, epochs=4.0)
    with loader(source, config) as made:
        rest = torch.cat([batch.images for batch in made.batches(plan[2:])])
    assert torch.equal(rest, shown[2 * 24 :])


def test_progressive_resizing_changes_with_the_steps_epoch():
    config = DataConfig(image_size=8, eval_size=8, augment="random_resized_crop", size_phases=(SizePhase(1.0, 12),))
    for source in (numbered(24), Encoded()):
        with loader(source, config) as made:
            assert [batch.images.shape[-1] for batch in made.batches(walk(source, 1))] == [8, 12, 12]


@pytest.mark.parametrize("augmentation", ["none", "shift", "random_resized_crop", "scale_jitter", "fixed_resize_crop"])
def test_every_augmentation_runs_on_arrays_and_files(augmentation):
    config = DataConfig(
        image_size=12, eval_size=12, eval_resize=14, jitter_sides=(14, 20), augment=augmentation, shift_pixels=1
    )
    for source in (numbered(24), numbered(24, size=12, channels=3), Encoded()):
        with loader(source, config) as made:
            assert next(iter(made.batches(walk(source, 1)))).images.shape == (24, source.channels, 12, 12)


def test_a_shift_larger_than_the_image_is_refused():
    with pytest.raises(InputError, match="--shift-pixels 8"):
        loader(numbered(4), DataConfig(image_size=8, augment="shift", shift_pixels=8))


# --- threads


def data_threads():
    return [thread for thread in threading.enumerate() if thread.name.startswith("hyperbatch-data")]


def test_stopping_early_leaves_no_threads():
    source = Encoded()
    plan = walk(source, 1, epochs=50)
    made = loader(source, CROP)
    batches = made.batches(plan)
    next(batches)
    assert data_threads()
    made.close()
    assert not data_threads()
    assert next(batches, None) is None
    with loader(source, CROP) as made:
        for _ in made.batches(plan):
            break
    assert not data_threads()
    batches = eval_batches(source, CROP, batch_per_rank=4, rank=0, world_size=1, device=CPU, dtype=torch.float32)
    next(batches)
    batches.close()
    assert not data_threads()


def test_an_error_in_a_thread_reaches_the_consumer():
    class Failing(Encoded):
        def read(self, index):
            raise RuntimeError("a mistake in the source")

    config = dataclasses.replace(CROP, cache="none")  # or the failure comes earlier, when the set's size is guessed
    with loader(Failing(), config) as made, pytest.raises(RuntimeError, match="a mistake in the source"):
        next(iter(made.batches(walk(Encoded(), 1))))
    assert not data_threads()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_are_started_ahead_of_the_one_that_is_given(prefetch):
    source, started = Encoded(), []
    plan = walk(source, 1, epochs=5)
    with loader(source, dataclasses.replace(CROP, prefetch=prefetch)) as made:
        ahead = []
        for _ in made.batches(step for step in plan if started.append(step) is None):
            ahead.append(len(started))
    assert ahead == [min(given + prefetch, 5) for given in range(1, 6)]


def test_waiting_is_measured():
    source = Encoded()
    with loader(source, CROP) as made:
        assert made.wait_s == 0
        for _ in made.batches(walk(source, 1)):
            pass
        assert made.wait_s > 0


# --- the other ranks of the host


def test_ranks_of_a_host_share_its_cores_and_memory(monkeypatch):
    """As the caller counts them: not every launcher sets LOCAL_WORLD_SIZE, so the environment is not asked."""
    monkeypatch.setattr("hyperbatch.data.maker.usable_cores", lambda: 64)
    monkeypatch.setattr("hyperbatch.data.cache.host_memory_bytes", lambda: 64 << 30)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    config = dataclasses.replace(CROP, data_threads=0, cache="host")
    for ranks in (1, 4, 8, 100):
        with TrainLoader(
            Encoded(), config, seed=5, rank=0, world_size=8, device=CPU, dtype=torch.float32, ranks_per_host=ranks
        ) as made:
            assert made._maker.threads == max(1, 64 // ranks)
            assert made._maker.cache.limit_bytes == (16 << 30) // ranks
    assert maker.threads_per_rank(dataclasses.replace(CROP, data_threads=5), 8) == 5  # asked for by name


def test_a_run_tells_its_loaders_how_many_ranks_share_the_host(monkeypatch, tmp_path):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # or the run would change the threads of this process
    seen = []
    monkeypatch.setattr(maker, "threads_per_rank", lambda config, ranks_per_host: seen.append(ranks_per_host) or 1)
    values = {"epochs": 1.0, "warmup_epochs": 0.0, "decay_epochs": 1.0, "out": str(tmp_path / "run"), "device": "cpu"}
    run(find_recipe("digits").config().override(**values), Ranks(local_size=3))
    assert seen == [3, 3]  # training and evaluation


# --- bad samples


def test_bad_samples_are_replaced_by_the_next_good_one_and_counted_once():
    source = Encoded(broken=(3, 4))
    reference, labels = stream_of_batches(source, CROP, 1)
    with loader(source, CROP) as made:
        for _ in made.batches(walk(source, 1)):
            pass
        assert len(made.bad_samples) == 2  # though each came up in three epochs
        assert all("encoded[" in line for line in made.bad_samples)
    ids = stream.stretch(0, len(labels), 24, 5)[1]
    assert labels.tolist() == [5 if i in (3, 4) else i for i in ids.tolist()]
    others, other_labels = stream_of_batches(source, CROP, 3)
    assert torch.equal(others, reference)
    assert torch.equal(other_labels, labels)


def test_too_many_bad_samples_stop_the_run():
    source = Encoded(broken=range(5))
    with loader(source, dataclasses.replace(CROP, max_bad_samples=5)) as made:
        assert len(list(made.batches(walk(source, 1)))) == 3
    message = r"5 unreadable training samples on rank 0.*--max-bad-samples"
    with (
        loader(source, dataclasses.replace(CROP, max_bad_samples=4)) as made,
        pytest.raises(DataError, match=message) as told,
    ):
        list(made.batches(walk(source, 1)))
    assert isinstance(told.value, RunFailed)  # one line, no traceback
    assert "\n" not in str(told.value)
    assert not data_threads()


def test_a_set_with_nothing_readable_ends_instead_of_searching_forever():
    source = Encoded(broken=range(24))
    with loader(source, CROP) as made, pytest.raises(DataError, match="in a row"):
        list(made.batches(walk(source, 1)))


# --- evaluation


@pytest.mark.parametrize("world_size", range(1, 8))
@pytest.mark.parametrize(("samples", "batch_per_rank"), [(50, 7), (3, 2), (64, 8), (1, 5)])
def test_evaluation_counts_every_sample_once(world_size, samples, batch_per_rank):
    source = numbered(samples)
    counted, shapes = [], set()
    for rank in range(world_size):
        batches = list(
            eval_batches(
                source,
                SHIFT,
                batch_per_rank=batch_per_rank,
                rank=rank,
                world_size=world_size,
                device=CPU,
                dtype=torch.float32,
            )
        )
        shapes.add((len(batches), *{tuple(batch.images.shape) for batch in batches}))
        for batch in batches:
            assert batch.mask is not None
            counted += batch.labels[batch.mask].tolist()
            shown = (batch.images[batch.mask][:, 0, 0, 0] * 255).round().long()
            assert torch.equal(shown, batch.labels[batch.mask])
    assert sorted(counted) == list(range(samples))
    assert len(shapes) == 1


def test_padding_is_not_decoded():
    class Counting(Encoded):
        reads = 0

        def read(self, index):
            Counting.reads += 1
            return super().read(index)

    list(eval_batches(Counting(3), CROP, batch_per_rank=50, rank=0, world_size=1, device=CPU, dtype=torch.float32))
    assert Counting.reads == 3


def test_an_unreadable_sample_still_counts_in_evaluation():
    lines = []
    source = Encoded(broken=(2,))
    batches = list(
        eval_batches(
            source, CROP, batch_per_rank=10, rank=0, world_size=1, device=CPU, dtype=torch.float32, bad_samples=lines
        )
    )
    assert sum(int(batch.mask.sum()) for batch in batches) == 24
    assert len(lines) == 1
    assert len(batches[0].images[2, 0].unique()) == 1
    assert batches[0].labels[2] == 2


# --- memory, and where time goes


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="needs Linux's /proc")
@pytest.mark.parametrize("cache", ["none", "host"])
def test_memory_is_bounded_and_flat_over_epochs(cache):
    source = Encoded(64, size=(160, 120))
    config = dataclasses.replace(CROP, cache=cache, cache_bytes=20 * 160 * 120 * 3)
    after_epoch = []
    with loader(source, config) as made:
        for i, _ in enumerate(made.batches(walk(source, 1, global_batch=16, epochs=24.0))):
            if i % 16 == 15:
                after_epoch.append(resident_bytes())
        kept = made._maker.cache
        assert kept is None or (len(kept) == 20 and kept.bytes <= config.cache_bytes)
    # 1.5 MB of decoded images pass through in each of the 20 epochs; a leak of them would show.
    assert after_epoch[-1] - after_epoch[1] < 8 << 20


@pytest.mark.parametrize("decoder", ["pillow", "auto"])
def test_kept_images_give_the_same_batches(decoder):
    """At the set's own size: no image is decoded smaller, so the cache changes no pixel."""
    source = Encoded()
    config = dataclasses.replace(CROP, image_size=40, eval_size=40, eval_resize=40, decoder=decoder)
    seen = []
    for cache in ("none", "host"):
        with loader(source, dataclasses.replace(config, cache=cache)) as made:
            seen.append(torch.cat([batch.images for batch in made.batches(walk(source, 1))]))
    assert torch.equal(*seen)


def test_images_are_kept_when_the_set_fits():
    source = Encoded()
    needed = 24 * 40 * 30 * 3
    for limit, expected in ((needed, 24), (needed - 1, None)):
        with loader(source, dataclasses.replace(CROP, cache_bytes=limit)) as made:
            list(made.batches(walk(source, 1)))
            assert (None if made._maker.cache is None else len(made._maker.cache)) == expected
    with pytest.raises(InputError, match="--cache gpu"):
        loader(source, dataclasses.replace(CROP, cache="gpu"))


def test_the_bottleneck_is_named():
    class Slow(Encoded):
        def read(self, index):
            time.sleep(0.005)
            return super().read(index)

    config = dataclasses.replace(CROP, cache="none", data_threads=1)
    with loader(Slow(), config) as made:
        list(made.batches(walk(Slow(), 1)))
        report = made.report()
    assert report.bottleneck == "read"
    assert report.busy_s["read"] >= 72 * 0.005
    assert 0 < report.wait_fraction <= 1
    assert report.to_dict()["read_s"] == report.busy_s["read"]


def test_a_meter_names_the_busiest_stage_per_thread():
    meter = Meter()
    assert meter.report().bottleneck == "step"
    meter.add("read", 4.0, 8)
    meter.add("decode", 3.0, 4)
    meter.add("device", 0.6)
    with meter.waiting():
        time.sleep(0.02)
    assert meter.report().bottleneck == "decode"
    assert meter.report().busy_s["decode"] == 0.75
    meter.wait_s = 0.0
    assert meter.report().bottleneck == "step"


def test_what_one_loader_has_decoded_is_there_for_the_next_of_the_same_set():
    """As long as the set is, and for the same decoder."""

    class Counted(Encoded):
        reads = 0

        def read(self, index):
            self.reads += 1
            return super().read(index)

    source = Counted(24)
    config = dataclasses.replace(CROP, cache="host", decoder="pillow")
    phases = resolve_phases((BatchPhase(0, 24),), 24, 1)

    def epoch(source, config):
        before = source.reads
        with loader(source, config) as made:
            images = torch.cat([batch.images for batch in made.batches(steps(phases, 24, 1.0))])
        return images, source.reads - before

    first, reads = epoch(source, config)
    assert reads >= 24
    again, none = epoch(source, config)
    assert none == 0
    assert torch.equal(first, again)
    assert epoch(source, dataclasses.replace(config, decoder="auto"))[1] >= 24
    kept = weakref.ref(cache_of(source, config, CPU, 1))
    assert kept() is not None
    del source
    gc.collect()
    assert kept() is None
