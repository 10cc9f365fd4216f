"""The data path on a CUDA device: the fused kernel, nvJPEG against the CPU, and a loader beside a busy step."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import photos
import pytest
import torch
from photos import photo

from hyperbatch.config import BatchPhase, DataConfig
from hyperbatch.data import augment, stream, trivial
from hyperbatch.data.buffers import copy_to_device
from hyperbatch.data.cache import cache_of
from hyperbatch.data.decode import choose_decoder, decode_full, decode_view, gpu_frame
from hyperbatch.data.decoders import brightness_difference, measured_decoder
from hyperbatch.data.gpu import hardware, nvjpeg, reader_pool
from hyperbatch.data.gpu.hardware import HardwareDecoder, hardware_decoder, load_api
from hyperbatch.data.gpu.jpegs import JpegFiles
from hyperbatch.data.gpu.render import render_reference, view_table
from hyperbatch.data.host import write_array_views
from hyperbatch.data.loader import TrainLoader, eval_batches
from hyperbatch.data.source import ArraySource, EncodedSource, open_data
from hyperbatch.schedule import resolve_phases, steps

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
CUDA = torch.device("cuda:0")
CONFIG = DataConfig(cache="none", decoder="nvjpeg")


def encoded(image, **options):
    return photos.encoded(image, **{"quality": 90, **options})


class Files(EncodedSource):
    def __init__(self, n=48, broken=()):
        super().__init__("files", tuple(map(str, range(n))), np.arange(n))
        kinds = [{}, {"subsampling": 0}, {"subsampling": 2}, {"progressive": True}]
        self.files = [encoded(photo(500 - 3 * i, 375 + 2 * i, i), **kinds[i % 4]) for i in range(n)]
        self.files[5] = encoded(photo(300, 200).convert("L"))
        self.files[6] = encoded(photo(300, 200).convert("CMYK"))
        for i in broken:
            self.files[i] = self.files[i][:3000]

    def read(self, index):
        return self.files[index]


@pytest.fixture(scope="module")
def source():
    return Files()


def plan(source, epochs=4.0, batch=16):
    return list(steps(resolve_phases((BatchPhase(0, batch),), len(source), 1), len(source), epochs))


def batches(source, config, *, busy=False, dtype=torch.float32, epochs=4.0):
    """All images and labels; busy: beside a step that keeps the device occupied and memory moving."""
    with TrainLoader(source, config, seed=3, rank=0, world_size=1, device=CUDA, dtype=dtype) as loader:
        images, labels = [], []
        weight = torch.randn(4096, 4096, device=CUDA, dtype=torch.bfloat16)
        for batch in loader.batches(plan(source, epochs)):
            if busy:
                for _ in range(20):
                    weight = torch.nn.functional.normalize(weight @ weight)
            images.append(batch.images.clone())
            labels.append(batch.labels.clone())
            del batch
        return torch.cat(images), torch.cat(labels), loader


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [224, 127])
def test_the_kernel_equals_its_reference(dtype, size):
    from hyperbatch.kernels import augment as kernels

    rng = np.random.default_rng(0)
    config = DataConfig()
    images = [rng.integers(0, 256, (375 + i, 500 - 9 * i, 3), dtype=np.uint8) for i in range(12)]
    uniforms = rng.random((12, augment.uniforms_needed(config)))
    views = [
        augment.train_view(config, i.shape[1], i.shape[0], 0, u.tolist(), whole=False) for i, u in zip(images, uniforms)
    ]
    table = np.array([(*v.box, v.shift_x, v.shift_y, v.flip) for v in views], dtype=float)
    kept = [torch.from_numpy(image.transpose(2, 0, 1).copy()).to(CUDA) for image in images]
    rows = np.array([(t.data_ptr(), t.shape[2], t.shape[1], 1, t.shape[2], t.shape[1] * t.shape[2]) for t in kept])
    out = torch.full((12, size, size, 3), float("nan"), device=CUDA, dtype=dtype)
    colors = np.full(3, 1 / 255), np.ones(12), np.zeros((12, 3))
    tables = rows, view_table(table), *(part.astype(np.float32) for part in colors)
    kernels.views(out, *(copy_to_device(part, CUDA) for part in tables), reflect=False)
    tolerance = {torch.float32: 1e-4, torch.float16: 6e-4, torch.bfloat16: 5e-3}[dtype]  # one rounding of the result
    for i, image in enumerate(images):
        expected = render_reference(image, views[i], size) / 255
        assert np.abs(out[i].double().cpu().numpy() - expected).max() < tolerance


def gpu_files(contents):
    """Those that the GPU may decode, in pinned memory."""
    kept = [(data, gpu_frame(data)) for data in contents]
    return JpegFiles.collect({i: file for i, file in enumerate(kept) if file[1] is not None}, pin=True)


def by_torchvision(files):
    """Each file alone."""
    pixels = [nvjpeg.decode_batch([data], CUDA)[0] for data in files.contents()]
    torch.cuda.synchronize()
    return pixels


def test_nvjpeg_decodes_as_the_cpu_does(source):
    """Brightness within rounding everywhere; colours too where they are not subsampled."""
    files = gpu_files(source.files)
    decoded = nvjpeg.decode_files(files, CUDA)
    torch.cuda.synchronize()  # hardware decoders have been seen to run past their stream
    for place, i in enumerate(files.rows.tolist()):
        expected, ours = decode_full(source.files[i], ""), decoded.pixels(place).permute(1, 2, 0).cpu().numpy()
        assert brightness_difference(ours, expected) < 1.5
        if i % 4 == 1 or i == 5:  # all colours, or grey
            assert np.abs(ours.astype(int) - expected).mean() < 1


@pytest.fixture(scope="module")
def units():
    decoder = hardware_decoder(CUDA)
    if decoder is None:
        assert torch.cuda.get_device_capability(CUDA) not in ((8, 0), (9, 0)), "A100 and H100 have decoding units"
        pytest.skip("this GPU has no decoding units")
    return decoder


@pytest.fixture(scope="module")
def assorted():
    """Files of many kinds and sizes, down to one pixel; some are progressive or have restart markers."""
    kinds = [{}, {"subsampling": 0}, {"subsampling": 1}, {"progressive": True}, {"restart_marker_blocks": 3}]
    sizes = [(500, 375), (375, 500), (341, 256), (97, 101), (33, 17), (16, 16), (15, 9), (8, 1), (1, 8), (1, 1)]
    files = [encoded(photo(*size, i), **kind) for i, (size, kind) in enumerate(itertools.product(sizes, kinds))]
    files += [encoded(photo(*size).convert("L")) for size in sizes] + [encoded(photo(2600, 1900))]
    return gpu_files([files[i] for i in np.random.default_rng(0).permutation(len(files))])


@pytest.mark.parametrize("callers", [1, 2, 3])
def test_the_decoding_units_give_torchvisions_pixels(units, assorted, callers):
    decoder = units if callers == 1 else HardwareDecoder(load_api(), CUDA, callers=callers)
    expected = by_torchvision(assorted)
    taken = decoder.takes(assorted)
    assert taken.any()
    assert not taken.all()  # not the progressive ones
    for _ in range(3):
        decoded = nvjpeg.decode_with(decoder, assorted, CUDA)
        torch.cuda.synchronize()
        for i, pixels in enumerate(expected):
            assert torch.equal(decoded.pixels(i), pixels), (assorted.table[i].tolist(), bool(taken[i]))


def test_nothing_is_written_between_the_images(units, assorted, monkeypatch):
    blank = hardware.room_for

    def marked(sizes, device):
        room = blank(sizes, device)
        for piece in room.memory:
            piece.fill_(0xA5)
        torch.cuda.synchronize()
        return room

    monkeypatch.setattr(hardware, "room_for", marked)
    decoded = units.decode(assorted.take(units.takes(assorted)))
    for i in range(len(decoded.images)):
        decoded.pixels(i).fill_(0xA5)
    for piece in decoded.memory:
        assert bool((piece == 0xA5).all())


def test_a_broken_file_harms_no_other(units, assorted):
    """Its batch fails or shows what torchvision shows; the files beside it, and the batches after it, are right."""
    good = assorted.take(np.flatnonzero(units.takes(assorted))[:12])
    expected = by_torchvision(good)
    for damage in ("codes", "scan", "tables"):
        data = bytearray(encoded(photo(500, 375, 7)))
        scan = data.index(b"\xff\xda")
        if damage == "codes":  # a scan that names codes which are not there
            data[scan + 6] = 0x33
        elif damage == "scan":
            data[scan + 2000 : scan + 4000] = bytes(2000)
        else:
            place = data.index(b"\xff\xc4")
            data[place + 5 : place + 21] = b"\xff" * 16
        frame = gpu_frame(bytes(data))
        assert frame is not None  # it reaches the GPU
        broken = JpegFiles.collect({99: (data, frame)}, pin=True)
        for order in ([broken, good], [good, broken]):
            try:
                decoded = nvjpeg.decode_files(JpegFiles.join(order), CUDA)
            except RuntimeError:
                continue
            torch.cuda.synchronize()
            first = 1 if order[0] is broken else 0
            for i, pixels in enumerate(expected):
                assert torch.equal(decoded.pixels(first + i), pixels), damage
        decoded = nvjpeg.decode_files(good, CUDA)
        torch.cuda.synchronize()
        for i, pixels in enumerate(expected):
            assert torch.equal(decoded.pixels(i), pixels), damage


def test_thousands_of_batches_beside_a_busy_device(units, source):
    """The same pixels each time, and no memory that grows, in torch's allocator or outside it."""
    files = gpu_files(source.files)
    files = files.take(units.takes(files))
    expected = by_torchvision(files)
    rng = np.random.default_rng(0)
    weight, stop = torch.randn(2048, 2048, device=CUDA, dtype=torch.bfloat16), threading.Event()

    def load():
        with torch.cuda.stream(torch.cuda.Stream()):
            while not stop.is_set():
                for _ in range(50):
                    torch.mm(weight, weight)
                torch.cuda.current_stream().synchronize()

    thread = threading.Thread(target=load)
    thread.start()
    used = []
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            for batch in range(2000):
                chosen = rng.permutation(len(files))[:24]
                decoded = units.decode(files.take(chosen))
                if batch % 20 == 0:
                    for i, file in enumerate(chosen.tolist()):
                        assert torch.equal(decoded.pixels(i), expected[file])
                torch.cuda.current_stream().synchronize()  # before the memory is written again
                if batch in (500, 1999):
                    free, total = torch.cuda.mem_get_info(CUDA)
                    used.append(total - free)
    finally:
        stop.set()
        thread.join()
    assert used[1] - used[0] <= 64 << 20  # others may use the device, too


