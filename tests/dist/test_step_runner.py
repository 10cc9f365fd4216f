"""Steps that are warmed up and captured give what plain steps give. Capture itself needs a GPU: here it is played."""

from __future__ import annotations

import contextlib
import functools
import sys
import types

import pytest
import torch
from harness import run_ranks
from test_training import metrics, ranks_here
from toy import config, flat_weights, same_bits

from hyperbatch.comm import sync as sync_module
from hyperbatch.config import BatchPhase, SizePhase
from hyperbatch.data.augment import size_at
from hyperbatch.engine import ending, loop
from hyperbatch.engine import runner as runner_module
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.loop import micro_step
from hyperbatch.engine.ranks import Ranks
from hyperbatch.engine.run import build_run
from hyperbatch.engine.runner import StepRunner
from hyperbatch.engine.step import blank_batch, micro_steps
from hyperbatch.engine.steptimer import Marks, StepTimer
from hyperbatch.engine.warmup import preserved_state
from hyperbatch.errors import InputError
from hyperbatch.kernels.compile import is_compiling
from hyperbatch.models import smoothed_cross_entropy
from hyperbatch.record import RunRecord


class Played:
    """A backend without graphs: a replay runs the function again, over the same static tensors."""

    def __init__(self) -> None:
        self.captured = self.replayed = self.released = 0
        self.fail: Exception | None = None  # what the next capture raises
        self.waits = False  # whether the model waits for the device

    def on_capture_stream(self):
        return contextlib.nullcontext()

    @contextlib.contextmanager
    def no_synchronisation(self):
        if self.waits:
            raise RuntimeError("called a synchronizing CUDA operation")
        yield

    def capture(self, run):
        if self.fail is not None:
            error, self.fail = self.fail, None
            raise error
        self.captured += 1

        def replay():
            self.replayed += 1
            run()

        return replay

    def release(self):
        self.released += 1

    def close(self):
        pass


@pytest.fixture
def played(monkeypatch):
    """Runs of this process are captured, in play."""
    torch.set_num_threads(1)
    backend = Played()
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, backend=backend, warm=True))
    return backend


def train(out, **values):
    record = loop.run(config(out=str(out), **values), Ranks())
    return record, flat_weights(out), metrics(out)


def runner_of(run, kind=StepRunner, **options):
    """As the loop makes it."""
    return kind(run.learner, micro_step, run.config, run.ranks, run.warnings, **options)


CASES = {
    "plain": {},
    "norm and dropout": {"model": "toy:normed"},
    "accumulation": {"model": "toy:normed", "accumulate": 3},
    "unequal micro-steps": {"model": "toy:normed", "accumulate": 5},
    "fp16": {"model": "toy:normed", "precision": "fp16"},
    "lamb": {"optimizer": "lamb", "lr": 0.02},
    "rescaled momentum": {"momentum_rule": "rescaled"},
    "whitening and rates per group": {
        "model": "toy:whitened",
        "precision": "fp16",
        "optimizer": "sgd",
        "whiten_samples": 100,
        "bias_lr_scale": 4.0,
        "head_lr_scale": 0.5,
        "whiten_bias_epochs": 2.0,
    },
    "resizing": {"model": "toy:pooled", "size_phases": (SizePhase(0, 8), SizePhase(1, 6), SizePhase(3, 8))},
}


@pytest.mark.parametrize("values", CASES.values(), ids=CASES)
def test_warmed_and_captured_runs_give_the_same_bits(tmp_path, monkeypatch, values):
    torch.set_num_threads(1)
    _, plain, plain_losses = train(tmp_path / "plain", **values)
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, warm=True))
    _, warmed, warmed_losses = train(tmp_path / "warmed", **values)
    assert warmed_losses == plain_losses
    assert same_bits(plain, warmed)
    backend = Played()
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, backend=backend, warm=True))
    record, captured, captured_losses = train(tmp_path / "captured", **values)
    assert captured_losses == plain_losses
    assert same_bits(plain, captured)
    assert backend.replayed == record.result.steps * values.get("accumulate", 1)
    assert record.environment["cuda_graph"]
    assert not any("CUDA graph" in line for line in record.warnings)


