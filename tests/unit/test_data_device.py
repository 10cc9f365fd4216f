"""The GPU's way to a batch, on CPU tensors by Triton's interpreter: the fused kernel and the thread that feeds it."""

from __future__ import annotations

import dataclasses
import shutil
import threading

import numpy as np
import pytest
import torch
from interpreter import inside, outside, run_by_the_interpreter
from photos import encoded, without_codes
from PIL import Image

from hyperbatch.config import DataConfig
from hyperbatch.data import augment, stream
from hyperbatch.data.augment import View
from hyperbatch.data.batch import BatchPlan
from hyperbatch.data.cache import DeviceCache, PixelCache
from hyperbatch.data.decode import decode_full, gpu_can_decode, render_array
from hyperbatch.data.gpu.jpegs import Decoded
from hyperbatch.data.gpu.maker import DeviceMaker
from hyperbatch.data.gpu.reader_pool import ReaderPool
from hyperbatch.data.gpu.render import render_reference, view_table
from hyperbatch.data.host import HostMaker
from hyperbatch.data.pack import pack
from hyperbatch.data.source import ArraySource, BadSample, DataError, EncodedSource, open_data

CPU = torch.device("cpu")
CONFIG = DataConfig(image_size=8, eval_size=8, eval_resize=10, data_threads=2)


@outside
def test_device_path_by_the_interpreter():
    run_by_the_interpreter(__file__)


def photo(width, height, seed=0):
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (height // 8 + 2, width // 8 + 2, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


class Files(EncodedSource):
    """JPEGs of different sizes; `broken` are cut off, `foreign` are PNGs."""

    def __init__(self, n=6, broken=(), foreign=()):
        super().__init__("files", tuple(map(str, range(n))), np.arange(n))
        self.reads = 0
        self.files = []
        for i in range(n):
            data = encoded(photo(20 + i, 30 - i, i), "PNG" if i in foreign else "JPEG")
            self.files.append(data[: 300 if i in broken else None])

    def read(self, index):
        self.reads += 1
        return self.files[index]


def planned(source, config, n=6, epoch=0, size=8):
    epochs = np.full(n, epoch)
    ids = stream.stretch(epoch * len(source), n, len(source), 5)[1]
    return BatchPlan(
        ids=ids,
        epochs=epochs,
        uniforms=augment.draw(config, 5, epochs, ids),
        size=size,
        padding=0,
    )


def eval_plan(n, padding):
    ids = np.minimum(np.arange(n), n - padding - 1)
    return BatchPlan(ids=ids, epochs=None, uniforms=None, size=8, padding=padding)


def decode_on_the_cpu(files, device):
    """Stands for the GPU's decoder: the same shapes and layout, and RuntimeError for the lot when one is broken."""
    found = []
    for file in files.contents():
        try:
            assert file[100] != 0xAB
            pixels = decode_full(file.numpy().tobytes(), "")
        except (AssertionError, BadSample) as error:
            raise RuntimeError("Error while decoding JPEG images") from error
        found.append(torch.from_numpy(pixels.transpose(2, 0, 1).copy()))
    return Decoded.of(found)


def device_maker(
    source,
    config=CONFIG,
    *,
    decoder="nvjpeg",
    cache=None,
    dtype=torch.float32,
    processes=False,
    decode=decode_on_the_cpu,
):
    return DeviceMaker(
        source,
        config,
        device=CPU,
        dtype=dtype,
        decoder=decoder,
        cpu_decoder="pillow",
        cache=cache,
        processes=processes,
        decode=decode,
    )


def made(maker, *plans):
    return list(maker.run(iter(plans)))


def grey_levels(batch, source):
    """Back to 0..255."""
    std, mean = (torch.tensor(v).view(-1, 1, 1) for v in (source.std, source.mean))
    return (batch.images.double() * std + mean) * 255


def same_pictures(ours, theirs, source):
    """The host rounds to whole grey levels twice: close, and nothing moved."""
    difference = (grey_levels(ours, source) - grey_levels(theirs, source)).abs()
    assert torch.equal(ours.labels, theirs.labels)
    assert difference.mean() < 1
    assert difference.flatten(1).mean(dim=1).max() < 3


# --- the kernel


VIEWS = [
    ((50, 37), View((0, 0, 50, 37))),
    ((50, 37), View((3, 5, 40, 30), flip=True)),
    ((14, 15), View((1.25, 2.5, 9.75, 12.1))),
    ((16, 16), View((0, 0, 16, 16), 2, -3, True)),
    ((1, 1), View((0, 0, 1, 1))),
    ((40, 70), View((5, 0, 35, 70))),
    ((60, 3), View((0, 0, 60, 3), -1, 1)),
    ((12, 20), View((0, 0, 12, 20), 8, -8, True)),
    ((9, 9), View((0, 0, 9, 9), -4, 0)),
]


@inside
@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [9, 16])
@pytest.mark.parametrize("reflect", [False, True])
def test_the_kernel_equals_its_reference(channels, size, reflect):
    from hyperbatch.kernels.augment import views  # here, because it loads Triton

    rng = np.random.default_rng(0)
    images = [rng.integers(0, 256, (height, width, channels), dtype=np.uint8) for (width, height), _ in VIEWS]
    kept, rows = [], []
    for i, image in enumerate(images):
        height, width, _ = image.shape
        planar = i % 2 == 1
        kept.append(torch.from_numpy(image.transpose(2, 0, 1).copy() if planar else image))
        strides = (1, width, width * height) if planar else (channels, channels * width, 1)
        rows.append((kept[-1].data_ptr(), width, height, *strides))
    table = np.array([(*view.box, view.shift_x, view.shift_y, view.flip) for _, view in VIEWS], dtype=float)
    out = torch.full((len(VIEWS), size, size, channels), float("nan"))
    scales, gains, offsets = (rng.normal(size=shape) for shape in (channels, len(VIEWS), (len(VIEWS), channels)))
    views(
        out,
        torch.tensor(rows),
        torch.from_numpy(view_table(table)),
        *(torch.from_numpy(part.astype(np.float32)) for part in (scales, gains, offsets)),
        reflect=reflect,
    )
    for i, (_, view) in enumerate(VIEWS):
        shown = render_reference(images[i], view._replace(reflect=reflect), size)
        expected = shown * scales * gains[i] + offsets[i]
        # fp32 places of taps: a weight is off by 1e-5 at most.
        assert np.abs(out[i].numpy() - expected).max() < 0.02


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 501), (256, 256), (90, 200), (1200, 803)])
def test_the_reference_agrees_with_pillow(width, height):
    """Evaluation: mean difference at most 0.5 grey levels, 99.9 of 100 within 2."""
    pixels = np.asarray(photo(width, height))
    view = augment.eval_view(DataConfig(), width, height, whole=False)
    difference = np.abs(render_reference(pixels, view, 224) - render_array(pixels, view, 224))
    assert difference.mean() <= 0.5
    assert np.quantile(difference, 0.999) <= 2