@pytest.mark.parametrize("policy", ["none", "trivial"])
def test_a_busy_device_changes_no_pixel(source, policy):
    """With operations on grey levels, too, whose large intermediate results come and go beside the decoder's memory."""
    config = dataclasses.replace(CONFIG, auto_augment=policy)
    calm, calm_labels, _ = batches(source, config)
    for _ in range(2):
        busy, labels, loader = batches(source, config, busy=True)
        assert torch.equal(busy, calm)
        assert torch.equal(labels, calm_labels)
    assert loader.bad_samples == []


def in_a_folder(files, folder):
    """A class for each file: its label is its number."""
    for split in ("train", "val"):
        for i, data in enumerate(files):
            (folder / split / f"{i:02}").mkdir(parents=True)
            (folder / split / f"{i:02}" / "image.jpg").write_bytes(data)
    return open_data(DataConfig(data=str(folder)))[0]


def test_reading_processes_give_the_batches_of_threads(source, tmp_path, monkeypatch):
    folder = in_a_folder(source.files, tmp_path)
    expected, labels, _ = batches(folder, CONFIG)
    monkeypatch.setattr(reader_pool, "_WORTH_PROCESSES", 1)
    ours, ours_labels, loader = batches(folder, CONFIG, busy=True)
    assert loader.bad_samples == []
    assert torch.equal(ours, expected)
    assert torch.equal(ours_labels, labels)


