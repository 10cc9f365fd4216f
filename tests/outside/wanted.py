"""Where our optimizers differ from what torch's and timm's tests expect, and why we want that."""

from __future__ import annotations

from dataclasses import dataclass

# Flags of torch's OptimizerInfo that are False for ours: its suite then leaves the tests of that feature out.
NOT_OFFERED = {
    "supports_sparse": "Decay and momentum touch every weight, so a sparse gradient would gain nothing and is refused.",
    "supports_complex": "Complex weights are refused: image classifiers have none, and the kernels are for real ones.",
}

# Errors that torch's suite looks for by their text -> what ours say in that case.
OUR_WORDS = {"Tensor lr must be 1-element": "lr must be one number, but is a tensor of shape"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    optimizers: tuple[str, ...]
    test: str  # its name, with shell wildcards
    message: str  # a regular expression that the error must match: another error of the same test is not wanted
    reason: str


WANTED = (
    Wanted(
        optimizers=("LARS", "Muon"),
        test="test_param_group_with_lrscheduler_goes_right_direction_*",
        message="lr is missing",
        reason="There is no default rate: a good one depends on the batch and the schedule, so none is an error.",
    ),
    Wanted(
        optimizers=("Muon",),
        test="test_step_is_noop_for_zero_grads_*",
        message="Tensor-likes are not close",
        reason="One of the settings is normalize_weights, which scales weights whatever their gradient is.",
    ),
    Wanted(
        optimizers=("Muon",),
        test="test_muon?muon?",
        message=r"tensor\(inf\) not less than or equal to tensor\(0\.7071\)",
        reason="The test trains a vector, which takes steps of momentum SGD here and of AdamW in timm's. At this rate "
        "torch's SGD diverges, too.",
    ),
    Wanted(
        optimizers=("LAMB",),
        test="test_cycle_lr_triangular_mode_one_lr_no_momentum",
        message="KeyError: 'momentum'",
        reason="The test reads SGD's momentum; LAMB has betas instead, as Adam has.",
    ),
    Wanted(
        optimizers=("LAMB",),
        test="test_lamb?lambc?",
        message=r"tensor\(0\.7604\) not less than or equal to tensor\(0\.7071\)",
        reason="timm's Lamb also clips the global gradient norm; ours leaves that to torch.nn.utils.clip_grad_norm_, "
        "and without it torch's Adam ends at the same 0.7604.",
    ),
    Wanted(
        optimizers=("LARS", "LAMB", "Muon"),
        test="test_fused_matches_forloop_*_float64",
        message="fused=True, but parameters are torch.float64",
        reason="The fused kernels compute in float32, so float64 parameters are refused rather than rounded.",
    ),
    Wanted(
        optimizers=("LARS",),
        test="test_fused_matches_forloop_LARS_cpu_bfloat16",
        message="Tensor-likes are not close",
        reason="Triton's interpreter cuts float32 off to bfloat16, where torch and a GPU round: a weight that the test "
        "writes between steps is then not its master rounded, and replaces it.",
    ),
    Wanted(
        optimizers=("LARS", "LAMB", "Muon"),
        test="test_fused_error_on_params_on_meta_*",
        message="lr is missing|fused=True, but the parameters are on meta",
        reason="fused=True is checked with the parameters (and LARS wants a rate there), not at the first step.",
    ),
    # The rest can be met on a GPU only.
    Wanted(
        optimizers=("LARS", "LAMB", "Muon"),
        test="test_defaults_changed_to_foreach_*",
        message="does not have the attribute '_multi_tensor_(lars|lamb|muon)'",
        reason="The test replaces a private function that only torch's own modules have.",
    ),
    Wanted(
        optimizers=("LARS", "LAMB", "Muon"),
        test="test_peak_memory_foreach_*",
        message="not less than or equal to",
        reason="The foreach path keeps a few temporaries of the weights' size where torch keeps one, so that a step "
        "which meets an inf changes nothing and the host need not be asked.",
    ),
    Wanted(
        optimizers=("LARS", "LAMB", "Muon"),
        test="test_foreach_large_tensor_*",
        message="out of memory",
        reason="Float16 parameters have float32 masters and state here, which need more than the 72 GB that the test "
        "asks for.",
    ),
)