@pytest.mark.parametrize("augmentation", ["none", "shift", "random_resized_crop", "scale_jitter", "fixed_resize_crop"])
@pytest.mark.parametrize("full_crop_from_epoch", [None, 5])
@pytest.mark.parametrize("whole", [True, False])
def test_views_of_a_batch_equal_one_at_a_time(augmentation, full_crop_from_epoch, whole):
    rng = np.random.default_rng(0)
    n = 400
    widths, heights, epochs = rng.integers(1, 900, n), rng.integers(1, 900, n), rng.integers(0, 10, n)
    config = DataConfig(augment=augmentation, shift_pixels=4, full_crop_from_epoch=full_crop_from_epoch)
    uniforms = stream.uniforms(1, epochs, np.arange(n), augment.uniforms_needed(config))
    batch = augment.batch_views(config, widths, heights, epochs, uniforms, whole=whole)
    for i in range(n):
        view = augment.train_view(
            config, int(widths[i]), int(heights[i]), int(epochs[i]), uniforms[i].tolist(), whole=whole
        )
        assert batch[i].tolist() == [*view.box, view.shift_x, view.shift_y, view.flip]
    batch = augment.batch_views(config, widths, heights, None, None, whole=whole)
    for i in range(n):
        view = augment.eval_view(config, int(widths[i]), int(heights[i]), whole=whole)
        assert batch[i].tolist() == [*view.box, 0, 0, 0]


# --- the pipeline


@inside
@pytest.mark.parametrize("decoder", ["nvjpeg", "pillow"])
def test_batches_are_the_hosts(decoder):
    source = Files(foreign=(2,))
    plans = [planned(source, CONFIG)]
    # With a cache, so that the host decodes every pixel, too.
    cache = PixelCache(1 << 20)
    host = HostMaker(source, CONFIG, device=CPU, dtype=torch.float32, decoder="pillow", cache=cache)
    for (ours, _), (theirs, _) in zip(made(device_maker(source, decoder=decoder), *plans), made(host, *plans)):
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert ours.mask is None
        same_pictures(ours, theirs, source)


