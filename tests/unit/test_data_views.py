"""Views of an image: the right part, the right pixels, the same from every decoder and every path."""

import dataclasses
import io
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from photos import encoded, photo
from PIL import Image, features

from hyperbatch.config import DataConfig, SizePhase
from hyperbatch.data import augment
from hyperbatch.data.decode import choose_decoder, decode_full, decode_view, render_array
from hyperbatch.data.decoders import resolve_decoders
from hyperbatch.data.host import write_array_views
from hyperbatch.data.resize import resize_box
from hyperbatch.data.source import BadSample
from hyperbatch.errors import InputError

DOCS = Path(__file__).parents[2] / "docs" / "data.md"


def rows(config, n=500, epoch=0):
    return augment.draw(config, 1, np.full(n, epoch), np.arange(n))


def boxes(config, width, height, epoch=0, n=500):
    return np.array(
        [augment.train_view(config, width, height, epoch, u.tolist(), whole=False).box for u in rows(config, n)]
    )


def whole_view(width, height):
    return augment.View((0, 0, width, height))


SIZES = [(500, 375), (375, 500), (224, 224), (333, 1024), (1, 1), (2000, 3)]


@pytest.mark.parametrize("augmentation", ["none", "shift", "random_resized_crop", "scale_jitter", "fixed_resize_crop"])
@pytest.mark.parametrize(("width", "height"), SIZES)
def test_boxes_lie_within_the_image(augmentation, width, height):
    config = DataConfig(augment=augmentation, shift_pixels=4, full_crop_from_epoch=5)
    for epoch in (0, 5):
        found = boxes(config, width, height, epoch)
        assert (found[:, :2] >= 0).all()
        assert (found[:, 2:] <= np.array([width, height]) + 1e-9).all()
        assert (found[:, 2:] > found[:, :2]).all()


def test_random_resized_crop_keeps_to_area_and_aspect():
    config = DataConfig(crop_area=(0.25, 0.9), crop_aspect=(0.5, 2.0))
    found = boxes(config, 500, 500)
    w, h = (found[:, 2:] - found[:, :2]).T
    area, aspect = w * h / 500**2, w / h
    assert area.min() > 0.245  # whole pixels: a little slack
    assert area.max() < 0.905
    assert area.std() > 0.1
    assert aspect.min() > 0.49
    assert aspect.max() < 2.02
    assert abs(np.log(aspect).mean()) < 0.06  # wide and tall alike; three standard errors


def test_near_full_crops_begin_at_their_epoch():
    config = DataConfig(crop_aspect=(2 / 3, 3 / 2), full_crop_from_epoch=85)
    early, late = boxes(config, 500, 375, 84), boxes(config, 500, 375, 85)
    area = (late[:, 2] - late[:, 0]) * (late[:, 3] - late[:, 1]) / (500 * 375)
    assert 0.999 - 1e-9 <= area.min() < area.max() <= 1
    assert f"at least {100 * augment._NEAR_FULL_AREA:g} % of the image's area" in DOCS.read_text()
    assert ((early[:, 2] - early[:, 0]) * (early[:, 3] - early[:, 1])).min() < 0.3 * 500 * 375


def test_scale_jitter_draws_the_shorter_side():
    config = DataConfig(augment="scale_jitter", jitter_sides=(256, 480))
    found = boxes(config, 640, 480)
    shorter = 224 * 480 / (found[:, 3] - found[:, 1])
    assert 256 <= round(shorter.min()) < 262
    assert 474 < round(shorter.max()) <= 480


def test_fixed_resize_crop_cuts_224_of_256():
    config = DataConfig(augment="fixed_resize_crop")
    found = boxes(config, 512, 512)
    assert np.allclose(found[:, 2] - found[:, 0], 448)
    assert {*found[:, 0] / 2} == set(range(33))


def test_half_of_the_views_are_mirrored_or_none():
    config = DataConfig()
    assert 200 < augment.flips(config, rows(config)).sum() < 300
    assert not augment.flips(dataclasses.replace(config, flip=False), rows(config)).any()


