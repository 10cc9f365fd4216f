"""The replayed backward: gradients come in the recorded order and not before their time."""

import time

import torch

from benchmarks.replay import ReplayModel, recorded_ready
from hyperbatch.arena import Arena
from hyperbatch.plan.inventory import tensors
from hyperbatch.plan.types import TensorSpec


def test_gradients_come_in_order_and_not_before_their_time():
    specs = [TensorSpec(name=f"block.{i}", shape=(3, i + 1)) for i in range(4)]
    model = ReplayModel(specs, [0.1, 0.2, 0.6, 1.0], backward_s=0.1)
    assert model.order() == ["block/0", "block/1", "block/2", "block/3"]
    arena = Arena(model, model.order())
    came = []
    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(lambda _, name=name: came.append((name, time.perf_counter())))
    model.replay()
    assert [name for name, _ in came] == model.order()
    for (_, moment), ready in zip(came, (0.1, 0.2, 0.6, 1.0)):
        assert moment - model.start_s >= ready * model.backward_s
    assert all(torch.equal(slot.param.grad, torch.zeros(slot.param.shape)) for slot in arena.slots)


def test_the_recording_covers_resnet50_in_order():
    ready = recorded_ready()
    assert set(ready) == {spec.name for spec in tensors("resnet50")}
    assert all(0 <= moment <= 1 for moment in ready.values())
    assert list(ready)[:2] == ["fc.bias", "fc.weight"]
    assert list(ready)[-1] == "conv1.weight"