@inside
@pytest.mark.parametrize("augmentation", ["none", "shift", "reflect", "random_resized_crop", "scale_jitter"])
def test_arrays_go_through_the_same_kernel(augmentation):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 12, 12, 3), dtype=np.uint8)
    source = ArraySource("array", images, np.arange(6), classes=tuple(map(str, range(6))))
    config = dataclasses.replace(CONFIG, augment=augmentation, shift_pixels=2, jitter_sides=(9, 12), color_noise=0.1)
    if augmentation == "reflect":
        config = dataclasses.replace(config, augment="shift", shift_padding="reflect", flip_alternates=True)
    config = dataclasses.replace(config, brightness_jitter=0.3, contrast_jitter=0.4, cutout=3)
    cache = DeviceCache(6, images.nbytes)
    cache.put_array(source, CPU)
    plan = planned(source, config)
    host = HostMaker(source, config, device=CPU, dtype=torch.float32, decoder="pillow")
    theirs = made(host, plan)[0][0]
    for maker in (device_maker(source, config, cache=cache), device_maker(source, config)):
        same_pictures(made(maker, plan)[0][0], theirs, source)


@inside
@pytest.mark.parametrize("decoder", ["nvjpeg", "pillow"])
def test_evaluation_pads_masks_and_shows_unreadable_images_black(decoder):
    source = Files(broken=(3,))
    source.files[1] = without_codes(source.files[1])
    plan = eval_plan(8, padding=2)
    (ours, bad), (theirs, _) = (
        made(maker, plan)[0]
        for maker in (
            device_maker(source, decoder=decoder),
            HostMaker(source, CONFIG, device=CPU, dtype=torch.float32, decoder="pillow"),
        )
    )
    same_pictures(ours, theirs, source)
    assert torch.equal(ours.mask, theirs.mask)
    assert sorted(index for index, _ in bad) == [1, 3]
    assert ours.labels.tolist() == [*range(6), 0, 0]
    for row in (1, 3, 6, 7):
        assert grey_levels(ours, source)[row].abs().max() < 1e-3


@inside
def test_bad_files_are_replaced_as_on_the_host():
    source = Files(broken=(3,))
    # A file that only the GPU's decoder finds broken: Pillow reads it, so its own pixels are used.
    data = bytearray(source.files[1])
    data[100] = 0xAB
    source.files[1] = bytes(data)
    source.files[5] = without_codes(source.files[5])  # which both find broken
    plan = planned(source, CONFIG)
    ours, bad = made(device_maker(source), plan)[0]
    theirs, host_bad = made(HostMaker(source, CONFIG, device=CPU, dtype=torch.float32, decoder="pillow"), plan)[0]
    assert {index for index, _ in bad} == {index for index, _ in host_bad} >= {3}
    assert torch.equal(ours.labels, theirs.labels)


@inside
@pytest.mark.parametrize("place", ["host", "device"])
def test_kept_images_give_the_same_batches_and_are_not_read_again(place):
    source = Files(broken=(3,), foreign=(5,))
    cache = PixelCache(1 << 20) if place == "host" else DeviceCache(6, 1 << 20)
    plans = [planned(source, CONFIG, epoch=epoch) for epoch in range(2)]
    expected = made(device_maker(source), *plans)
    maker = device_maker(source, cache=cache)
    first = made(maker, plans[0])
    reads = source.reads
    rest = made(maker, *plans[1:])
    assert source.reads - reads <= 2 * 2  # the broken one, once an epoch and when its replacement is looked for
    assert len(cache) == 5
    for (ours, _), (theirs, _) in zip([*first, *rest], expected, strict=True):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)


@inside
@pytest.mark.parametrize("decoder", ["nvjpeg", "pillow"])
def test_other_loaders_find_kept_images_only_once_their_batch_is_cut(decoder, monkeypatch):
    source, cache, found = Files(), DeviceCache(6, 1 << 20), []
    maker = device_maker(source, decoder=decoder, cache=cache)
    render = maker._render
    monkeypatch.setattr(maker, "_render", lambda draft: found.append(len(cache)) or render(draft))
    plans = [planned(source, CONFIG, n=3, epoch=epoch) for epoch in range(2)]
    made(maker, *plans)
    assert found == [0, 3]  # while a batch is queued, what it has brought may still be on its way
    assert len(cache) == len({*plans[0].ids, *plans[1].ids})


