"""`bench step` on a CPU: the rows it promises, what it refuses, and its parts. No timing decides anything here."""

import contextlib
import gc
import json
import weakref
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from blocky import without_inductor
from torch._C._autograd import DeviceType

from hyperbatch import cli
from hyperbatch.bench import step_runs
from hyperbatch.bench.step import bench_step, format_result, timed
from hyperbatch.bench.step_data import GENERATED_IMAGES, WINDOWS, describe, generate, window_speeds
from hyperbatch.bench.step_device import Clocks, parse_clocks
from hyperbatch.bench.step_kernels import KernelTime, by_family, family, our_kernels, profiled
from hyperbatch.config import DataConfig
from hyperbatch.data.source import open_data
from hyperbatch.engine import compiled
from hyperbatch.errors import InputError, RunFailed

TINY = step_runs.Setting(model="resnet8", precision="fp32", image_size=8, classes=4, device=torch.device("cpu"))


@pytest.fixture(scope="module")
def report():
    return json.loads(json.dumps(bench_step("resnet8", batch=(2, 4), rounds=2, image_size=8, device="cpu")))


def test_every_batch_has_ours_and_the_eager_peer(report):
    names = [row["name"] for row in report["rows"]]
    assert names == [f"batch {n} / {who}" for n in (2, 4) for who in ("hyperbatch plain", "torch eager")]
    assert report["bench"] == "step"
    assert "only times on a GPU" in report["notes"][0]


def test_rows_hold_what_is_promised(report):
    for row in report["rows"]:
        assert {"name", "median", "p20", "p80", "unit", "ratio_to_best_peer", "peak_memory_bytes"} <= set(row)
        assert row["ms_per_step"] == pytest.approx(1e3 * row["batch"] / row["median"])
        assert row["set_up_s"] > 0
        assert row["finite"]
        assert not row["skipped_updates"]
        assert (row["ratio_to_best_peer"] == 1) == row["peer"]
        assert row["peak_memory_bytes"] is None


def test_the_text_names_every_row_and_says_it_is_a_cpu(report):
    text = format_result(report)
    assert all(row["name"] in text for row in report["rows"])
    assert "measured on a CPU" in text


def gpu_row(name, median, *, peer, kernel_ms, **more):
    return {
        "name": f"batch 64 / {name}",
        "batch": 64,
        "median": median,
        "p20": median,
        "p80": median,
        "ratio_to_best_peer": median / 4000,
        "peer": peer,
        "ms_per_step": 64e3 / median,
        "peak_memory_bytes": 3 << 30,
        "set_up_s": 2.5,
        "kernels_per_step": 400,
        "kernel_ms": kernel_ms,
        "finite": True,
        "skipped_updates": False,
        **more,
    }


def test_the_text_of_a_gpu_sets_our_best_beside_the_best_peer(report):
    made = {"regions": 12, "kinds": 1, "seconds": 9.31, "cache_hits": 0, "cache_misses": 2}
    rows = [
        gpu_row(
            "hyperbatch fused, graph",
            5000,
            peer=False,
            kernel_ms={"convolution": 5.5, "hyperbatch norm": 4.25},
            compiled=made,
        ),
        gpu_row("hyperbatch plain, graph", 3900, peer=False, kernel_ms={"convolution": 7.5}),
        gpu_row("torch graph", 4000, peer=True, kernel_ms={"convolution": 6.5, "norm": 8.0}),
        gpu_row("torch eager", 3000, peer=True, kernel_ms={"convolution": 9.5}),
    ]
    clocks = {"batch 64": {"sm_mhz": {"min": 1900, "median": 1950, "max": 1980}}}
    made = report | {"rows": rows, "clocks": clocks, "notes": []}
    lines = format_result(made).splitlines()
    assert any("sm_mhz 1950 (1900 .. 1980)" in line for line in lines)
    assert any(
        line.endswith("fused, graph: 12 blocks of 1 kinds compiled in 9.3 s (2 graphs; 0 more were on the disk)")
        for line in lines
    )
    assert any(line.split() == ["convolution", "5.500", "6.500"] for line in lines)
    assert any(line.split() == ["norm", "0.000", "8.000"] for line in lines)
    assert any(line.split()[:3] == ["step", "less", "kernels"] and "3.050" in line for line in lines)
    assert "warning" not in format_result(made)


@pytest.mark.parametrize("wrong", [{"finite": False}, {"skipped_updates": True}])
def test_a_load_unlike_training_is_told(report, wrong):
    rows = [gpu_row("torch graph", 4000, peer=True, kernel_ms={}, **wrong)]
    text = format_result(report | {"rows": rows})
    assert text.splitlines()[-1].startswith("  warning: batch 64 / torch graph had nans or skipped updates")


