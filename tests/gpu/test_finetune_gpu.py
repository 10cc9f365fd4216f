"""Runs with frozen and slower layers on a GPU: captured against plain steps, with fused kernels and without."""

from __future__ import annotations

import pytest
import torch
from test_graph_gpu import config, train

from hyperbatch import checkpoint
from hyperbatch.config import LayerRate
from hyperbatch.engine import loop
from hyperbatch.engine.ranks import Ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

STEM = (LayerRate("*", 0.5), LayerRate("conv1", 0.0), LayerRate("bn1", 0.0), LayerRate("layer1", 0.0))
HEAD_ONLY = (LayerRate("*", 0.0), LayerRate("head", 1.0))
CASES = {
    "stem, lars": {"layer_rates": STEM},
    "stem, fused": {"layer_rates": STEM, "fused": "on"},
    "stem, muon": {"layer_rates": STEM, "optimizer": "muon", "lr": 0.02},
    "stem, sgd": {"layer_rates": STEM, "optimizer": "sgd", "lr": 0.05},
    "head, lars": {"layer_rates": HEAD_ONLY},
    "head, fused": {"layer_rates": HEAD_ONLY, "fused": "on"},
    "a block between, fused": {"layer_rates": (LayerRate("layer2", 0.0),), "fused": "on"},
}


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    out = tmp_path_factory.mktemp("base")
    loop.run(config(out=str(out), classes=10), Ranks())
    return out


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_captured_steps_with_frozen_layers_equal_plain_ones(tmp_path, base, values):
    values = {"init_from": str(base), **values}
    plain = train(tmp_path / "plain", graph="off", **values)
    captured = train(tmp_path / "captured", graph="on", **values)
    before, one, other = (checkpoint.load(folder) for folder in (base, tmp_path / "plain", tmp_path / "captured"))
    assert plain[1] == captured[1]
    frozen = {layer for layer, factor in values["layer_rates"] if not factor}
    all_frozen = "*" in frozen
    for name, tensor in one.weights().items():
        assert torch.equal(tensor, other.weights()[name]), name
        layer = name.partition(".")[0]
        if layer != "fc" and (all_frozen or layer in frozen):
            assert torch.equal(tensor, before.weights()[name].to(tensor.dtype)), name
        elif "running" not in name and "num_batches" not in name:
            assert not torch.equal(tensor, before.weights()[name].to(tensor.dtype)), name
    fused = values.get("fused") == "on"
    assert plain[0].environment["fused_kernels"] == captured[0].environment["fused_kernels"] == fused
