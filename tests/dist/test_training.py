"""Whole runs on several real processes: exactness over world sizes, determinism, resume, evaluation."""

import contextlib
import io
import json
import os
import re
import signal
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from harness import run_ranks
from torch import nn
from toy import config, files, flat_weights, normed, same_bits

from hyperbatch import checkpoint
from hyperbatch.arena import Arena
from hyperbatch.cli import main
from hyperbatch.comm import GridComm
from hyperbatch.config import BatchPhase, CommConfig
from hyperbatch.data.batch import Batch
from hyperbatch.engine import loop
from hyperbatch.engine.evaluate import Evaluator
from hyperbatch.engine.journal import of_all_ranks
from hyperbatch.engine.loop import run
from hyperbatch.engine.measure import choose_plan
from hyperbatch.engine.ranks import Ranks, errors_shared, join, share
from hyperbatch.engine.snapshot import gather_rows
from hyperbatch.errors import InputError, RunFailed
from hyperbatch.models.norm import merge_rows
from hyperbatch.plan.types import RankGrid
from hyperbatch.record import RunRecord, read_metrics


def ranks_here():
    if not dist.is_initialized():
        return Ranks()
    rank, size = dist.get_rank(), dist.get_world_size()
    return Ranks(rank=rank, world_size=size, local_rank=rank, local_size=size, launcher="test")


def train_rank(rank, values, own=()):
    """own: (name, a value for each rank)."""
    return run(config(**values, **{name: each[rank] for name, each in own}), ranks_here()).to_dict()


def train(world_size, out, **values):
    """One run; returns rank 0's record and the weights it saved."""
    values = {"out": str(out), **values}
    if world_size == 1:
        torch.set_num_threads(1)
        record = train_rank(0, values)
    else:
        record = run_ranks(world_size, train_rank, values, timeout_s=120)[0]
    return record, flat_weights(out)


@pytest.mark.parametrize("algorithm", ["flat", "torus"])
def test_world_sizes_agree_with_one_process_in_float64(tmp_path, algorithm):
    """The same global batch on 1, 2, 3 and 4 ranks: equal to rounding after 20 steps."""
    values = {"precision": "fp64", "max_steps": 20, "epochs": 8.0, "algorithm": algorithm}
    _, alone = train(1, tmp_path / "1", **values)
    for world_size, grid in ((2, "2x1"), (3, "1x3"), (4, "2x2")):
        _, together = train(world_size, tmp_path / str(world_size), grid=grid, **values)
        for name, tensor in alone.items():
            assert tensor.dtype == torch.float64
            assert (tensor - together[name]).abs().max() <= 1e-10, (world_size, name)


def test_accumulation_equals_one_large_batch(tmp_path):
    values = {"precision": "fp64", "max_steps": 8}
    _, whole = train(1, tmp_path / "1", **values)
    record, parts = train(1, tmp_path / "2", accumulate=4, **values)
    assert record["phases"][0]["accumulation"] == 4
    assert record["phases"][0]["batch_per_rank"] == 6
    assert all((whole[name] - parts[name]).abs().max() <= 1e-12 for name in whole)


def test_accumulation_is_chosen_when_the_batch_does_not_fit(tmp_path, monkeypatch):
    """With memory for fewer samples than the per-rank batch, the fewest micro-steps that fit are taken."""
    record, whole = train(1, tmp_path / "1", precision="fp64", max_steps=4)
    assert record["phases"][0]["accumulation"] == 1
    monkeypatch.setattr("hyperbatch.engine.learner.fitting_batch", lambda *_: 7)
    record, parts = train(1, tmp_path / "2", precision="fp64", max_steps=4)
    assert (record["phases"][0]["accumulation"], record["phases"][0]["batch_per_rank"]) == (4, 6)
    assert all((whole[name] - parts[name]).abs().max() <= 1e-12 for name in whole)