def test_an_alternating_mirror_is_drawn_once_and_then_turns_every_epoch():
    config = DataConfig(augment="shift", shift_pixels=2, flip_alternates=True)
    mirrored = np.stack([augment.flips(config, rows(config, 300, epoch)) for epoch in range(6)])
    plain = dataclasses.replace(config, flip_alternates=False)
    assert (mirrored[0] == augment.flips(plain, rows(plain, 300))).all()  # the first epoch is drawn as without
    assert (mirrored[1:] != mirrored[:-1]).all()
    # Nothing else of a view changes.
    for epoch in range(3):
        assert (rows(config, 300, epoch)[:, 1:] == rows(plain, 300, epoch)[:, 1:]).all()
    # By sample and epoch: whatever else is in the batch.
    ids, epochs = np.array([7, 7, 250, 3]), np.array([4, 5, 1, 3])
    assert (augment.flips(config, augment.draw(config, 1, epochs, ids)) == mirrored[epochs, ids]).all()
    other_seed = augment.flips(config, augment.draw(config, 2, np.zeros(300, dtype=int), np.arange(300)))
    assert 100 < (other_seed != mirrored[0]).sum() < 200


@pytest.mark.parametrize("padding", ["zero", "reflect"])
@pytest.mark.parametrize("shift", [1, 4, 7])
def test_shifts_are_torchs_pad_and_a_crop(padding, shift):
    config = DataConfig(augment="shift", shift_pixels=shift, shift_padding=padding, flip_alternates=True, image_size=8)
    pixels = np.random.default_rng(0).integers(0, 256, (60, 8, 8, 3), dtype=np.uint8)
    uniforms = rows(config, 60, epoch=3)
    ours = np.empty_like(pixels)
    write_array_views(ours, pixels, config, uniforms)
    planes = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    mode = "reflect" if padding == "reflect" else "constant"
    padded = torch.nn.functional.pad(planes, (shift,) * 4, mode=mode)
    moves, mirrored = augment.shifts(config, uniforms), augment.flips(config, uniforms)
    assert abs(moves).max() == shift
    for i, (dx, dy) in enumerate(moves.tolist()):
        expected = padded[i, :, shift - dy : shift - dy + 8, shift - dx : shift - dx + 8]
        expected = expected.flip(-1) if mirrored[i] else expected
        assert (ours[i] == expected.permute(1, 2, 0).numpy()).all()


def test_a_shift_does_not_reach_beyond_the_smallest_image():
    config = DataConfig(image_size=32, size_phases=(SizePhase(0, 8), SizePhase(2, 32)), augment="shift", shift_pixels=8)
    with pytest.raises(InputError, match=r"--shift-pixels 8: must be in \[0, 8\)"):
        augment.check_options(config, 3, whole=True)
    augment.check_options(dataclasses.replace(config, shift_pixels=7), 3, whole=True)


def test_jitter_is_uniform_in_its_range_and_changes_no_other_draw():
    plain = DataConfig(augment="shift", shift_pixels=2)
    config = dataclasses.replace(plain, brightness_jitter=0.2, contrast_jitter=0.5)
    u = rows(config, 4000)
    assert (u[:, : augment.uniforms_needed(plain)] == rows(plain, 4000)).all()
    contrast, brightness = augment.jitter(config, u)
    for values, low, high in ((contrast, 0.5, 1.5), (brightness, -0.2, 0.2)):
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < values.max() <= high
        assert abs(np.quantile(values, [0.25, 0.5, 0.75]) - np.linspace(low, high, 5)[1:4]).max() < 0.03 * (high - low)
    assert abs(np.corrcoef(contrast, brightness)[0, 1]) < 0.06
    assert [values.tolist() for values in augment.jitter(plain, u[:3])] == [[1, 1, 1], [0, 0, 0]]


def test_a_cutout_lies_anywhere_inside_and_changes_no_other_draw():
    plain = DataConfig(augment="shift", shift_pixels=2, image_size=10, brightness_jitter=0.2, auto_augment="trivial")
    config = dataclasses.replace(plain, cutout=4)
    u = rows(config, 4000)
    assert (u[:, : augment.uniforms_needed(plain)] == rows(plain, 4000)).all()
    corners = augment.cutout_corners(config, u, 10)
    places = corners[:, 0] * 7 + corners[:, 1]
    assert abs(np.bincount(places, minlength=49) / 4000 - 1 / 49).max() < 0.01
    assert places.max() == 48
    for without in (dataclasses.replace(config, auto_augment="none"), dataclasses.replace(config, brightness_jitter=0)):
        assert (augment.cutout_corners(without, rows(without, 50), 10) == corners[:50]).all()
    assert augment.cutout_side(config, 5) == 2
    assert augment.cutout_corners(config, u, 5).max() == 3


def test_a_cutout_leaves_something_of_the_image():
    with pytest.raises(InputError, match=r"--cutout 32: must be in \[0, 32\), the image side"):
        augment.check_options(DataConfig(image_size=32, cutout=32), 3, whole=True)
    augment.check_options(DataConfig(image_size=32, cutout=31), 3, whole=True)