@inside
@pytest.mark.parametrize("form", ["folder", "set.tar", "shards", "decoded"])
def test_reading_processes_give_the_batches_of_threads(form, tmp_path):
    for split in ("train", "val"):
        (tmp_path / "tree" / split / "a").mkdir(parents=True)
        for i in range(6):
            path = tmp_path / "tree" / split / "a" / f"{i}.jpg"
            path.write_bytes(encoded(photo(20 + i, 30 - i, i), "PNG" if i == 4 else "JPEG"))
    broken = tmp_path / "tree" / "train" / "a" / "2.jpg"
    broken.write_bytes(broken.read_bytes()[:200])
    if form == "set.tar":
        shutil.make_archive(str(tmp_path / "set"), "tar", tmp_path / "tree")
    elif form != "folder":
        pack(tmp_path / "tree", tmp_path / form, decoded=form == "decoded")
    source, _ = open_data(DataConfig(data=str(tmp_path / ("tree" if form == "folder" else form))))
    plans = [planned(source, CONFIG, epoch=epoch) for epoch in range(4)]  # more than there are slots
    expected = made(device_maker(source), *plans)
    for (ours, bad), (theirs, other_bad) in zip(
        made(device_maker(source, dataclasses.replace(CONFIG, prefetch=1), processes=True), *plans), expected
    ):
        assert torch.equal(ours.images, theirs.images)
        assert torch.equal(ours.labels, theirs.labels)
        assert bad == other_bad
        assert len(bad) == 1


@inside
def test_a_share_of_the_images_is_decoded_by_the_cpu(tmp_path):
    """Where the GPU's decoder shows negatives, one sees who has decoded what: the same with every cache and reader."""
    n, on_cpu = 8, [5, 6, 7]  # of half of the images
    for split in ("train", "val"):
        (tmp_path / split / "a").mkdir(parents=True)
        for i in range(n):
            (tmp_path / split / "a" / f"{i}.jpg").write_bytes(encoded(photo(20 + i, 30 - i, i)))
    source, _ = open_data(DataConfig(data=str(tmp_path)))
    config = dataclasses.replace(CONFIG, cpu_decode_share=0.5)

    def negatives(files, device):
        return Decoded.of([255 - pixels for pixels in decode_on_the_cpu(files, device).memory])

    def batches(config=config, **options):
        return [batch.images for batch, _ in made(device_maker(source, config, decode=negatives, **options), *plans)]

    plans = [planned(source, CONFIG, n=n, epoch=epoch) for epoch in range(2)]
    by_gpu, by_cpu = batches(CONFIG), batches(decoder="pillow")
    rows = [torch.from_numpy(np.isin(plan.ids, on_cpu))[:, None, None, None] for plan in plans]
    expected = [torch.where(*images) for images in zip(rows, by_cpu, by_gpu, strict=True)]
    for options in ({"cache": PixelCache(1 << 20)}, {"cache": DeviceCache(n, 1 << 20)}, {"processes": True}):
        assert all(map(torch.equal, batches(**options), expected))


@inside
def test_a_reading_process_that_dies_is_reported():
    pool = ReaderPool(1, 1, 1 << 16, pin=False)
    try:
        pool._processes[0].kill()
        pool._processes[0].wait()
        with pytest.raises(DataError, match="ended"):
            pool.reply(0)
    finally:
        pool.close()


@inside
def test_a_small_cache_keeps_to_its_limit():
    source = Files()
    for cache in (PixelCache(4_500), DeviceCache(6, 4_500)):
        made(device_maker(source, cache=cache), *(planned(source, CONFIG, epoch=epoch) for epoch in range(2)))
        assert 0 < len(cache) < 6
        assert cache.bytes <= 4_500


@inside
def test_stopping_early_leaves_no_threads_and_errors_arrive():
    running = device_maker(Files()).run(iter([planned(Files(), CONFIG, epoch=epoch) for epoch in range(50)]))
    next(running)
    running.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hyperbatch-data")]

    class Failing(Files):
        def read(self, index):
            raise RuntimeError("a mistake in the source")

    with pytest.raises(RuntimeError, match="a mistake in the source"):
        made(device_maker(Failing()), planned(Files(), CONFIG))
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hyperbatch-data")]


# --- what the GPU may decode


def test_only_whole_plain_jpegs_go_to_the_gpu():
    image = photo(64, 48)
    plain = encoded(image)
    exif = Image.Exif()
    exif[0x0112] = 6
    for data in (plain, encoded(image.convert("L")), encoded(image, progressive=True), encoded(image, exif=exif)):
        assert gpu_can_decode(data)
    named_rgb = bytearray(plain)
    frame = named_rgb.index(b"\xff\xc0")
    named_rgb[frame + 10 : frame + 19 : 3] = b"RGB"
    huge = bytearray(plain)
    huge[frame + 5 : frame + 9] = (65_500).to_bytes(2, "big") * 2
    for data in (
        b"",
        b"\xff\xd8",
        b"\xff\xd8\xff\xd9",
        b"\xff\xd8" + b"\xff" * 50 + b"\xff\xd9",
        plain[:500],
        plain[:300] + b"\xff\xd9"[:1],
        plain + b"\0",
        encoded(image.convert("CMYK")),
        encoded(image, "PNG"),
        bytes(named_rgb),
        bytes(huge),
    ):
        assert not gpu_can_decode(data)
