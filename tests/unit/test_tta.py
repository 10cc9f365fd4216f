"""Test-time augmentation against a direct formula, and which images are looked at again."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.nn import functional

from hyperbatch.models.tta import VIEWS, averaged_logits, least_certain, plain_and_averaged, shown
from hyperbatch.vocabulary import TTA


def network(dtype=torch.float64, classes=5):
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(8 * 36, classes))
    return layers.to(dtype).requires_grad_(False)


def pictures(count, dtype=torch.float64):
    return torch.randn(count, 6, 6, 3, generator=torch.Generator().manual_seed(5)).to(dtype).permute(0, 3, 1, 2)


def formula(model, images, tta):
    """As it is written down elsewhere: halves of mirrored pairs, moved images cut from a reflected border."""

    def pair(x):
        return 0.5 * model(x) + 0.5 * model(torch.flip(x, [3]))

    if tta == "none":
        return model(images)
    if tta == "mirror":
        return pair(images)
    wide = functional.pad(images, (1, 1, 1, 1), "reflect")
    moved = 0.5 * pair(wide[:, :, :6, :6]) + 0.5 * pair(wide[:, :, 2:, 2:])
    return 0.5 * pair(images) + 0.5 * moved


def test_every_name_has_views_whose_weights_sum_to_one():
    assert tuple(VIEWS) == TTA
    for views in VIEWS.values():
        assert math.fsum(view.weight for view in views) == 1
        assert (views[0].mirror, views[0].shift_pixels) == (False, 0)
        assert len(set(views)) == len(views)


@pytest.mark.parametrize("tta", TTA)
def test_the_reference_is_the_formula(tta):
    model, images = network(), pictures(7)
    torch.testing.assert_close(averaged_logits(model, images, VIEWS[tta]), formula(model, images, tta))


def test_a_shift_moves_the_picture_right_and_down_and_reflects_the_border():
    image = torch.arange(9.0).reshape(1, 1, 3, 3)
    right, left = (next(v for v in VIEWS["mirror_shift"] if v.shift_pixels == n and not v.mirror) for n in (1, -1))
    assert shown(image, right)[0, 0].tolist() == [[4, 3, 4], [1, 0, 1], [4, 3, 4]]
    assert shown(image, left)[0, 0].tolist() == [[4, 5, 4], [7, 8, 7], [4, 5, 4]]
    assert shown(image, left._replace(mirror=True))[0, 0].tolist() == [[4, 5, 4], [7, 8, 7], [4, 5, 4]]
    assert shown(image, right._replace(shift_pixels=0, mirror=True))[0, 0, 0].tolist() == [2, 1, 0]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("tta", TTA)
@pytest.mark.parametrize("share", [1.0, 0.5, 0.25, 0.1])
def test_shares_of_a_batch_equal_the_reference(tta, share, dtype):
    """In 16 bit the network's products are rounded by their place in the batch: half a step of its answers, 2^-9."""
    model, images = network(dtype), pictures(11, dtype)
    plain, averaged = plain_and_averaged(model, images, VIEWS[tta], share)
    wide = torch.promote_types(dtype, torch.float32)
    assert plain.dtype == averaged.dtype == wide
    again = least_certain(plain, math.ceil(share * 11))
    expected = model(images).to(wide)
    tolerance = {} if dtype.itemsize > 2 else {"atol": 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10, "rtol": 0.0}
    torch.testing.assert_close(plain, expected, **tolerance)
    expected[again] = averaged_logits(model, images, VIEWS[tta])[again]
    torch.testing.assert_close(averaged, expected, **tolerance)
    kept = [row for row in range(11) if row not in again.tolist()]
    assert torch.equal(averaged[kept], plain[kept])


def test_the_least_certain_are_those_with_the_closest_two_answers():
    margins = [3.0, 0.5, 0.1, 2.0, 0.5, 0.0]
    logits = torch.tensor([[9.0, 9.0 - margin, -50.0] for margin in margins]).double()
    assert least_certain(logits, 3).tolist() == [5, 2, 1], "equal ones in order"
    real = torch.tensor([True, True, False, True, True, False])
    assert least_certain(logits, 3, real).tolist() == [1, 4, 3], "padding last"


def test_padding_takes_no_place_of_an_image():
    """Eight images and eight of padding, which is less certain: a quarter of the batch, four, are all images."""
    images = torch.cat([pictures(8), torch.zeros(8, 3, 6, 6, dtype=torch.float64)])
    model, real = network(), torch.arange(16) < 8
    plain, averaged = plain_and_averaged(model, images, VIEWS["mirror"], 0.25, real)
    assert (averaged != plain).any(1).sum() == (averaged != plain)[:8].any(1).sum() == 4


def test_the_network_meets_the_shape_of_the_batch_as_often_as_possible():
    counts, model = [], network()

    def noting(images):
        assert images.is_contiguous(memory_format=torch.channels_last)
        counts.append(len(images))
        return model(images)

    plain_and_averaged(noting, pictures(8), VIEWS["mirror_shift"], 0.25)
    assert counts == [8, 8, 2]
    counts.clear()
    plain_and_averaged(noting, pictures(8), VIEWS["mirror_shift"])
    assert counts == [8] * 6