SHARED = dataclasses.replace(CONFIG, cpu_decode_share=0.5)
ON_CPU = (5, 6, 7, 11, 12, 14, 15, 17, 23, 24, 27, 32, 35, 37, 38, 39, 41, 44, 46)  # of half of 48 samples


@pytest.mark.parametrize("cache", ["none", "gpu", "host"])
def test_a_share_of_the_images_is_the_cpus(source, tmp_path, monkeypatch, cache):
    folder = in_a_folder(source.files, tmp_path)
    by_gpu, labels, _ = batches(folder, CONFIG)
    by_cpu, _, _ = batches(folder, dataclasses.replace(CONFIG, decoder=choose_decoder("auto")))
    on_cpu = torch.isin(labels, torch.tensor(ON_CPU, device=CUDA))[:, None, None, None]
    expected = torch.where(on_cpu, by_cpu, by_gpu)
    assert not torch.equal(expected, by_gpu)
    config = dataclasses.replace(SHARED, cache=cache)
    ours, _, loader = batches(folder, config, busy=True)
    assert torch.equal(ours, expected)
    assert (loader.decoder, loader.cpu_decode_share) == ("nvjpeg", 0.5)
    monkeypatch.setattr(reader_pool, "_WORTH_PROCESSES", 1)
    again = open_data(DataConfig(data=str(tmp_path)))[0]  # nothing of it is kept yet
    ours, ours_labels, loader = batches(again, config, busy=True)
    assert torch.equal(ours, expected)
    assert torch.equal(ours_labels, labels)
    assert loader.bad_samples == []