def test_color_noise_has_the_covariance_of_imagenets_colours():
    config = DataConfig(augment="scale_jitter", color_noise=0.1)
    noise = augment.color_noise(config, rows(config, 20_000))
    axes = augment._PCA_AXES
    assert np.allclose(axes.T @ axes, np.eye(3), atol=2e-3)
    along = noise @ axes
    # Six standard errors of a standard deviation of 20,000 normals: 3 %.
    assert np.allclose(along.std(axis=0), 0.1 * augment._PCA_VALUES, rtol=0.03)
    assert abs(along.mean(axis=0) / along.std(axis=0)).max() < 0.04


def test_progressive_sizes():
    config = DataConfig(image_size=128, size_phases=(SizePhase(2, 160), SizePhase(5.5, 224)))
    assert [augment.size_at(config, epoch) for epoch in (0, 1.99, 2, 5.4, 5.5, 90)] == [128, 128, 160, 160, 224, 224]


@pytest.mark.parametrize(("width", "height"), [(500, 375), (375, 501), (256, 256), (90, 200), (1200, 803)])
def test_evaluation_equals_resizing_everything_with_pillow(width, height):
    """torchvision's Resize(256) and CenterCrop(224) on a Pillow image, written out."""
    config = DataConfig()
    image = photo(width, height)
    scale = 256 / min(width, height)
    w, h = (256, int(256 * height / width)) if width <= height else (int(256 * width / height), 256)
    assert abs(w - width * scale) <= 1
    resized = image.resize((w, h), Image.Resampling.BILINEAR)
    left, top = round((w - 224) / 2), round((h - 224) / 2)
    expected = np.asarray(resized.crop((left, top, left + 224, top + 224))).astype(int)
    ours = render_array(np.asarray(image), augment.eval_view(config, width, height, whole=False), 224).astype(int)
    # The same filter over the same pixels; box edges are rounded to float once more.
    assert abs(ours - expected).max() <= 1
    assert (ours != expected).mean() < 0.01


def test_arrays_are_evaluated_whole():
    config = DataConfig(image_size=8, eval_size=8, eval_resize=256)
    pixels = np.arange(64, dtype=np.uint8).reshape(8, 8, 1)
    assert (render_array(pixels, augment.eval_view(config, 8, 8, whole=True), 8) == pixels).all()
    assert render_array(pixels, augment.eval_view(config, 8, 8, whole=True), 12).shape == (12, 12, 1)


@pytest.mark.parametrize("channels", [1, 2, 3])
@pytest.mark.parametrize("flip", [True, False])
@pytest.mark.parametrize("shift", [0, 3])
@pytest.mark.parametrize("padding", ["zero", "reflect"])
def test_whole_batches_equal_one_view_at_a_time(channels, flip, shift, padding):
    config = DataConfig(augment="shift", shift_pixels=shift, shift_padding=padding, flip=flip, image_size=8)
    pixels = np.random.default_rng(0).integers(0, 256, (40, 8, 8, channels), dtype=np.uint8)
    uniforms = rows(config, 40)
    fast = np.empty_like(pixels)
    write_array_views(fast, pixels, config, uniforms)
    plain = [
        render_array(image, augment.train_view(config, 8, 8, 0, u.tolist(), whole=True), 8)
        for image, u in zip(pixels, uniforms)
    ]
    assert (fast == np.stack(plain)).all()
    assert shift == 0 or len(np.unique(augment.shifts(config, uniforms))) == 2 * shift + 1


# --- decoding


needs_simplejpeg = pytest.mark.skipif(choose_decoder("auto") != "simplejpeg", reason="simplejpeg is not installed")
DECODERS = ["pillow", pytest.param("simplejpeg", marks=needs_simplejpeg)]


@needs_simplejpeg
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
@pytest.mark.parametrize("options", [{"quality": 90}, {"progressive": True}, {"subsampling": 0}, {"subsampling": 2}])
def test_decoders_agree_exactly(options, mode):
    data = encoded(photo(301, 203).convert(mode), **options)
    assert (decode_full(data, "x") == decode_full(data, "x", decoder="simplejpeg")).all()
    config = DataConfig()
    for u in rows(config, 5):
        views = [
            decode_view(
                data,
                "x",
                lambda w, h, u=u: augment.train_view(config, w, h, 0, u.tolist(), whole=False),
                64,
                decoder=decoder,
                exact=True,
            )
            for decoder in ("pillow", "simplejpeg")
        ]
        assert (views[0] == views[1]).all()