@pytest.mark.parametrize("world_size", [1, 2])
def test_unequal_micro_steps_equal_one_large_batch(tmp_path, world_size):
    """A prime share: 22 samples a rank become 8 + 7 + 7, and 11 become 4 + 4 + 3. A resume cuts as before."""
    phases = (BatchPhase(0, 22), BatchPhase(1, 46))
    values = {"precision": "fp64", "max_steps": 14, "batch_phases": phases}
    _, whole = train(1, tmp_path / "whole", **values)
    record, unequal = train(world_size, tmp_path / "unequal", accumulate=3, **values)
    assert [phase["batch_per_rank"] for phase in record["phases"]] == ([8, 16] if world_size == 1 else [4, 8])
    assert all((whole[name] - unequal[name]).abs().max() <= 1e-12 for name in whole)
    train(world_size, tmp_path / "parts", accumulate=3, **{**values, "max_steps": 6})
    _, resumed = train(world_size, tmp_path / "parts", accumulate=3, resume=True, **values)
    assert same_bits(unequal, resumed)
    losses = [loss for _, loss, _ in metrics(tmp_path / "unequal") if loss is not None]
    assert losses == pytest.approx([loss for _, loss, _ in metrics(tmp_path / "whole") if loss is not None], rel=1e-12)


def test_optimal_groups_are_measured_once_and_kept(tmp_path):
    first, _ = train(2, tmp_path, grouping="optimal", max_steps=3)
    resumed, _ = train(2, tmp_path, grouping="optimal", max_steps=6, resume=True)
    assert first["plan"]["strategy"] == "optimal"
    assert resumed["plan"] == first["plan"]


def test_measuring_groups_leaves_no_trace():
    """Statistics, gradients and random numbers are as if nothing had been measured."""
    torch.manual_seed(0)
    model = normed(4, 1).double()
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64)
    arena = Arena(model, [name for name, _ in model.named_parameters()][::-1], dtype=torch.float64, copy_on_ready=False)
    arena.zero_grad()

    def everything():
        return [tensor.clone() for tensor in (*model.buffers(), *arena.flat_weights(), torch.get_rng_state())]

    before = everything()
    plan = choose_plan(CommConfig(grouping="optimal"), arena, model, images, GridComm(RankGrid(1, 1)))
    assert plan.strategy == "optimal"
    assert all(torch.equal(a, b) for a, b in zip(before, everything(), strict=True))
    assert all(slot.param.grad is None for slot in arena.slots)


def test_init_from_starts_where_the_other_run_ended(tmp_path):
    _, weights = train(1, tmp_path / "first", max_steps=5)
    train(2, tmp_path / "second", init_from=str(tmp_path / "first"), max_steps=1, lr=1e-12)
    started = flat_weights(tmp_path / "second")
    names = [name for name in weights if not name.startswith("optimizer.")]
    assert all(torch.allclose(weights[name], started[name], atol=1e-9) for name in names)


def test_weights_that_do_not_fit_are_named(tmp_path):
    train(1, tmp_path / "first", max_steps=1)
    with pytest.raises(InputError, match=r"do not fit the model: .*missing"):
        train(1, tmp_path / "second", init_from=str(tmp_path / "first"), model="toy:normed")