def test_thousands_of_batches_are_shared_with_the_cpu(tmp_path, monkeypatch):
    """Slots, device memory and streams are used again and again: nothing is written over what is still read."""
    folder = in_a_folder([encoded(photo(90 + i, 160 - i, i)) for i in range(48)], tmp_path)
    config = dataclasses.replace(SHARED, image_size=32)
    expected, labels, _ = batches(folder, config, dtype=torch.float16, epochs=700.0)
    monkeypatch.setattr(reader_pool, "_WORTH_PROCESSES", 1)
    ours, ours_labels, _ = batches(folder, config, busy=True, dtype=torch.float16, epochs=700.0)
    assert len(ours) == 2100 * 16
    assert torch.equal(ours, expected)
    assert torch.equal(ours_labels, labels)


def test_training_batches_show_what_the_cpu_shows(source):
    ours, labels, _ = batches(source, CONFIG, epochs=1.0)
    theirs, other_labels, _ = batches(source, dataclasses.replace(CONFIG, decoder="pillow"), epochs=1.0)
    assert torch.equal(labels, other_labels)
    # In standard deviations, of about 58 grey levels each. Colours of subsampled files differ at edges.
    assert (ours - theirs).mean(dim=1).abs().mean() < 0.05
    assert (ours - theirs).abs().flatten(1).mean(dim=1).max() < 0.2


def test_evaluation_agrees_with_pillow(source):
    """Mean difference at most 0.5 grey levels, 99.9 of 100 within 2."""
    std, mean = (torch.tensor(v, device=CUDA).view(3, 1, 1) for v in (source.std, source.mean))
    made = eval_batches(source, CONFIG, batch_per_rank=16, rank=0, world_size=1, device=CUDA, dtype=torch.float32)
    ours = torch.cat([(batch.images * std + mean) * 255 for batch in made]).permute(0, 2, 3, 1).cpu().numpy()
    for i, data in enumerate(source.files):
        view = lambda w, h: augment.eval_view(CONFIG, w, h, whole=False)  # noqa: E731
        expected = decode_view(data, "", view, 224, decoder="pillow", exact=True)
        difference = np.abs(ours[i] - expected)
        assert difference.mean() <= 0.5
        assert np.quantile(difference, 0.999) <= 2


@pytest.mark.parametrize("place", ["gpu", "host"])
def test_kept_images_give_the_same_batches(source, place):
    expected, _, _ = batches(source, CONFIG)
    kept, _, _ = batches(source, dataclasses.replace(CONFIG, cache=place))
    assert torch.equal(kept, expected)


@pytest.mark.parametrize("decoder", ["nvjpeg", "pillow"])
def test_loaders_that_share_kept_images_show_none_before_it_has_arrived(decoder):
    shared, config = Files(), dataclasses.replace(CONFIG, cache="gpu", decoder=decoder)
    expected, _, _ = batches(shared, dataclasses.replace(config, cache="none"))
    cache_of(shared, config, CUDA, 1)  # empty, and there before both ask for it
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(lambda busy: batches(shared, config, busy=busy)[0], (True, False)))
    assert all(torch.equal(images, expected) for images in made)


