"""A run: the learner, the data it is trained on, and its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from hyperbatch import __version__
from hyperbatch.checkpoint import Checkpoint, Progress
from hyperbatch.comm.agree import check_agreement
from hyperbatch.config import Config, fields, format_value
from hyperbatch.data.cache import gpu_cache_bytes
from hyperbatch.data.decoders import cpu_decode_share, measured_decoder
from hyperbatch.data.identity import check_same_data, sample_list
from hyperbatch.data.loader import TrainLoader
from hyperbatch.data.source import Source, open_data
from hyperbatch.engine.agent import cpu_has_bf16
from hyperbatch.engine.clock import Clock
from hyperbatch.engine.learner import Learner, build_learner
from hyperbatch.engine.ranks import Ranks, errors_shared, gather, host_group, share
from hyperbatch.engine.steptimer import StepTimer
from hyperbatch.engine.validation import Validation
from hyperbatch.recipes import recipe_notes
from hyperbatch.schedule import Phase, repeats_note, resolve_phases
from hyperbatch.vocabulary import DEVICE_PRECISIONS

# What a host may have in another place or do in its own way. Of a file it only matters here whether there is one.
OWN_FIELDS = ("data", "data_cache_gb", "data_threads", "prefetch", "cache", "cache_bytes", "out", "nproc", "tracker")
FILE_FIELDS = ("init_from", "plan")


@dataclass(kw_only=True, slots=True)
class Run:
    """One rank's training run. It trains the learner."""

    config: Config
    ranks: Ranks
    clock: Clock
    learner: Learner
    train_set: Source
    eval_set: Source
    validation: Validation
    loader: TrainLoader
    phases: tuple[Phase, ...]
    warnings: list[str]
    timer: StepTimer  # measures the steps
    progress: Progress = field(default_factory=Progress)
    waited_before_s: float = 0.0  # time spent waiting for batches in the runs that this one continues

    @property
    def epoch(self) -> float:
        """Passes over the training set so far."""
        return self.progress.position / len(self.train_set)

    @property
    def data_wait_s(self) -> float:
        """Seconds for which this rank has waited for batches, including the runs that this one continues."""
        return self.waited_before_s + self.loader.wait_s

    @property
    def reached(self) -> bool:
        return self.progress.time_to_target_s is not None

    def close(self) -> None:
        self.validation.close()
        self.learner.sync.close()
        self.loader.close()


def build_run(
    config: Config,
    ranks: Ranks,
    device: torch.device,
    *,
    clock: Clock | None = None,
    saved: Checkpoint | None = None,
    data: tuple[Source, Source] | None = None,
    stage: Callable[[str], None] = lambda text: None,
) -> Run:
    """Builds a run before its first step. saved: the checkpoint that it will continue (`snapshot.restore`).

    data: the training and validation set, if they are open already. stage: called with the name of each stage.
    """
    stage("opening the data")
    with errors_shared(ranks):
        train_set, eval_set = data or open_data(config.data)
        if saved is not None:
            check_same_data(
                saved.fixed.data, classes=saved.classes, samples=saved.train_samples, train=train_set, val=eval_set
            )
    if ranks.world_size > 1:
        check_equal_data(train_set, eval_set)
    warnings = notes(config, device, len(train_set))
    stage(f"building {config.model.model} and measuring the batch that fits")
    learner = build_learner(
        config,
        ranks,
        device,
        classes=len(train_set.classes),
        in_channels=train_set.channels,
        cache_bytes=gpu_cache_bytes(train_set, config.data, device),
        class_names=train_set.classes,
        saved=saved,
    )
    warnings += learner.notes
    phases = phases_of(config, ranks, learner, train_set)
    stage("starting the data loader")
    if saved is None:
        decoder = share(measured_decoder(train_set, config.data, device, ranks_per_host=ranks.local_size), ranks)
        cpu_share = share(cpu_decode_share(train_set, config.data, decoder, ranks_per_host=ranks.local_size), ranks)
    else:
        decoder, cpu_share = saved.fixed.decoder or config.data.decoder, saved.fixed.cpu_decode_share
    loader = TrainLoader(
        train_set,
        replace(config.data, decoder=decoder, cpu_decode_share=cpu_share),
        seed=config.run.seed,
        rank=ranks.rank,
        world_size=ranks.world_size,
        device=device,
        dtype=learner.dtype,
        ranks_per_host=ranks.local_size,
    )
    return Run(
        config=config,
        ranks=ranks,
        clock=clock or Clock(),
        learner=learner,
        train_set=train_set,
        eval_set=eval_set,
        validation=Validation(config, ranks, learner, eval_set, phases[0].batch_per_rank),
        loader=loader,
        phases=phases,
        warnings=warnings,
        timer=StepTimer(device),
    )


