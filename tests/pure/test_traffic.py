"""The traffic model: against the published figures for ResNet-50, and identities that hold for any model."""

import pytest

from benchmarks.traffic import RUNGS, image_bytes, sizes, step_bytes
from hyperbatch.plan.inventory import layers, tensors

MODELS = ("resnet18", "resnet50", "resnet20", "alexnet_bn", "alexnet_bn_pool5")


@pytest.mark.parametrize(
    ("rung", "known_mb"),
    [
        ("unfused", 476),
        ("norm", 360),  # ours is 9 % above: that figure leaves out the sum of gradients where a block begins (34 MB)
        ("conv", 255),  # ours is 2 % above: pooling is counted here
        ("minimal", 111),
    ],
)
def test_resnet50_agrees_with_the_figures_of_the_probe(rung, known_mb):
    assert image_bytes("resnet50", rung)["total"] / 1e6 == pytest.approx(known_mb, rel=0.1)


def test_moments_take_the_widest_tensors_out_of_backward():
    """A block's last norm and its sum: 12 passes by the norm rung, 6.4 by moments."""
    norm, moments = (image_bytes("resnet50", rung)["total"] for rung in ("norm", "moments"))
    assert norm - moments > 0.9 * (12 - 6.4) * 2 * sizes("resnet50").add


def test_the_sum_of_gradients_explains_the_norm_rung():
    parts = image_bytes("resnet50", "norm")
    assert (parts["total"] - parts["add"]) / 1e6 == pytest.approx(360, rel=0.01)


@pytest.mark.parametrize("model", MODELS)
def test_every_rung_moves_less_than_the_one_before(model):
    totals = [image_bytes(model, rung)["total"] for rung in RUNGS]
    assert totals == sorted(totals, reverse=True)
    assert len(set(totals)) == len(RUNGS)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("rung", RUNGS)
def test_the_total_is_the_sum_of_the_families(model, rung):
    parts = image_bytes(model, rung)
    assert sum(parts.values()) == 2 * parts["total"]
    assert min(parts.values()) >= 0


def test_wider_numbers_move_more_but_indices_stay():
    narrow, wide = (image_bytes("resnet50", "unfused", itemsize=itemsize) for itemsize in (2, 4))
    assert wide["norm"] == 2 * narrow["norm"]
    assert narrow["pool"] < wide["pool"] < 2 * narrow["pool"]


@pytest.mark.parametrize("model", MODELS)
def test_every_norm_has_one_role(model):
    found = sizes(model)
    norms = sum(layer.activations for layer in layers(model) if layer.kind == "norm")
    assert found.relu + found.add + found.plain == norms


def test_blocks_of_a_resnet():
    found = sizes("resnet50")
    # 16 blocks: 3 x 256 x 56^2, 4 x 512 x 28^2, 6 x 1024 x 14^2, 3 x 2048 x 7^2; shortcuts at the first of each stage
    assert found.add == 3 * 256 * 56**2 + 4 * 512 * 28**2 + 6 * 1024 * 14**2 + 3 * 2048 * 7**2
    assert found.plain == 256 * 56**2 + 512 * 28**2 + 1024 * 14**2 + 2048 * 7**2
    # block inputs: the pool's output, then every block's output but the last
    assert found.joins == found.pool_out + found.add - 2048 * 7**2


def test_weights_and_update_count_once_a_step():
    parameters = sum(spec.numel for spec in tensors("resnet50"))
    per_image = image_bytes("resnet50", "norm")["total"]
    assert step_bytes("resnet50", "norm", 16) - 16 * per_image == 30 * parameters
    assert step_bytes("resnet50", "norm", 32) - step_bytes("resnet50", "norm", 16) == 16 * per_image


def test_an_unknown_rung_is_named():
    with pytest.raises(ValueError, match="unknown rung 'all'"):
        image_bytes("resnet50", "all")