@pytest.mark.parametrize("steps", [5, 6, 22])
def test_trust_ratios_are_those_of_the_last_step(tmp_path, monkeypatch, steps):
    """Of either turn, and after the shape has changed."""
    plain, *_ = train(tmp_path / "plain", max_steps=steps)
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, backend=Played(), warm=True))
    captured, *_ = train(tmp_path / "captured", max_steps=steps)
    assert captured.trust_ratios == plain.trust_ratios != {}


def test_warm_up_after_a_resume_leaves_no_trace(tmp_path, monkeypatch):
    torch.set_num_threads(1)
    values = {"model": "toy:normed", "momentum_rule": "rescaled"}
    _, whole, whole_losses = train(tmp_path / "whole", **values)
    monkeypatch.setattr(loop, "StepRunner", functools.partial(StepRunner, backend=Played(), warm=True))
    train(tmp_path / "parts", max_steps=7, final_eval=False, **values)
    _, resumed, resumed_losses = train(tmp_path / "parts", resume=True, **values)
    assert same_bits(whole, resumed)
    assert resumed_losses == whole_losses


def test_all_state_is_preserved():
    """Also what no later step would show: random numbers, gradients, counts, rates."""
    torch.set_num_threads(1)
    run = build_run(config(model="toy:normed", precision="fp16"), Ranks(), torch.device("cpu"))
    images, labels = torch.randn(8, 1, 8, 8).half(), torch.arange(8) % 4

    def step():
        for part in micro_steps((8, 8)):
            micro_step(run.learner, part, images, labels, torch.zeros(()), StepTimer(run.learner.device))

    def everything():
        run.learner.arena.collect()
        tensors = [
            *run.learner.arena.flat_weights(),
            *run.learner.arena.grads.values(),
            *run.learner.model.buffers(),
            torch.get_rng_state(),
        ]
        tensors += [
            run.learner.optimizer.init_state(p)["momentum_buffer"]
            for g in run.learner.optimizer.param_groups
            for p in g["params"]
        ]
        return [tensor.clone() for tensor in tensors]

    before, scaler, groups = (
        everything(),
        run.learner.scaler.state_dict(),
        [dict(g) for g in run.learner.optimizer.param_groups],
    )
    with preserved_state(run.learner):
        for group in run.learner.optimizer.param_groups:
            group["lr"] = 0.5
        step()
        images[0] = torch.inf  # a skipped step, too: the scale and the counts change
        step()
        assert run.learner.scaler.state_dict()["skipped"] == 1
        assert not torch.equal(
            run.learner.arena.masters,
            before[list(map(id, run.learner.arena.flat_weights())).index(id(run.learner.arena.masters))],
        )
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert run.learner.scaler.state_dict() == scaler
    assert [g["lr"] for g in run.learner.optimizer.param_groups] == [g["lr"] for g in groups]
    assert run.learner.optimizer.skipped_steps.item() == 0
    assert all(slot.param.grad is None for slot in run.learner.arena.slots)
    assert run.learner.sync.timings() == ()
    run.close()


@pytest.mark.parametrize("fused", [False, True])
def test_batches_are_copied_next_to_a_channel_of_zeros(fused):
    """Where fused kernels want it, and there are three others."""
    run = build_run(config(), Ranks(), torch.device("cpu"))
    run.learner.fused = fused
    for channels in (1, 3):
        run.learner.in_channels = channels
        images, _ = blank_batch(run.learner, 2, 5)
        batch = torch.randn(2, 5, 5, channels).permute(0, 3, 1, 2)
        images.copy_(batch)
        assert torch.equal(images, batch)
        assert hasattr(images, "padded") == (fused and channels == 3)
        if fused and channels == 3:
            assert images.padded.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(images.padded, torch.nn.functional.pad(batch, (0, 0, 0, 0, 0, 1)))
        else:
            assert images.stride() == batch.stride()
    run.close()


@pytest.mark.parametrize("parts", [(8,), (8, 8, 8), (9, 8, 8)])
def test_the_total_is_the_mean_loss_of_the_step(parts):
    run = build_run(config(), Ranks(), torch.device("cpu"))
    total, labels = torch.full((), 7.0), torch.arange(9) % 4  # what the step before has left
    batches = [torch.randn(n, 1, 8, 8) for n in parts]
    smoothing = run.config.optim.label_smoothing
    losses = [
        len(x) * smoothed_cross_entropy(run.learner.model(x), labels[: len(x)], smoothing).item() for x in batches
    ]
    for part, images in zip(micro_steps(parts), batches, strict=True):
        micro_step(run.learner, part, images, labels[: len(images)], total, StepTimer(run.learner.device))
    assert total.item() == pytest.approx(sum(losses) / sum(parts), rel=1e-6)
    run.close()