def test_torn_checkpoint_falls_back_to_the_one_before(tmp_path):
    train(1, tmp_path, max_steps=4, checkpoint_every_epochs=0.2)
    newest = max((tmp_path / "checkpoints").glob("*.pt"))
    newest.write_bytes(newest.read_bytes()[: newest.stat().st_size // 2])
    record, _ = train(1, tmp_path, max_steps=6, resume=True)
    assert record["result"]["steps"] == 6
    assert any("cannot be read" in warning for warning in record["warnings"])


def test_a_checkpoint_of_an_older_version_can_be_used(tmp_path, capsys):
    """With fields that are gone and without those that came later it is continued, evaluated, exported and reported."""
    run, whole = tmp_path / "run", tmp_path / "whole"
    train(1, whole)
    train(1, run, max_steps=7, final_eval=False)
    path = run / "checkpoints" / "step-00000007.pt"
    values = torch.load(path, weights_only=True)
    values["config"]["schedule"]["lr_follows_phases"] = True
    values["fixed"]["grid"] = "1x1"
    del values["config"]["data"]["cache_bytes"], values["fixed"]["decoder"], values["clock"]["capture_s"]
    del values["mean"], values["std"], values["whole"]
    del values["checksums"], values["progress"]["best_step"], values["config"]["run"]["keep_best"]
    torch.save(values, path)
    record = json.loads((run / "record.json").read_text())
    record["config"] = values["config"]
    (run / "record.json").write_text(json.dumps(record))

    assert main(["eval", str(run), "--device", "cpu", "--trust-code"]) == 0
    assert main(["export", str(run)]) == 0
    assert main(["report", str(run)]) == 0
    weights = checkpoint.load_weights(run / "model.safetensors").tensors
    assert same_bits(weights, checkpoint.load_weights(path).tensors)
    _, resumed = train(1, run, resume=True)
    assert same_bits(resumed, flat_weights(whole))
    assert metrics(run) == metrics(whole)


def test_a_resume_that_is_past_its_limit_trains_no_further(tmp_path):
    _, weights = train(1, tmp_path, max_steps=4)
    (tmp_path / "record.json").unlink()  # as after a run that was killed
    record, same = train(1, tmp_path, max_steps=3, resume=True)
    assert record["result"]["steps"] == 4
    assert not record["error"]
    assert same_bits(weights, same)


def test_diverged_run_stops_with_a_reason(tmp_path):
    values = {"optimizer": "sgd", "lr": 1e30, "warmup_epochs": 0.0}
    with pytest.raises(RunFailed, match="the loss became"):
        train(1, tmp_path / "seldom", **values)
    with pytest.raises(RunFailed, match="was inf or nan after step"):  # the weights are lost before a loss is
        train(1, tmp_path / "often", checkpoint_every_epochs=0.05, **values)
    record = RunRecord.load(tmp_path / "often")
    assert "was inf or nan after step" in record.error
    assert not record.result.reached
    lost_at = int(re.search(r"after step (\d+)", record.error)[1])
    assert checkpoint.load(tmp_path / "often").progress.step < lost_at  # a lost step is not saved


def diverges_between_two_lines(rank, values):
    """The loss of step 4 is not finite on the last rank, and only steps 1, 8, 15 ... are logged."""
    train_stride = loop.train_stride

    def lost(runner, stride, *rest):
        losses = train_stride(runner, stride, *rest)
        return losses * torch.nan if stride[0].index == 3 and rank == dist.get_world_size() - 1 else losses

    loop.train_stride = lost
    with pytest.raises(RunFailed, match="the loss became nan at step 4 "):
        run(config(**values), ranks_here())


def test_a_step_that_is_not_logged_is_looked_at_before_it_is_saved(tmp_path):
    values = {"log_every_steps": 7, "checkpoint_every_epochs": 0.1, "keep_checkpoints": 10, "out": str(tmp_path)}
    run_ranks(2, diverges_between_two_lines, values)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step-{step:08d}.pt" for step in (1, 2, 3)
    ]


def test_every_line_has_the_loss_of_its_step(tmp_path):
    train(1, tmp_path / "all", max_steps=20)
    train(1, tmp_path / "some", max_steps=20, log_every_steps=3)
    lines = dict(line[:2] for line in metrics(tmp_path / "all") if line[1] is not None)
    some = [line[:2] for line in metrics(tmp_path / "some") if line[1] is not None]
    assert some == [(step, lines[step]) for step in range(1, 20, 3)]


def draws(rank, values):
    """What dropout would draw at each step."""
    micro_step, drawn = loop.micro_step, []

    def note(*args):
        with torch.random.fork_rng(devices=[]):
            drawn.append(torch.rand(1).item())
        return micro_step(*args)

    loop.micro_step = note
    run(config(**values), ranks_here())
    return drawn


def test_dropout_differs_between_steps_and_ranks(tmp_path):
    drawn = run_ranks(2, draws, {"out": str(tmp_path), "max_steps": 4})
    assert len({value for rank in drawn for value in rank}) == 8


def evaluates(rank):
    """A network that answers with the channel that is brightest, in units of its statistics: they differ by rank."""
    model = nn.Sequential(nn.BatchNorm2d(2, affine=False), nn.Flatten())
    sign = 1.0 if rank == 0 else -1.0
    model[0].running_mean.copy_(torch.tensor([-10.0 * sign, 10.0 * sign]))
    images = torch.tensor([0.0, 0.5]).reshape(1, 2, 1, 1).expand(4, 2, 1, 1)
    evaluator = Evaluator(model, torch.device("cpu"), group=dist.group.WORLD)
    found = evaluator.evaluate([Batch(images, torch.ones(4, dtype=torch.int64))])
    assert model[0].running_mean[0] == -10.0 * sign, "training goes on with its own"
    return found.top1, found.samples


def test_evaluation_merges_batch_norm_statistics():
    """With the merged ones every answer is right, with each rank's own only rank 1's."""
    assert run_ranks(2, evaluates) == [(1.0, 8), (1.0, 8)]


class OwnNorm(nn.Module):
    """A norm that is none of torch's, and a mean that has no variance."""

    def __init__(self, rank):
        super().__init__()
        self.register_buffer("running_mean", torch.full((1, 2, 1, 1), 2.0 * rank))
        self.register_buffer("running_var", torch.ones(1, 2, 1, 1))
        self.register_buffer("center", torch.tensor([rank, -rank]).float())

    def forward(self, images):
        normed = (images - self.running_mean) * self.running_var.rsqrt()
        return normed.flatten(1) - self.center


def evaluates_as_saved(rank):
    evaluator = Evaluator(OwnNorm(rank), torch.device("cpu"), group=dist.group.WORLD)
    return evaluator.evaluate([Batch(torch.tensor([[[[3.0]], [[1.0]]]]), torch.tensor([0]))]).val_loss


def test_evaluation_uses_the_buffers_that_a_checkpoint_would():
    """Statistics of any norm are merged; other buffers are those of rank 0."""
    model = OwnNorm(0)
    rows = {name: torch.stack([buffer, OwnNorm(1).get_buffer(name)]) for name, buffer in model.named_buffers()}
    model.load_state_dict(merge_rows(rows))
    logits = model(torch.tensor([[[[3.0]], [[1.0]]]]))
    expect = nn.functional.cross_entropy(logits, torch.tensor([0])).item()
    assert run_ranks(2, evaluates_as_saved) == pytest.approx([expect, expect])


def in_a_group_for_gpus_alone(rank, folder):
    """As a caller opens it with plain "nccl": no tensor of the host travels there. Gloo plays NCCL."""
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("cuda:gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ranks = ranks_here()
    with join(ranks, "cpu", 30.0):
        model = nn.BatchNorm1d(3)
        model.running_mean.fill_(float(rank))
        buffers = gather_rows(dict(model.named_buffers()), ranks)
        shared = share(f"of rank {rank}", ranks)
        lines = of_all_ranks([f"line {rank}"], ranks)
        with pytest.raises(InputError, match="rank 1: wrong"), errors_shared(ranks):  # noqa: PT012
            if rank == 1:
                raise InputError("wrong")
    return shared, lines, buffers["running_mean"].tolist()


def test_a_group_for_gpus_alone_has_a_way_for_the_host(tmp_path):
    first, second = run_ranks(2, in_a_group_for_gpus_alone, str(tmp_path))
    assert first == ("of rank 0", ["line 0", "line 1"], [[0.0] * 3, [1.0] * 3])
    assert second[:2] == first[:2]


@pytest.mark.parametrize("model", ["toy:plain", "toy:normed"])
def test_same_seed_same_bits(tmp_path, model):
    _, first = train(2, tmp_path / "a", model=model)
    _, second = train(2, tmp_path / "b", model=model)
    _, other = train(2, tmp_path / "c", model=model, seed=1)
    assert same_bits(first, second)
    assert not same_bits(first, other)


@pytest.mark.parametrize(("model", "stop"), [("toy:plain", 13), ("toy:normed", 13), ("toy:normed", 20)])
def test_stop_and_resume_equals_no_stop(tmp_path, model, stop):
    """Bit for bit: weights, momentum, batch-norm statistics of each rank, and the metric lines. Step 20 is where the
    batch changes."""
    whole, unbroken = train(2, tmp_path / "whole", model=model)
    train(2, tmp_path / "parts", model=model, max_steps=stop, final_eval=False)
    record, resumed = train(2, tmp_path / "parts", model=model, resume=True)
    assert same_bits(unbroken, resumed)
    assert record["result"]["steps"] == whole["result"]["steps"]
    assert record["result"]["top1"] == whole["result"]["top1"]

    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def metrics(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line.get("loss"), line.get("top1")) for line in lines]


def train_and_die(rank, values):
    """The run is killed right after its second checkpoint is on disk."""
    save, saved = checkpoint.save, []

    def save_then_die(*args, **options):
        save(*args, **options)
        saved.append(1)
        if len(saved) == 2:
            os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.save = save_then_die
    run(config(**values), ranks_here())


def test_killed_and_resumed_equals_no_stop(tmp_path):
    whole, unbroken = train(1, tmp_path / "whole")
    values = {"out": str(tmp_path / "parts")}
    run_ranks(1, train_and_die, values, may_die=[0])
    record, resumed = train(1, tmp_path / "parts", resume=True)
    assert same_bits(unbroken, resumed)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
    assert record["phases"] == whole["phases"]


def test_resuming_what_is_over_changes_nothing(tmp_path):
    first, weights = train(1, tmp_path, max_steps=6)
    before = (tmp_path / "record.json").read_bytes()
    again, same = train(1, tmp_path, max_steps=5, resume=True)
    assert again["result"]["steps"] == first["result"]["steps"] == 6
    assert same_bits(weights, same)
    assert (tmp_path / "record.json").read_bytes() == before


def train_on_a_disk_of_its_own(rank, folder, values):
    (folder / f"host{rank}").mkdir(exist_ok=True)
    os.chdir(folder / f"host{rank}")
    return train_rank(rank, values)["result"]["steps"]


def test_hosts_that_do_not_see_the_folder_of_rank_0_resume_it_too(tmp_path):
    """Rank 0 alone knows that the run is over, and the others must not wait for it in the next exchange."""
    values = {"out": "run", "resume": "auto"}
    for steps in (2, 4, 4):
        values["max_steps"] = steps
        assert run_ranks(2, train_on_a_disk_of_its_own, tmp_path, values) == [steps, steps]
    assert [path.name for path in tmp_path.glob("*/run")] == ["run"]


@pytest.mark.parametrize("optimizer", ["lamb", "adamw", "sgd"])
def test_other_update_rules_train_and_resume(tmp_path, optimizer):
    values = {"optimizer": optimizer, "lr": 0.02}
    record, unbroken = train(1, tmp_path / "whole", **values)
    train(1, tmp_path / "parts", max_steps=7, **values)
    _, resumed = train(1, tmp_path / "parts", resume=True, **values)
    assert same_bits(unbroken, resumed)
    assert bool(record["trust_ratios"]) == (optimizer == "lamb")


def test_a_mistake_on_one_rank_is_told_on_all(tmp_path):
    with pytest.raises(AssertionError, match="rank 1: the data is not on this host") as failed:
        run_ranks(2, train_rank, {"out": str(tmp_path), "dataset": "toy:data_on_rank_0"})
    assert str(failed.value).count("InputError: rank 1: the data is not on this host") == 2


def test_a_host_whose_data_is_not_complete_is_told_on_all_ranks(tmp_path):
    """Each rank takes its part of one order of all samples; with other numbers they would also end at other steps."""
    with pytest.raises(AssertionError, match="InputError: the data set differs between ranks: rank 0 has") as failed:
        run_ranks(2, train_rank, {"out": str(tmp_path), "dataset": "toy:data_without_a_sample_on_rank_1"})
    said = "'239 train samples (ArraySource, "
    assert str(failed.value).count(said) == 2, "on both ranks"


@pytest.mark.parametrize(
    ("name", "values"), [("seed", (3, 4)), ("log_every_steps", (1, 2)), ("label_smoothing", (0.1, 0.2))]
)
def test_a_host_that_was_started_with_another_command_is_told_on_all_ranks(tmp_path, name, values):
    """With another seed ranks would train on samples twice and on others never; with other steps they would wait for
    each other, or gloo would abort."""
    with pytest.raises(AssertionError, match="InputError: the config differs between ranks") as failed:
        run_ranks(2, train_rank, {"out": str(tmp_path / "run")}, [(name, values)])
    line = f"rank 0 has '{name} {values[0]}', rank 1 has '{name} {values[1]}'; start the same command on every host"
    assert str(failed.value).count(line) == 2, "on both ranks"
    assert not (tmp_path / "run").exists()


def test_hosts_may_have_their_own_places(tmp_path):
    """Rank 0 alone writes to the folder."""
    own = [("out", (str(tmp_path / "run"), "/no/such/folder")), ("data_threads", (1, 2))]
    records = run_ranks(2, train_rank, {"max_steps": 2}, own)
    assert [record["result"]["steps"] for record in records] == [2, 2]


def test_resume_on_another_world_size(tmp_path):
    """Nothing is lost or repeated: in float64 without batch norm the end equals the unbroken run's to rounding."""
    _, unbroken = train(1, tmp_path / "whole", precision="fp64")
    train(3, tmp_path / "parts", precision="fp64", max_steps=9)
    _, resumed = train(2, tmp_path / "parts", precision="fp64", resume=True)
    assert all((unbroken[name] - resumed[name]).abs().max() <= 1e-10 for name in unbroken)


def test_batch_norm_is_kept_per_rank_and_merged_when_the_world_changes(tmp_path):
    _, saved = train(2, tmp_path / "run", model="toy:normed", max_steps=5)
    means = saved["norm.1.running_mean"]
    assert means.shape == (2, 8)
    assert not torch.equal(means[0], means[1])
    _, after = train(1, tmp_path / "run", model="toy:normed", resume=True, bn_momentum=0.1, max_steps=6)
    assert after["norm.1.running_mean"].shape == (1, 8)
    assert after["norm.1.num_batches_tracked"].item() == 6


def test_record_proves_groups_batch_change_and_trust_ratios(tmp_path):
    record, _ = train(2, tmp_path / "run")
    again = RunRecord.load(tmp_path / "run").to_dict()
    assert again["plan"] == json.loads(json.dumps(record["plan"]))
    assert len(record["plan"]["groups"]) >= 2
    assert [phase["global_batch"] for phase in record["phases"]] == [24, 48]
    assert record["phases"][1]["first_step"] == 20
    ratios = record["trust_ratios"]
    assert ratios
    assert all(ratio > 0 and ratio != 1 for ratio in ratios.values())
    batches = [
        json.loads(line)["global_batch"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        if '"event":"step"' in line.replace(" ", "")
    ]
    assert sorted(set(batches)) == [24, 48]


def test_the_trace_holds_every_rank_its_evaluations_and_checkpoints(tmp_path):
    record, _ = train(3, tmp_path / "run", max_steps=12, eval_every_epochs=0.5, batch_phases=(BatchPhase(0, 48),))
    events = json.loads((tmp_path / "run" / "trace.json").read_text())["traceEvents"]
    names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert sorted(names.values()) == ["rank 0", "rank 1", "rank 2"]
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line["step"] for line in lines if line["event"] == "eval"]
    assert evaluated
    for pid in names:
        spans = [event for event in events if event["ph"] == "X" and event["pid"] == pid]
        steps = [span["args"]["step"] for span in spans if span["name"] == "forward"]
        assert steps == list(range(1, 13))
        assert [span["args"]["step"] for span in spans if span["name"] == "evaluation"] == evaluated
        saved = [span["args"]["step"] for span in spans if span["name"] == "checkpoint"]
        assert 12 in saved
        written = [span["args"]["step"] for span in spans if span["name"] == "write"]
        assert written == (saved if names[pid] == "rank 0" else []), "one rank writes the file"
        engine = sorted((span["ts"], span["dur"]) for span in spans if span["name"] in ("forward", "evaluation"))
        assert all(start + length <= after + 1 for (start, length), (after, _) in pairwise(engine))
    assert [row["rank"] for row in record["ranks"]] == [0, 1, 2]
    for row in record["ranks"]:
        assert row["memory_peak_bytes"] > 1e7
        own = row["data_wait_s"] + row["forward_s"] + row["backward_s"] + row["update_s"]
        assert 0 < own <= row["step_s"] * 1.001
    assert record["data"]["train_samples"] > 0
    assert record["data"]["eval_samples"] == 50
    assert record["environment"]["date"]


def test_trust_ratios_are_written_over_time(tmp_path):
    record, _ = train(2, tmp_path / "run", max_steps=10)
    lines = read_metrics(tmp_path / "run", "layers.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 11))
    last = {name: float(f"{ratio:.4g}") for name, ratio in record["trust_ratios"].items()}
    assert lines[-1]["trust_ratios"] == last != {}
    assert lines[0]["trust_ratios"] != last
    train(2, tmp_path / "none", max_steps=4, optimizer="sgd")
    assert read_metrics(tmp_path / "none", "layers.jsonl") == []


def test_training_learns(tmp_path):
    record, _ = train(2, tmp_path / "run", target_top1=0.9, epochs=10.0)
    assert record["result"]["reached"]
    assert record["result"]["time_to_target_s"] > 0


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_evaluation_counts_each_sample_once(tmp_path, world_size):
    """50 validation images in batches of 7: neither divides by any of the world sizes but 1, 2 and 5."""
    phases = (BatchPhase(0, 60),)
    train(world_size, tmp_path, batch_phases=phases, max_steps=2, eval_every_epochs=0.25, eval_batch_per_rank=7)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    evals = [line for line in lines if line["event"] == "eval"]
    assert [line["samples"] for line in evals] == [50, 50]
    assert all((line["top1"] * 50).is_integer() for line in evals)


def train_aloud(rank, values):
    with contextlib.redirect_stderr(io.StringIO()) as said:
        record = train_rank(rank, values)
    return record, said.getvalue()


@pytest.mark.parametrize("world_size", [1, 2])
def test_unreadable_images_of_every_rank_are_reported_once(tmp_path, capsys, world_size):
    """Every image comes up in the two epochs, and the validation set is gone through twice."""
    values = {"dataset": "toy:files", "augment": "random_resized_crop", "epochs": 2.0, "decoder": "pillow"}
    values |= {"out": str(tmp_path), "batch_phases": (BatchPhase(0, 24),)}
    (record, _), *_ = answers = run_ranks(world_size, train_aloud, values)
    train_set, eval_set = files(None)
    bad = len(train_set.bad + eval_set.bad)
    said = "".join(text for _, text in answers)
    assert said.count(f"warning: {bad} images could not be read, the first: ") == 1
    warnings = [line for line in record["warnings"] if "not a readable image" in line]
    assert sorted(warnings) == sorted(f"{name}: not a readable image" for name in train_set.bad + eval_set.bad)

    assert main(["eval", str(tmp_path), "--device", "cpu", "--trust-code"]) == 0
    assert (
        "5 images were unreadable and evaluated as black, the first: val[0]: not a readable image"
        in capsys.readouterr().out
    )
    assert main(["eval", str(tmp_path), "--device", "cpu", "--trust-code", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)["warnings"]
    assert told == [f"{name}: not a readable image" for name in eval_set.bad]


def test_too_many_unreadable_images_are_told_in_one_line(tmp_path):
    values = {"dataset": "toy:files", "augment": "random_resized_crop", "max_bad_samples": 3}
    with pytest.raises(RunFailed, match="unreadable training samples on rank 0, the last train"):
        train(1, tmp_path, **values)