def test_bad_files_are_replaced_as_on_the_cpu():
    broken = Files(16, broken=(3, 4))
    _, labels, loader = batches(broken, CONFIG, epochs=1.0)
    _, expected, other = batches(broken, dataclasses.replace(CONFIG, decoder="pillow"), epochs=1.0)
    assert torch.equal(labels, expected)
    assert len(loader.bad_samples) == len(other.bad_samples) == 2


def test_memory_is_flat_over_epochs(source):
    with TrainLoader(source, CONFIG, seed=3, rank=0, world_size=1, device=CUDA, dtype=torch.float16) as loader:
        peaks = []
        for i, _ in enumerate(loader.batches(plan(source, 12.0))):
            if i % 12 == 11:
                peaks.append(torch.cuda.max_memory_reserved())
    assert peaks[-1] == peaks[1]


def test_a_step_is_captured_while_the_loader_runs(source):
    """With capture_error_mode="thread_local", so that calls of the loader do not disturb the capture."""
    static = torch.zeros(16, 3, 224, 224, device=CUDA).to(memory_format=torch.channels_last)
    graph, total = None, torch.zeros((), device=CUDA, dtype=torch.float64)
    with TrainLoader(source, CONFIG, seed=3, rank=0, world_size=1, device=CUDA, dtype=torch.float32) as loader:
        expected = 0.0
        for batch in loader.batches(plan(source)):
            static.copy_(batch.images)
            if graph is None:
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                    total += static.double().abs().sum()
            graph.replay()
            expected += batch.images.double().abs().sum().item()
    assert total.item() == pytest.approx(expected, rel=1e-9)


def test_arrays_are_cut_on_the_device():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (64, 32, 32, 3), dtype=np.uint8)
    array = ArraySource("array", images, np.arange(64), classes=tuple(map(str, range(64))))
    config = DataConfig(image_size=32, eval_size=32, augment="shift", shift_pixels=4)
    ours, labels, _ = batches(array, config)
    with TrainLoader(
        array, config, seed=3, rank=0, world_size=1, device=torch.device("cpu"), dtype=torch.float32
    ) as loader:
        made = list(loader.batches(plan(array)))
    assert torch.equal(labels.cpu(), torch.cat([batch.labels for batch in made]))
    assert torch.allclose(ours.cpu(), torch.cat([batch.images for batch in made]), atol=1e-4)


RECORD = DataConfig(
    image_size=32,
    eval_size=32,
    augment="shift",
    shift_pixels=2,
    shift_padding="reflect",
    flip_alternates=True,
    brightness_jitter=0.1,
    contrast_jitter=0.2,
)
CUT = dataclasses.replace(RECORD, cutout=12)


def resident(n):
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (n, 32, 32, 3), dtype=np.uint8)
    return ArraySource("array", images, rng.integers(0, 10, n), classes=tuple(map(str, range(10))))