@pytest.mark.parametrize(
    ("width", "height", "size"), [(300, 250, 224), (90, 120, 224), (224, 224, 224), (7, 9, 4), (1, 1, 3)]
)
def test_the_fast_resize_equals_pillows(width, height, size):
    pixels = np.array(photo(width + 20, height + 20))
    box = (3, 11, 3 + width, 11 + height)
    fast = resize_box(pixels, box, size).astype(int)
    plain = render_array(np.ascontiguousarray(pixels[11 : 11 + height, 3 : 3 + width]), whole_view(width, height), size)
    # Both work in fixed point; a last rounding may differ.
    assert abs(fast - plain).max() <= 1
    assert (fast != plain).mean() < 0.02


@pytest.mark.parametrize("decoder", DECODERS)
def test_scaled_decoding_shows_the_same_picture(decoder):
    # Pillow cuts between pixels, the fast resize at whole ones: the latter is exact only where 8 divides the sides.
    full_size = (1605, 1203) if decoder == "pillow" else (1600, 1200)
    data = encoded(photo(200, 150).resize(full_size, Image.Resampling.BICUBIC), quality=95)
    views = [
        decode_view(data, "x", whole_view, 100, decoder=decoder, exact=exact).astype(float) for exact in (True, False)
    ]
    # DCT scaling is another filter than bilinear, but nothing moves: one pixel aside, the difference is far larger.
    assert abs(views[0] - views[1]).mean() < 1
    assert abs(views[0][:, 1:] - views[1][:, :-1]).mean() > 5


@pytest.mark.parametrize("decoder", DECODERS)
def test_grey_cmyk_and_png_become_rgb(decoder):
    image = photo(64, 48)
    for data in (
        encoded(image.convert("L")),
        encoded(image.convert("CMYK")),
        encoded(image.convert("P"), "PNG"),
        encoded(image.convert("P"), "PNG", transparency=bytes(range(256))),  # Pillow would warn of it
        encoded(image.convert("RGBA"), "PNG"),
        encoded(image.convert("1"), "PNG"),
        encoded(image, "WEBP"),
    ):
        assert decode_view(data, "x", whole_view, 32, decoder=decoder, exact=True).shape == (32, 32, 3)
        assert decode_full(data, "x").shape == (48, 64, 3)
    grey = decode_view(encoded(image.convert("L")), "x", whole_view, 32, decoder=decoder, exact=False)
    assert (grey[..., 0] == grey[..., 1]).all()
    expected = np.asarray(Image.open(io.BytesIO(encoded(image.convert("CMYK")))).convert("RGB"))
    assert (decode_full(encoded(image.convert("CMYK")), "x") == expected).all()


def test_of_16_bits_the_upper_8_are_kept():
    grey = np.asarray(photo(64, 48).convert("L"))
    wide = (grey.astype(np.uint16) << 8) + 200
    bits = np.unpackbits(wide.astype(">u2").view(np.uint8)).reshape(-1, 16)
    tag = struct.pack("<HHIHH", 258, 3, 1, 16, 0)  # BitsPerSample
    tiff_12_bits = (
        encoded(Image.fromarray(wide), "TIFF")
        .replace(tag, tag.replace(b"\x10", b"\x0c"))
        .replace(wide.tobytes(), np.packbits(bits[:, :12]).tobytes())
    )
    expected = np.repeat(grey[:, :, None], 3, axis=2)
    for file in (
        encoded(Image.fromarray(wide), "PNG"),
        encoded(Image.fromarray(wide), "TIFF"),
        tiff_12_bits,
        b"P5 64 48 65535\n" + wide.astype(">u2").tobytes(),
        b"P6 64 48 65535\n" + np.repeat(wide[:, :, None], 3, axis=2).astype(">u2").tobytes(),
    ):
        assert abs(decode_full(file, "x").astype(int) - expected).max() <= 1  # Pillow rounds P6
    views = [
        decode_view(encoded(Image.fromarray(pixels), "PNG"), "x", whole_view, 32, decoder="pillow", exact=True)
        for pixels in (wide, grey)
    ]
    assert (views[0] == views[1]).all()


@pytest.mark.parametrize("decoder", DECODERS)
def test_exif_orientation_is_ignored_as_torchvision_does(decoder):
    image = photo(64, 32)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotate by 90 degrees
    plain, tagged = encoded(image), encoded(image, exif=exif)
    assert decode_full(tagged, "x").shape == (32, 64, 3)
    views = [decode_view(data, "x", whole_view, 32, decoder=decoder, exact=True) for data in (plain, tagged)]
    assert (views[0] == views[1]).all()