def test_ours_and_the_peer_are_whole_training_steps():
    """Both are whole training steps: one of either moves every weight, and nothing is skipped."""
    task = step_runs.make_task(TINY, 8)
    for build in (lambda t: step_runs.ours(t, fused=False, graph=False), step_runs.eager):
        torch.manual_seed(0)
        built = build(task)
        weights = [param.detach().clone() for param in built.model.parameters()]
        built.run()
        moved = [not torch.equal(old, new) for old, new in zip(weights, built.model.parameters(), strict=True)]
        assert all(moved)
        assert built.is_finite()
        assert built.loss_scale() == 1.0


def test_captured_peers_train_as_the_eager_one_does(monkeypatch):
    """Two steps from the same weights, uncaptured: fp16 with masters or autocast differ by rounding alone."""
    monkeypatch.setattr(step_runs, "captured", lambda step: step)
    task = step_runs.make_task(replace(TINY, precision="fp16"), 8)
    weights = {}
    for build in (step_runs.eager, step_runs.autocast_graph, step_runs.masters_graph):
        torch.manual_seed(0)
        built = build(task)
        start = torch.cat([param.detach().flatten().float() for param in built.model.parameters()])
        for _ in range(2):
            built.run()
        end = torch.cat([param.detach().flatten().float() for param in built.model.parameters()])
        weights[build.__name__] = end - start
        assert built.loss_scale() == step_runs.LOSS_SCALE
    known = weights.pop("eager")
    for name, moved in weights.items():
        # fp16 has 11 bits; working weights are rounded to them, which is up to a few per cent of two small steps
        assert (moved - known).norm() / known.norm() < 0.1, name


def test_an_own_model_is_held_against_itself_as_it_is():
    """Its peers have torch's own layers: ours would cast what autocast casts."""
    report = bench_step("blocky:network", batch=(4,), rounds=1, image_size=8, device="cpu")
    assert [row["name"] for row in report["rows"]] == ["batch 4 / hyperbatch plain", "batch 4 / torch eager"]
    assert report["peer_network"] == "blocky:network"
    task = step_runs.make_task(replace(TINY, model="blocky:network"), 4)
    assert type(step_runs.peer_network(task).head) is torch.nn.Linear


def of_one_size(classes, in_channels):
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(in_channels * 16**2, classes))


@pytest.mark.parametrize("files", [False, True], ids=["step", "files to weights"])
def test_a_model_of_one_size_is_measured_in_that_size(tmp_path, files):
    more = {"data": str(generate(tmp_path, 8, 2))} if files else {"rounds": 1, "peers": []}
    report = bench_step("test_bench_step:of_one_size", batch=(2,), image_size=16, device="cpu", **more)
    assert report["rows"]


def test_models_without_fused_kernels_are_compiled(monkeypatch):
    """On a GPU; here the step is built on the CPU, and without inductor's code."""
    monkeypatch.setattr(compiled, "compile_function", compiled.compile_function)  # put back after the test
    without_inductor()
    gpu = replace(TINY, model="blocky:network", precision="bf16", device=torch.device("cuda"))
    specs = step_runs.our_specs(gpu)
    assert [spec.name for spec in specs] == ["hyperbatch compiled, graph", "hyperbatch plain, graph"]
    task = step_runs.make_task(replace(TINY, model="blocky:network"), 4)
    built = step_runs.ours(task, fused=False, graph=False, compiles=True)
    built.run()
    assert built.is_finite()
    assert built.compiled["regions"] == 3
    torch.compiler.reset()


def test_a_model_that_cannot_be_compiled_is_no_compiled_candidate():
    task = step_runs.make_task(replace(TINY, model="blocky:breaking"), 4)
    with pytest.raises(RunFailed, match="bench step: blocky:breaking is not compiled: "):
        step_runs.ours(task, fused=False, graph=False, compiles=True)
    torch.compiler.reset()