def check_equal_config(config: Config, ranks: Ranks, device: torch.device) -> None:
    """Raises InputError on every rank if one was started with another config, or runs on another kind of device. Such
    ranks would wait for each other, or train on samples that were drawn twice."""
    if ranks.world_size == 1:
        return
    lines = [f"hyperbatch {__version__}", f"recipe {config.recipe}", f"device {device.type}"]
    for spec in fields():
        if spec.name not in OWN_FIELDS:
            value = spec.of(config)
            is_file = spec.name in FILE_FIELDS and value is not None
            lines.append(f"{spec.name} {'of a file' if is_file else format_value(value)}")
    advice = "start the same command on every host"
    if config.run.resume != "no":
        advice += ", with an --out that all hosts share"
    check_agreement(host_group() or dist.group.WORLD, "the config", lines, advice=advice)


def check_equal_data(train: Source, val: Source) -> None:
    """Raises InputError on every rank if one sees different samples, for example because its host has an incomplete
    copy of the data set. Each rank takes its part of one order of all samples."""
    parts = [(split, sample_list(source)) for split, source in (("train", train), ("val", val))]
    lines = [f"{part.samples:,} {split} samples ({part.form}, {part.order[:12]})" for split, part in parts]
    check_agreement(host_group() or dist.group.WORLD, "the data set", lines, advice="give every host the same files")


def next_run(before: Run, config: Config, clock: Clock) -> Run:
    """Returns a further run of the learner on the same data. Fields that are not listed here are reused
    (engine/session.py)."""
    return replace(
        before,
        config=config,
        clock=clock,
        loader=replace(before.loader, seed=config.run.seed),
        phases=phases_of(config, before.ranks, before.learner, before.train_set),
        warnings=[*notes(config, before.learner.device, len(before.train_set)), *before.learner.notes],
        progress=Progress(),
        waited_before_s=0.0,
    )


def phases_of(config: Config, ranks: Ranks, learner: Learner, train_set: Source) -> tuple[Phase, ...]:
    """Returns the batch phases, divided into batches for these ranks and their memory."""
    return resolve_phases(
        config.schedule.batch_phases,
        len(train_set),
        ranks.world_size,
        accumulate=config.run.accumulate,
        max_batch_per_rank=learner.max_batch_per_rank,
    )


def at_precision(config: Config, device: torch.device, ranks: Ranks, saved: Checkpoint | None = None) -> Config:
    """Returns the config with a fixed precision if its precision depends on the device: that of the run that is
    continued, or one that suits the devices of all ranks. Every rank must call it."""
    if config.optim.precision not in DEVICE_PRECISIONS:
        return config
    if saved is not None:
        return config.override(precision=saved.config.optim.precision)
    here = config.with_precision(fast_precision(device), on_gpu=device.type == "cuda")
    found = gather(here.optim.precision, ranks)
    # If devices differ, all use the precision that all of them have: every GPU has fp16, and every CPU fp32.
    return config.override(precision=max(found, key=("bf16", "fp16", "fp32").index))


def fast_precision(device: torch.device) -> str:
    if device.type == "cuda":
        return "bf16" if torch.cuda.get_device_capability(device) >= (8, 0) else "fp16"
    return "bf16" if cpu_has_bf16() else "fp32"


def notes(config: Config, device: torch.device, train_samples: int) -> list[str]:
    """Returns notes for the user about this run before it starts."""
    found, precision = recipe_notes(config), config.optim.precision
    if repeats := repeats_note(config.schedule.batch_phases, train_samples):
        found.append(repeats)
    if device.type == "cpu" and precision in ("fp16", "bf16") and precision != (fast := fast_precision(device)):
        found.append(f"{precision} is many times slower than {fast} on this CPU; use --precision {fast} here")
    return found