@pytest.mark.parametrize("failure", [None, "no room for 3 GiB\nand more"])
def test_compiling_before_the_first_step_leaves_no_trace(tmp_path, monkeypatch, played, failure):
    """The kernels do not run then, and what the rest of the model makes of it is rubbish. It may fail, too."""
    pytest.importorskip("triton")
    values = {"model": "toy:normed", "precision": "fp16", "accumulate": 2}
    _, expected, expected_losses = train(tmp_path / "plain", **values)
    passes, evaluated = [], []

    class Rubbish(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            if is_compiling() and not x.requires_grad:
                evaluated.append(x.shape)
            return torch.full_like(x, torch.nan) if is_compiling() else x.clone()

        @staticmethod
        def backward(ctx, dy):
            if is_compiling():
                passes.append(dy.shape)
                if failure:
                    raise ValueError(failure)
            return dy

    def build_fused(*args, **options):
        run = build_run(*args, **options)
        run.learner.fused = True
        dropout = next(module for module in run.learner.model.modules() if isinstance(module, torch.nn.Dropout))
        dropout.register_forward_hook(lambda module, inputs, output: Rubbish.apply(output))
        return run

    monkeypatch.setattr(loop, "build_run", build_fused)
    record, weights, losses = train(tmp_path / "compiled", **values)
    # Kernels of both shapes are asked for, then convolutions of both tried, then evaluation's. What fails breaks off.
    assert len(passes) == (1 if failure else 4)
    assert len(evaluated) == (0 if failure else 1)
    assert losses == expected_losses
    assert same_bits(weights, expected)
    told = [line for line in record.warnings if "compiled" in line]
    assert told == (["kernels are not compiled in parallel: no room for 3 GiB"] if failure else [])


def test_state_is_preserved_when_a_step_fails():
    run = build_run(config(), Ranks(), torch.device("cpu"))
    before = [tensor.clone() for tensor in run.learner.arena.flat_weights()]
    with contextlib.suppress(ZeroDivisionError), preserved_state(run.learner):
        for tensor in run.learner.arena.flat_weights():
            tensor.zero_()
        raise ZeroDivisionError
    assert all(torch.equal(a, b) for a, b in zip(before, run.learner.arena.flat_weights(), strict=True))
    run.close()


@pytest.mark.parametrize("ahead", [1, loop.STRIDES_AHEAD])
def test_graphs_are_kept_per_shape_place_and_turn(tmp_path, played, monkeypatch, ahead):
    """24 and then 48 samples in 3 micro-steps: first, middle and last, in two turns, of two shapes."""
    monkeypatch.setattr(loop, "STRIDES_AHEAD", ahead)
    record, *_ = train(tmp_path, accumulate=3)
    assert played.captured == 2 * 3 * 2
    assert played.released == 0
    assert (record.clock["capture_s"] > 0) == (ahead == 1), "what is captured before the run's time is not booked"
    assert record.result.images_per_s == pytest.approx(record.result.epochs * 240 / record.clock["train_s"])


def test_graphs_of_unequal_micro_steps_share_inputs_of_their_shape(tmp_path, played):
    """24 samples in 5 + 5 + 5 + 5 + 4: a first, a middle and a last, in two turns; 48 in 10 + 10 + 10 + 9 + 9."""
    train(tmp_path, accumulate=5)
    assert played.captured == 2 * (3 + 4)


def test_every_shape_ahead_is_warmed_up_before_the_run(played, monkeypatch):
    sizes = (SizePhase(0, 8), SizePhase(1, 6), SizePhase(3, 8))
    run = build_run(config(model="toy:pooled", size_phases=sizes), Ranks(), torch.device("cpu"))

    def ahead():
        return [(step.phase.global_batch, size_at(run.config.data, step.epoch)) for step in loop.shapes_ahead(run)]

    def met():
        return {(step.phase.global_batch, size_at(run.config.data, step.epoch)) for step in loop.steps_left(run)}

    assert ahead() == [(24, 8), (24, 6), (48, 6), (48, 8)]
    assert set(ahead()) == met()
    runner = runner_of(run, loop.StepRunner)
    runner.warm_up(loop.shapes_ahead(run))
    warmed, steps = [], list(loop.steps_left(run))
    monkeypatch.setattr(
        runner_module, "preserved_state", lambda learner: warmed.append(learner) or contextlib.nullcontext()
    )
    for step in steps:
        if not runner.is_ready((step,)):
            runner.prepare((step,))
    assert warmed == [], "what is captured later needs no warm-up any more"
    assert played.captured == 2 * 4
    run.progress.step, run.progress.position = 20, 480  # resumed where the batch changes
    assert ahead() == [(48, 6), (48, 8)]
    assert set(ahead()) == met()
    run.config = run.config.override(max_steps=22)
    assert ahead() == [(48, 6)]
    run.close()


def test_the_same_shape_in_other_micro_steps_is_another_graph(tmp_path, played, monkeypatch):
    monkeypatch.setattr("hyperbatch.engine.learner.fitting_batch", lambda *_: 24)
    train(tmp_path, batch_phases=(BatchPhase(0, 24), BatchPhase(2, 48)))
    assert played.captured == 2 * 1 + 2 * 2, "the loss of half a step is halved inside the graph"


def test_the_batch_that_fits_is_measured_on_the_largest_images(monkeypatch):
    sides = []

    def fitting(config, model, arena, images, *_):
        sides.extend(images.shape[2:])
        return 24

    monkeypatch.setattr("hyperbatch.engine.learner.fitting_batch", fitting)
    sizes = (SizePhase(0, 6), SizePhase(1, 12), SizePhase(3, 10))
    build_run(config(model="toy:pooled", size_phases=sizes), Ranks(), torch.device("cpu")).close()
    build_run(config(model="toy:pooled", size_phases=sizes[:1]), Ranks(), torch.device("cpu")).close()
    assert sides == [12, 12, 8, 8]


@pytest.mark.parametrize("how", ["capture", "waits"])
def test_a_step_that_cannot_be_captured_runs_plain_and_says_why(tmp_path, monkeypatch, played, how):
    if how == "waits":
        played.waits, reason = True, "called a synchronizing CUDA operation"
    else:
        played.fail, reason = (
            RuntimeError("operation not permitted\nwhen stream is capturing"),
            "operation not permitted",
        )
    record, weights, found = train(tmp_path / "captured")
    assert len(record.warnings) == 1
    assert record.warnings[0].startswith(f"steps run without a CUDA graph: {reason} (in ")
    assert RunRecord.load(tmp_path / "captured").warnings == record.warnings
    assert not record.environment["cuda_graph"]
    assert played.replayed == 0
    monkeypatch.setattr(loop, "StepRunner", StepRunner)
    _, plain, plain_losses = train(tmp_path / "plain")
    assert same_bits(weights, plain)
    assert found == plain_losses


def test_a_model_that_replaces_a_buffer_is_not_captured_and_its_warm_up_leaves_no_trace(tmp_path, monkeypatch, played):
    """A replay would read the tensor that was there at the capture, and write to one that nobody reads."""
    record, weights, found = train(tmp_path / "captured", model="toy:Centred")
    (warning,) = record.warnings
    assert warning.startswith("steps run without a CUDA graph: its forward replaces the buffer mean")
    assert played.captured == 0
    monkeypatch.setattr(loop, "StepRunner", StepRunner)
    _, plain, plain_losses = train(tmp_path / "plain", model="toy:Centred")
    assert same_bits(weights, plain)
    assert found == plain_losses


def test_graph_on_makes_it_an_error():
    run = build_run(config(), Ranks(), torch.device("cpu"))
    run.config = run.config.override(graph="on")
    backend = Played()
    backend.fail = RuntimeError("operation not permitted")
    runner = runner_of(run, backend=backend)
    with pytest.raises(InputError, match="--graph on: the step cannot be captured: operation not permitted"):
        runner.prepare((next(loop.steps_left(run)),))
    run.close()
    with pytest.raises(InputError, match="--graph on: CUDA graphs need a GPU"):
        build_run(config(graph="on"), Ranks(), torch.device("cpu"))


def room_for_two(played, monkeypatch):
    """The third graph finds no memory until the first two are freed."""
    capture = played.capture

    def out_of_memory_once(run):
        if played.captured == 2 and not played.released:
            raise torch.OutOfMemoryError("no room")
        return capture(run)

    monkeypatch.setattr(played, "capture", out_of_memory_once)


def test_graphs_of_other_shapes_make_room(tmp_path, played, monkeypatch):
    """A second shape that does not fit beside the first is captured after the first has gone."""
    room_for_two(played, monkeypatch)
    monkeypatch.setattr(loop, "STRIDES_AHEAD", 1)
    record, *_ = train(tmp_path)
    assert played.released == 1
    assert played.captured == 4
    assert record.environment["cuda_graph"]
    played.fail = torch.OutOfMemoryError("no room")
    with pytest.raises(torch.OutOfMemoryError):  # nothing to make room with
        train(tmp_path / "again")


def test_a_shape_that_made_room_is_captured_again(tmp_path, played, monkeypatch):
    room_for_two(played, monkeypatch)
    values = {"model": "toy:pooled", "size_phases": SIZES, "batch_phases": (BatchPhase(0, 24),)}
    record, weights, found = train(tmp_path / "captured", **values)
    assert (played.captured, played.released) == (6, 1)
    assert played.replayed == record.result.steps
    monkeypatch.setattr(loop, "StepRunner", StepRunner)
    _, plain, plain_losses = train(tmp_path / "plain", **values)
    assert same_bits(weights, plain)
    assert found == plain_losses


def test_fused_kernels_are_used_where_they_can_run(monkeypatch):
    fused = types.ModuleType("hyperbatch.models.fused")
    seen = []
    fused.fuse = seen.append
    fused.why_not_fused = lambda model, dtype, device: None
    monkeypatch.setitem(sys.modules, "hyperbatch.models.fused", fused)
    monkeypatch.setattr("hyperbatch.models.fused", fused, raising=False)
    cpu = torch.device("cpu")
    for choice, used in (("auto", False), ("off", False), ("on", True)):  # auto does not look for a GPU's kernels here
        run = build_run(config(fused=choice), Ranks(), cpu)
        assert run.learner.fused == used
        assert seen == ([run.learner.model] if used else [])
        run.close()
    fused.why_not_fused = lambda model, dtype, device: "Triton is not installed"
    with pytest.raises(InputError, match="--fused on: Triton is not installed; use --fused auto"):
        build_run(config(fused="on"), Ranks(), cpu)


def watched(rank, folder):
    """Whether a run beats, plain or with captured collectives, and is silent afterwards."""
    events = []

    class Heart:
        def __init__(self, store, rank, world_size, *, timeout_s, on_lost, keeper, place, collective):
            assert place().phase == "start", "a rank can be asked where it is before there is a run"
            assert collective() == "", "and which collective it waits in"
            assert keeper == 0, "no agent keeps the store here"
            events.append((rank, world_size, timeout_s))
            store.set(f"heart-{rank}", "there")

        def start(self):
            events.append("start")
            return self

        def stop(self):
            events.append("stop")

    ending.Heartbeat = Heart
    loop.run(config(timeout_s=77.0, out=f"{folder}/plain"), ranks_here())
    plain = [*events]
    events.clear()
    loop.StepRunner = functools.partial(StepRunner, backend=Played(), warm=True)
    loop.run(config(timeout_s=77.0, out=f"{folder}/captured"), ranks_here())
    return plain, events


def test_ranks_are_watched_from_outside(tmp_path):
    """Captured collectives have no other watchdog, and broken ones of the others do not say who has gone."""
    beats = [[(rank, 2, 77.0), "start", "stop"] for rank in (0, 1)]
    assert run_ranks(2, watched, str(tmp_path)) == [(each, each) for each in beats]


def forgets(rank):
    run = build_run(config(), ranks_here(), torch.device("cpu"))
    with preserved_state(run.learner):
        for part in micro_steps((12,)):
            images = torch.zeros(12, 1, 8, 8)
            micro_step(
                run.learner, part, images, torch.zeros(12).long(), torch.zeros(()), StepTimer(run.learner.device)
            )
        assert run.learner.sync.timings() != ()
    run.close()
    return run.learner.sync.timings()


def test_the_exchange_forgets_the_steps_of_a_warm_up():
    assert run_ranks(2, forgets) == [(), ()]


def fails_on_one(rank):
    backend = Played()
    if rank == 1:
        backend.fail = RuntimeError("no room on this device")
    run = build_run(config(), ranks_here(), torch.device("cpu"))
    runner = runner_of(run, backend=backend, warm=True)
    runner.prepare((next(loop.steps_left(run)),))
    run.close()
    return runner.captures, run.warnings


def test_all_ranks_replay_or_none():
    for captures, warnings in run_ranks(2, fails_on_one):
        assert not captures
        assert warnings[0].startswith("steps run without a CUDA graph: rank 1: no room on this device")


class Running(Played):
    """Runs the step while it captures, as a device does, and the exchange knows that it is captured."""

    def capture(self, run):
        asked, sync_module._captured = sync_module._captured, lambda device: True
        run()
        sync_module._captured = asked
        return super().capture(run)


def captures_another_step(rank, differs):
    run = build_run(config(), ranks_here(), torch.device("cpu"))
    if rank == 1 and differs:
        run.learner.model[0].register_forward_hook(lambda module, inputs, output: output.detach())
    runner = runner_of(run, backend=Running(), warm=False)
    try:
        runner.prepare((next(loop.steps_left(run)),))
    except InputError as error:
        return str(error), run.learner.arena.pinned
    finally:
        run.close()
    return "", run.learner.arena.pinned


def test_ranks_that_captured_different_steps_are_told_before_the_first_replay():
    assert run_ranks(2, captures_another_step, False) == [("", True)] * 2
    for message, pinned in run_ranks(2, captures_another_step, True):
        assert message.startswith("0.weight, 0.bias: got a gradient on 1 of 2 ranks only (0)")
        assert not pinned


SIZES = (SizePhase(0, 8), SizePhase(1, 6), SizePhase(2, 8))


def makes_room(rank, folder):
    """Rank 1 has no room for the second shape beside the first, which returns later."""
    backend = Played()
    capture = backend.capture

    def out_of_memory_once(run):
        if rank == 1 and backend.captured == 3 and not backend.released:
            raise torch.OutOfMemoryError("no room")
        return capture(run)

    backend.capture = out_of_memory_once
    values = {"model": "toy:pooled", "size_phases": SIZES, "batch_phases": (BatchPhase(0, 24),)}
    loop.StepRunner = functools.partial(StepRunner, backend=backend, warm=True)
    record = loop.run(config(out=folder, **values), ranks_here())
    assert record.environment["cuda_graph"]
    return backend.captured, backend.released


def test_all_ranks_make_room_or_none(tmp_path):
    """Else one rank would later wait for the others to capture the shape again."""
    assert run_ranks(2, makes_room, str(tmp_path), collective_timeout_s=15) == [(2 + 2 + 2 + 2, 1), (2 + 1 + 2 + 2, 1)]


def has_no_room(rank):
    backend = Played()
    if rank == 1:
        backend.fail = torch.OutOfMemoryError("no room")
    run = build_run(config(), ranks_here(), torch.device("cpu"))
    with pytest.raises(torch.OutOfMemoryError, match="rank 1: no room"):  # nothing to make room with
        runner_of(run, backend=backend, warm=True).prepare((next(loop.steps_left(run)),))


def test_all_ranks_run_out_of_memory_or_none():
    run_ranks(2, has_no_room, collective_timeout_s=15)


def test_middle_micro_steps_are_split_like_the_others():
    names = ("data_wait", "forward", "backward", "data_wait", "micro_step", "data_wait", "forward", "backward")
    moments = (1.0, 2.0, 5.0, 5.5, 9.5, 10.0, 11.0, 14.0)
    ends = [*zip(names, moments), ("exposed_comm", 14.5), ("update", 15.0)]
    timing = Marks(0.0, tuple(ends)).timing(())
    assert (timing.forward_s, timing.backward_s) == (3.0, 9.0)
    assert timing.data_wait_s == 2.0
    assert timing.step_s == 15.0
    parts = (timing.data_wait_s, timing.forward_s, timing.backward_s, timing.exposed_comm_s, timing.update_s)
    assert sum(parts) == timing.step_s


def test_the_runs_time_counts_captures_and_training_does_not():
    clock = Clock()
    clock.load_state_dict({"init_s": 1.0, "train_s": 10.0, "eval_s": 2.0, "pause_s": 5.0})  # as before captures
    with clock.booked("capture"):
        clock._since -= 4.0
    assert 16.0 <= clock.run_s < 16.5
    assert clock.train_s == 10.0
    assert 4.0 <= clock.state_dict()["capture_s"] < 4.5