def lossless_jpeg(pixels):
    """uint8[h, w, 3] as ITU T.81 predicts them without loss: each by its left neighbour, the first by the one above."""
    height, width, colors = pixels.shape
    ahead = pixels.astype(int)
    steps = np.diff(ahead, axis=1, prepend=np.concatenate([np.full((1, 1, 3), 128), ahead[:-1, :1]]))
    codes = []  # the number of bits of a step, in 5 bits, then these bits
    for step in steps.ravel().tolist():
        bits = abs(step).bit_length()
        codes.append(f"{bits:05b}" + (f"{step if step > 0 else step + (1 << bits) - 1:0{bits}b}" if bits else ""))
    stream = "".join(codes)
    stream += "1" * (-len(stream) % 8)
    segments = (
        (0xC3, struct.pack(">BHHB", 8, height, width, colors) + b"".join(bytes((name, 0x11, 0)) for name in b"RGB")),
        (0xC4, bytes(5) + bytes([10]) + bytes(11) + bytes(range(10))),  # ten codes, of 5 bits each
        (0xDA, bytes([colors]) + b"".join(bytes((name, 0)) for name in b"RGB") + bytes((1, 0, 0))),
    )
    head = b"".join(struct.pack(">BBH", 0xFF, marker, len(rest) + 2) + rest for marker, rest in segments)
    coded = int(stream, 2).to_bytes(len(stream) // 8, "big").replace(b"\xff", b"\xff\0")
    return b"\xff\xd8" + head + coded + b"\xff\xd9"


@pytest.mark.parametrize("decoder", DECODERS)
def test_lossless_jpegs_are_not_decoded_smaller(decoder):
    """libjpeg cannot, and gives pixels from all over the image, or says that the file is damaged."""
    pixels = np.asarray(photo(200, 150))
    data = lossless_jpeg(pixels)
    try:
        assert (decode_full(data, "x", decoder=decoder) == pixels).all()
    except BadSample:
        pytest.skip("this libjpeg does not decode lossless JPEGs")
    smaller = decode_view(bytearray(data), "x", whole_view, 16, decoder=decoder, exact=False)
    assert abs(smaller.astype(int) - render_array(pixels, whole_view(200, 150), 16)).max() <= 1


@pytest.mark.parametrize("decoder", DECODERS)
def test_one_pixel_images(decoder):
    data = encoded(Image.new("RGB", (1, 1), (200, 100, 50)))
    view = decode_view(data, "x", whole_view, 16, decoder=decoder, exact=False)
    assert abs(view.astype(int) - (200, 100, 50)).max() <= 3


def bomb():
    """A valid JPEG whose header claims 65,500 x 65,500 pixels."""
    data = bytearray(encoded(photo(16, 16)))
    at = data.index(b"\xff\xc0") + 5
    data[at : at + 4] = (65_500).to_bytes(2, "big") * 2
    return bytes(data)


def damaged_avif():
    """As pictures from the web are, whatever they are called; Pillow raises no OSError here."""
    data = encoded(photo(16, 16), "AVIF")
    start = data.index(b"mdat") + 4
    return data[:start] + bytes(len(data) - start)


def unknown_texture():
    """A DDS file with pixels of no kind that there is, for which Pillow raises no OSError."""
    data = bytearray(encoded(photo(16, 16), "DDS"))
    data[80:84] = bytes(4)
    return bytes(data)


BROKEN = {
    "empty": lambda: b"",
    "text": lambda: b"not an image",
    "truncated": lambda: encoded(photo(200, 150))[:2000],
    "header only": lambda: encoded(photo(200, 150))[:100],
    "truncated png": lambda: encoded(photo(200, 150), "PNG")[:3000],
    "bomb": bomb,
    "unknown texture": unknown_texture,
    **({"damaged avif": damaged_avif} if features.check("avif") else {}),
}


@pytest.mark.parametrize("decoder", DECODERS)
@pytest.mark.parametrize("kind", BROKEN)
def test_broken_files_are_bad_samples(kind, decoder):
    data = BROKEN[kind]()
    with pytest.raises(BadSample, match=r"some/file\.jpg: ") as caught:
        decode_view(data, "some/file.jpg", whole_view, 32, decoder=decoder, exact=False)
    assert "\n" not in str(caught.value)
    with pytest.raises(BadSample, match=r"some/file\.jpg: "):
        decode_full(data, "some/file.jpg")


def test_a_file_that_is_no_image_gets_the_same_text_each_time():
    with pytest.raises(BadSample, match=r"^some/file\.jpg: not a readable image$"):
        decode_full(b"not an image", "some/file.jpg")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_decoder_that_cannot_be_used_is_refused():
    with pytest.raises(InputError, match="--decoder nvjpeg: needs"):
        resolve_decoders("nvjpeg", torch.device("cpu"))