def on_both(array, config, dtype):
    """(the GPU's batch, the CPU's) of each step."""
    made = []
    for device in (CUDA, torch.device("cpu")):
        with TrainLoader(array, config, seed=3, rank=0, world_size=1, device=device, dtype=dtype) as loader:
            made.append([*loader.batches(plan(array, 3.0, 1024))])
    return zip(*made, strict=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("size", [32, 24])
@pytest.mark.parametrize("config", [RECORD, CUT], ids=["whole", "cut out"])
def test_a_set_in_device_memory_gives_the_hosts_batches(dtype, size, config):
    array, config = resident(3000), dataclasses.replace(config, image_size=size)
    for ours, theirs in on_both(array, config, dtype):
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        difference = (ours.images.cpu().float() - theirs.images.float()).abs()
        # At its own size one rounding; resized, the host rounds to whole grey levels twice.
        assert difference.max() < (0.05 if size == 24 else 4e-3 if dtype == torch.float16 else 2e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("policy", ["none", "trivial", "rand"])
def test_mixed_and_retouched_batches_are_the_hosts(dtype, policy):
    array = resident(3000)
    config = dataclasses.replace(CUT, mixup=0.2, cutmix=1.0, auto_augment=policy)
    for ours, theirs in on_both(array, config, dtype):
        assert ours.images.is_contiguous(memory_format=torch.channels_last)
        assert ours.labels.shape == (1024, 3)
        assert torch.equal(ours.labels.cpu(), theirs.labels)
        difference = (ours.images.cpu().float() - theirs.images.float()).abs()
        assert difference.max() < (8e-3 if dtype == torch.float16 else 4e-6)  # two roundings


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_every_operation_gives_the_cpus_pixels():
    levels = torch.from_numpy(resident(len(trivial.OPERATIONS) * 62).images)
    rows = np.arange(len(levels))
    uniforms = np.stack([rows // 62 / 14 + 1e-9, rows % 31 / 31 + 1e-9, rows % 62 // 31 * 0.6], axis=1)
    drawn = trivial.draw(uniforms)
    assert (np.bincount(drawn.operations) == 62).all()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")  # the loader's stream goes on while the host works ahead
        try:
            ours = trivial.apply(copy_to_device(levels.numpy(), CUDA), drawn)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(ours.cpu(), trivial.apply(levels, drawn))


def test_after_a_rehearsal_batches_need_no_new_memory():
    array, todo = resident(3000), plan(resident(3000), 3.0, 512)
    strides = [tuple(todo[i : i + 4]) for i in range(0, len(todo) - 4, 4)]
    with TrainLoader(array, RECORD, seed=3, rank=0, world_size=1, device=CUDA, dtype=torch.float16) as loader:
        loader.rehearse(strides[:1])
        torch.cuda.synchronize()
        before = torch.cuda.memory_stats()["num_device_alloc"]
        first = next(loader.batches(strides))
        assert torch.cuda.memory_stats()["num_device_alloc"] == before
        assert len(first.labels) == 4 * 512


def test_fifty_thousand_samples_are_drawn_as_on_the_host():
    array = resident(50_000)
    with TrainLoader(array, RECORD, seed=7, rank=0, world_size=1, device=CUDA, dtype=torch.float16) as loader:
        places = stream.Stretches(49_000, 70_000, share=500, stride=1000)
        (batch, _), *_ = loader._maker.run(iter([loader._plan(places, 32)]))
    epochs, ids = places.samples(50_000, 7)
    assert torch.equal(batch.labels.cpu(), torch.from_numpy(array.labels[ids]))
    views = np.empty((70_000, 32, 32, 3), dtype=np.uint8)
    uniforms = augment.draw(RECORD, 7, epochs, ids)
    write_array_views(views, array.gather(ids), RECORD, uniforms)
    contrast, brightness = (torch.from_numpy(v)[:, None, None, None] for v in augment.jitter(RECORD, uniforms))
    normalised = (torch.from_numpy(views).double() / 255 - torch.tensor(array.mean)) / torch.tensor(array.std)
    expected = (normalised * contrast + brightness).permute(0, 3, 1, 2)
    assert (batch.images.cpu().double() - expected).abs().max() < 4e-3  # of fp16


def test_an_evaluation_set_in_device_memory_gives_the_hosts_batches():
    array = resident(10_000)
    options = {"batch_per_rank": 4096, "rank": 0, "world_size": 1, "dtype": torch.float16}
    first = eval_batches(array, RECORD, device=CUDA, **options)
    host = eval_batches(array, RECORD, device=torch.device("cpu"), **options)
    for ours, theirs in zip(first, host, strict=True):
        real = int(theirs.mask.sum())
        assert torch.equal(ours.mask.cpu(), theirs.mask)
        assert torch.equal(ours.images.cpu()[:real], theirs.images[:real])
        assert torch.equal(ours.labels.cpu()[:real], theirs.labels[:real])


def test_auto_measures_and_takes_the_gpu(source):
    assert measured_decoder(source, DataConfig(), CUDA) in ("nvjpeg", "torchvision", "simplejpeg", "pillow")
    assert measured_decoder(source, DataConfig(decoder="pillow"), CUDA) == "pillow"