def test_a_step_with_a_nan_is_not_finite():
    task = step_runs.make_task(TINY, 2)
    task.images.fill_(float("nan"))
    built = step_runs.eager(task)
    built.run()
    assert not built.is_finite()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"model": "resnet51"}, "unknown model 'resnet51'"),
        ({"peers": ["eager", "jit"]}, "unknown peer 'jit'"),
        ({"peers": ["compile"]}, "compile needs a GPU"),
        ({"model": "blocky:network", "peers": ["masters"]}, "masters supports only built-in models"),
        ({"precision": "bf16"}, "--precision bf16 needs a GPU"),
        ({"model": "blocky:nothing"}, "no attribute 'nothing'"),
        ({"max_autotune": True}, "max-autotune needs a GPU"),
        ({"steps": 5}, "--steps needs --data"),
        ({"data": "generated", "rounds": 2}, "--data trains once and has no rounds"),
        ({"data": "generated", "steps": 5}, "--steps 5: give at least"),
    ],
)
def test_wrong_options_are_told(options, message):
    with pytest.raises(InputError, match=message):
        bench_step(device="cpu", **options)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["lars", "--batch", "4"], "--batch belongs to `bench step`, not to `bench lars`"),
        (["step", "--grid", "2x2"], "--grid belongs to `bench comm`, not to `bench step`"),
        (["lars", "--rounds", "4"], "--rounds belongs to `bench comm` and `bench step` and `bench data`"),
        (["step", "--batch", "4,x"], "--batch '4,x' is not a list"),
    ],
)
def test_the_command_says_where_an_option_belongs(arguments, message, capsys):
    assert cli.main(["bench", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_no_candidate_outlives_its_batch():
    """The next batch needs the memory."""
    models = []

    def remembered(build):
        def wrapped(task):
            built = build(task)
            models.append(weakref.ref(built.model))
            return built

        return wrapped

    builds = {"peer": step_runs.eager, "ours": lambda task: step_runs.ours(task, fused=False, graph=False)}
    specs = [step_runs.Spec(name=name, build=remembered(build)) for name, build in builds.items()]
    rows, _ = timed([(spec, TINY) for spec in specs], 2, 1, "tiny")
    gc.collect()
    assert [row["name"] for row in rows] == ["tiny / peer", "tiny / ours"]
    assert [model() for model in models] == [None, None]


# Families of kernels

OURS = {"stats_kernel": "norm", "update_kernel": "lars"}


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("stats_kernel", "hyperbatch norm"),
        ("update_kernel", "hyperbatch lars"),
        ("sm90_xmma_fprop_implicit_gemm_f16f16_f16f32_f32_nhwckrsc_nhwc_tilesize128x128x64", "convolution"),
        ("nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_TNN", "convolution"),
        ("void cutlass_cudnn::Kernel<cutlass_tensorop_f16_s16816dgrad_optimized_f16_128x128_32x5_nhwc>", "convolution"),
        ("cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x64_4x1x1_cga1x1x1", "attention"),
        ("void cudnn::fusion::compute_dot_do_o_specialized<false, 64>(void const*, void const*, void*)", "attention"),
        ("void at::native::(anonymous namespace)::vectorized_layer_norm_kernel<c10::Half, float, false>", "norm"),
        ("void at::native::(anonymous namespace)::GammaBetaBackwardCUDAKernelTemplate<c10::Half, float, 32u>", "norm"),
        ("void cudnn::bn_fw_tr_1C11_kernel_NHWC<__half, float, int, 512, true, 1, true>(...)", "norm"),
        ("void cudnn::bn_bw_1C11_kernel_new<__half, float, float2, 512, true, 1>(...)", "norm"),
        ("void at::native::batch_norm_backward_reduce_channels_last_kernel<4, ...>", "norm"),
        ("void at::native::(anonymous namespace)::max_pool_forward_nhwc<c10::Half, int>", "pooling"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>", "elementwise"),
        ("void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda>", "copies"),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor<float>, ...>", "copies"),
        ("Memcpy DtoD (Device -> Device)", "copies"),
        ("Memset (Device)", "copies"),
        ("void at::native::reduce_kernel<512, 1, at::native::ReduceOp<c10::Half, ...>>", "reduction"),
        ("void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, true, false>", "loss"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::FusedSgdMathFunctor<float, 3>>", "optimizer"),
        ("void at::native::multi_tensor_apply_kernel<..., at::native::Copy<c10::Half, float>, ...>", "copies"),
        ("triton_poi_fused__native_batch_norm_legit_functional_add_relu_12", "inductor"),
        ("triton_red_fused_convolution_backward_3", "inductor"),
        ("some_unheard_of_kernel", "other"),
    ],
)  # fmt: skip
def test_the_family_of_a_kernel(name, expected):
    assert family(name, OURS) == expected


def test_families_add_up():
    times = [
        KernelTime(name="stats_kernel", launches=53, seconds=0.002),
        KernelTime(name="sm90_xmma_fprop", launches=53, seconds=0.005),
        KernelTime(name="sm90_xmma_wgrad", launches=53, seconds=0.004),
    ]
    found = by_family(times, OURS)
    assert list(found) == ["convolution", "hyperbatch norm"]
    assert sum(found.values()) == pytest.approx(0.011)


def test_only_what_ran_on_the_device_is_counted(monkeypatch):
    """Host calls and annotated regions span kernels that are listed themselves."""

    def event(key, device_type, microseconds, annotation=False):
        return SimpleNamespace(
            key=key, count=2, device_type=device_type, device_time_total=microseconds, is_user_annotation=annotation
        )

    seen = [
        event("short", DeviceType.CUDA, 10.0),
        event("long", DeviceType.CUDA, 50.0),
        event("cudaGraphLaunch", DeviceType.CPU, 60.0),
        event("## Call CompiledFxGraph", DeviceType.CUDA, 60.0, annotation=True),
    ]
    fake = SimpleNamespace(key_averages=lambda: seen)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext(fake))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    calls = []
    assert profiled(lambda: calls.append(1)) == [
        KernelTime(name="long", launches=2, seconds=5e-5),
        KernelTime(name="short", launches=2, seconds=1e-5),
    ]
    assert calls == [1]


def test_our_kernels_are_found_by_name():
    pytest.importorskip("triton")
    found = our_kernels()
    assert found["update_kernel"] == "layerwise"
    assert found["views_kernel"] == "augment"
    assert found["_statistics_kernel"] == "norm.two_pass"


# What is read off the machine


def test_clocks_are_parsed_and_gaps_left_out():
    assert parse_clocks("1980, 3201, 693.12, 45\n") == {
        "sm_mhz": 1980, "memory_mhz": 3201, "power_w": 693.12, "celsius": 45,
    }  # fmt: skip
    assert parse_clocks("1980, 3201, [N/A], 45") == {"sm_mhz": 1980, "memory_mhz": 3201, "celsius": 45}
    assert parse_clocks("") == {}


def test_clocks_are_summed_up_over_rounds():
    clocks = Clocks(torch.device("cpu"))
    clocks.ask()
    assert clocks.summary() == {}
    clocks.samples += [{"sm_mhz": 1900.0}, {"sm_mhz": 1980.0}, {"sm_mhz": 1950.0, "power_w": 700.0}]
    assert clocks.summary() == {
        "sm_mhz": {"min": 1900, "median": 1950, "max": 1980},
        "power_w": {"min": 700, "median": 700, "max": 700},
    }


# Files to weights


def test_end_to_end_trains_through_the_engine_and_reports_the_wait(tmp_path):
    tree = generate(tmp_path, 8, 2)
    report = bench_step("resnet8", batch=(2,), data=str(tree), steps=2 * WINDOWS, image_size=16, device="cpu")
    synthetic, row = report["rows"]
    assert synthetic["ratio_to_synthetic"] == 1
    assert row["ratio_to_synthetic"] == row["mean"] / synthetic["mean"]
    assert row["steps"] == 2 * WINDOWS * 4 // 5  # the first fifth is left out
    assert row["mean"] > 0
    assert 0 <= row["data_wait_fraction"] <= 1
    assert row["ratio_to_mlperf_v4_h200"] is None
    assert row["data"].startswith("8 files of 500x375 px")
    assert "files to weights" in format_result(report)


def test_generated_files_are_measured_in_every_form(monkeypatch):
    monkeypatch.setitem(GENERATED_IMAGES, "cpu", 8)
    report = bench_step("resnet8", batch=(2,), data="generated", steps=2 * WINDOWS, image_size=16, device="cpu")
    names = [row["name"] for row in report["rows"]]
    assert names == [
        "batch 2 / synthetic",
        "batch 2 / files to weights",
        "batch 2 / shards of 256 px to weights",
        "batch 2 / decoded shards of 256 px to weights",
        "batch 2 / pixels of 256 px kept in host memory",
    ]
    _, files, shards, decoded, kept = (row["data"] for row in report["rows"])
    assert files.startswith("8 files of 500x375 px")
    assert shards.startswith("8 files of 341x256 px")
    assert decoded == "8 files of 341x256 px and 262 kB on average"  # three bytes a pixel
    assert kept == shards
    assert "x synthetic" in format_result(report)


def test_generated_images_have_the_classes_of_the_head_in_both_splits(tmp_path):
    tree = generate(tmp_path, 7, 3)
    train, val = open_data(DataConfig(data=str(tree)))
    assert (len(train), len(val)) == (7, 3)
    assert len(train.classes) == len(val.classes) == 3
    assert "kB" in describe(train)


def test_speeds_of_stretches_that_cover_all_steps():
    ends_s = [60.0 + 0.1 * i for i in range(51)]
    ends_s[25:] = [end + 5.0 for end in ends_s[25:]]  # one pause
    speeds, mean = window_speeds(ends_s, 8)
    assert len(speeds) == WINDOWS
    assert sorted(speeds)[1:] == pytest.approx([80.0] * (WINDOWS - 1))
    assert mean == pytest.approx(8 * 50 / 10.0)
