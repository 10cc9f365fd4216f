"""The config sections that say how a run is executed: gradient exchange, and the run itself."""

from __future__ import annotations

from dataclasses import dataclass

from hyperbatch.config.option import NOT_NEGATIVE, POSITIVE, SHARE, option
from hyperbatch.vocabulary import (
    ALGORITHMS,
    GROUP_BASE,
    GROUP_COUNT,
    GROUP_THRESHOLD_BYTES,
    HYBRID_SWITCH_BYTES,
    STRATEGIES,
    TRACKERS,
    TTA,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CommConfig:
    """How gradients are grouped and exchanged between ranks."""

    grid: str | None = option(
        None, "Grid of the ranks, as ROWSxCOLUMNS; a row is one node. By default, hosts x ranks per host.", free=True
    )
    algorithm: str = option("flat", "Algorithm of the all-reduce.", ALGORITHMS)
    hybrid_switch_bytes: int = option(
        HYBRID_SWITCH_BYTES,
        "Largest message that the hybrid all-reduce sends hierarchically; larger ones are sent flat.",
        NOT_NEGATIVE,
        needs=("algorithm", "hybrid"),
    )
    wire_dtype: str | None = option(
        None,
        "Precision in which gradients are sent. By default, the precision they are computed in.",
        ("fp16", "bf16", "fp32"),
    )
    grouping: str = option("cubic", "Strategy that groups gradients for the all-reduce.", STRATEGIES)
    group_count: int = option(
        GROUP_COUNT, "Number of groups with `--grouping equal`.", POSITIVE, needs=("grouping", "equal")
    )
    group_threshold_bytes: int = option(
        GROUP_THRESHOLD_BYTES,
        "Fusion threshold in bytes with `--grouping threshold`.",
        POSITIVE,
        needs=("grouping", "threshold"),
    )
    group_base: int = option(
        GROUP_BASE,
        "Number of tensors in the first group with `--grouping cubic`, whose boundaries are at base * k^3.",
        POSITIVE,
        needs=("grouping", "cubic"),
    )
    plan: str | None = option(
        None,
        "Take the gradient groups from this file, written by `hyperbatch plan --output`, instead of --grouping.",
        free=True,
    )
    sharded_update: bool = option(
        False, "Let each rank update only its shard of the weights, and gather them afterwards (Google)."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """The target, evaluations, checkpoints, processes and everything else about one run."""

    target_top1: float | None = option(
        None, "Target accuracy (top-1), in (0, 1]. By default, the run trains all epochs."
    )
    stop_at_target: bool = option(True, "Stop at the first evaluation that reaches the target.", free=True)
    patience_evals: int = option(
        0,
        "Stop after this many evaluations in a row without a better accuracy. 0 never stops early.",
        NOT_NEGATIVE,
        free=True,
    )
    eval_every_epochs: float = option(4.0, "Epochs between evaluations.", POSITIVE)
    final_eval: bool = option(True, "Evaluate after the last step, even if --max-steps ends the run.", free=True)
    eval_offset_epochs: float = option(0.0, "Shift of the evaluations in epochs (MLPerf: 0 to 3).", NOT_NEGATIVE)
    eval_batch_per_rank: int = option(
        0,
        "Samples per rank in each evaluation step. 0 uses at most the training batch, or on a GPU as many pixels "
        "as 2,500 images of 32 px if that is more.",
        NOT_NEGATIVE,
        free=True,
    )
    tta: str = option("none", "Test-time augmentation: the views of each image that evaluation averages over.", TTA)
    tta_share: float = option(
        1.0,
        "Share of each batch that gets more than one view: the least certain images.",
        SHARE,
        needs=("tta", "mirror", "mirror_shift"),
    )
    seed: int = option(0, "Seed of the initial weights, the sample order and the augmentation.", NOT_NEGATIVE)
    deterministic: bool = option(
        False, "Use bit-exact kernels on GPUs. Runs on the same CPU with as many threads are always bit-exact."
    )
    device: str = option("auto", "Where to run.", ("auto", "cpu", "cuda"), free=True)
    graph: str = option(
        "auto",
        "Capture whole steps in CUDA graphs. auto does so on a GPU if the step can be captured.",
        ("auto", "on", "off"),
        free=True,
    )
    steps_per_launch: int = option(
        0,
        "Steps per launch of a CUDA graph. 0 chooses several if steps are short, otherwise 1.",
        NOT_NEGATIVE,
        free=True,
    )
    nproc: int = option(
        0, "Number of processes on this host. 0 starts one per GPU, or two on a CPU.", NOT_NEGATIVE, free=True
    )
    accumulate: int = option(
        0, "Number of micro-steps per step. 0 uses as few as fit into memory.", NOT_NEGATIVE, free=True
    )
    max_steps: int = option(0, "Stop after this many steps. 0 runs all epochs.", NOT_NEGATIVE, free=True)
    checkpoint_every_epochs: float | None = option(
        None,
        "Epochs between checkpoints; 0 saves only at the end. By default, one is saved with each evaluation.",
        NOT_NEGATIVE,
        free=True,
    )
    checkpoint_every_steps: int = option(
        0, "Steps between additional checkpoints. 0 saves none.", NOT_NEGATIVE, free=True
    )
    checkpoint_every_minutes: float = option(
        0.0,
        "Save an additional checkpoint when this many minutes have passed since the last one. 0 saves none.",
        NOT_NEGATIVE,
        free=True,
    )
    keep_checkpoints: int = option(
        2, "Number of newest checkpoints to keep. 0 saves none at all.", NOT_NEGATIVE, free=True
    )
    keep_best: bool = option(True, "Also keep the checkpoint of the best evaluation.", free=True)
    log_every_steps: int = option(1, "Steps between two lines of metrics.", POSITIVE, free=True)
    tracker: str | None = option(
        None,
        "Also send the config and the curves to this service. By default, they are only written to --out.",
        TRACKERS,
        free=True,
    )
    max_skipped_steps: int = option(
        50,
        "Number of consecutive steps that may be skipped for inf or nan gradients. 0 sets no limit.",
        NOT_NEGATIVE,
        free=True,
    )
    max_rollbacks: int = option(
        3,
        "How many times the run may return to its newest checkpoint and continue with other samples when the "
        "loss becomes nan or jumps (see --spike-factor). With 0, nan ends the run.",
        NOT_NEGATIVE,
        free=True,
    )
    spike_factor: float = option(
        4.0,
        "A loss has jumped if it is this many times the median of the last steps and worse than guessing. 0 "
        "turns the check off.",
        NOT_NEGATIVE,
        free=True,
    )
    compare_every_steps: int | None = option(
        None,
        "Steps between comparisons of the weights and the optimizer state across ranks; 0 never compares. By "
        "default, they are compared before evaluations and checkpoints.",
        NOT_NEGATIVE,
        free=True,
    )
    timeout_s: float = option(
        300.0, "Seconds after which a rank that does not respond fails the run.", POSITIVE, free=True
    )
    out: str | None = option(None, "Folder of the run. By default, `runs/<recipe>-<time>`.", free=True, repeated=False)
    resume: str = option(
        "no",
        "Continue the run in --out from its newest checkpoint; without a value, the same as yes. auto starts a "
        "new run if there is no checkpoint, or none that is undamaged.",
        ("no", "yes", "auto"),
        free=True,
        repeated=False,
    )
    max_restarts: int = option(
        0,
        "How many times the ranks are restarted after a fault. They continue from the newest checkpoint in --out.",
        NOT_NEGATIVE,
        free=True,
    )
    preempt_signals: str | None = option(
        "TERM,USR1", "Signals that end the run with a checkpoint after the current step, or none.", free=True
    )

    def __post_init__(self) -> None:
        if isinstance(self.resume, bool):  # older records and scripts have true or false
            object.__setattr__(self, "resume", "yes" if self.resume else "no")
