"""Every recipe is complete, valid and says where its figures come from; published figures stand in them exactly."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest

from hyperbatch.cli import main
from hyperbatch.config import Config, SizePhase
from hyperbatch.errors import InputError
from hyperbatch.plan.clusters import cluster_names
from hyperbatch.recipes import DEFAULT, all_recipes, find_recipe, get_recipe, published_data, weights_note
from hyperbatch.recipes.listing import format_recipes, list_recipes
from hyperbatch.recipes.mlperf import IMAGENET_SAMPLES, POINTS, nearest_point
from hyperbatch.schedule import full_size_epochs, learning_rate, resolve_phases, size_spans, total_steps

PUBLISHED = [
    "facebook_resnet50",
    "pfn_resnet50",
    "you_resnet50",
    "you_resnet50_16k",
    "you_alexnet",
    "tencent_resnet50",
    "tencent_alexnet",
    "sony_resnet50",
    "sony_resnet50_2018",
    "nvidia_resnet50",
    "google_resnet50",
    "fujitsu_resnet50",
    "amazon_resnet152",
    "krizhevsky_alexnet",
    "resnet50_a3",
    "convnext_t",
    "vit_s16",
]
EVERYDAY = [
    "resnet50",
    "mlperf_resnet50",
    "cifar10",
    "cifar10_96",
    "cifar10_resnet",
    "imagenette",
    "tinyimagenet",
    "digits",
]
EVERYDAY += ["finetune", "resnet50_fast", "vit_cifar10"]


def test_every_name_of_the_design_is_there():
    assert sorted(all_recipes()) == sorted(PUBLISHED + EVERYDAY)


def test_listing_order_is_everyday_first_then_by_year():
    names = list(all_recipes())
    assert names[0] == DEFAULT
    assert set(names[: len(EVERYDAY)]) == set(EVERYDAY)
    assert names[-1] == "vit_s16"


@pytest.mark.parametrize("name", PUBLISHED + EVERYDAY)
def test_recipe_is_complete(name):
    recipe = find_recipe(name)
    config = recipe.config()
    assert isinstance(config, Config)  # construction checks every value
    assert config.recipe == name
    assert recipe.claim
    assert recipe.source
    assert all(recipe.chosen)
    assert recipe.chosen
    assert f"hyperbatch train{'' if name == DEFAULT else ' ' + name}" in recipe.notes  # the exact command
    assert recipe.cluster in cluster_names()
    assert bool(config.run.target_top1) == (name != "finetune")  # whose data is the user's
    # what it claims was run on so many ranks: the batch must divide
    for phase in resolve_phases(config.schedule.batch_phases, config.data.train_samples, recipe.ranks):
        assert phase.batch_per_rank * recipe.ranks == phase.global_batch
    assert Config.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize("name", EVERYDAY)
def test_everyday_recipes_train_in_fp32_on_a_cpu_without_bf16(name):
    assert find_recipe(name).config().with_precision("fp32", on_gpu=False).optim.precision == "fp32"


@pytest.mark.parametrize("name", ["cifar10", "cifar10_96", "resnet50", "resnet50_fast", "mlperf_resnet50"])
def test_the_fastest_recipes_train_in_fp16_on_a_gpu(name):
    assert find_recipe(name).config().with_precision("bf16", on_gpu=True).optim.precision == "fp16"


@pytest.mark.parametrize("name", PUBLISHED + EVERYDAY)
def test_rate_starts_low_peaks_after_the_warm_up_and_ends_low(name):
    config = find_recipe(name).config()
    s = config.schedule
    top = learning_rate(s, s.warmup_epochs)
    rates = [learning_rate(s, s.epochs * k / 500) for k in range(500)]
    assert max(rates) <= top * (1 + 1e-9)
    assert rates[0] <= top / 3 or s.warmup_epochs == 0
    assert rates[-1] <= top / 100


# (recipe, epoch, published rate): start, peak and end of each schedule a source gives
PUBLISHED_RATES = [
    ("facebook_resnet50", 0, 0.1),
    ("facebook_resnet50", 5, 3.2),
    ("facebook_resnet50", 29.9, 3.2),
    ("facebook_resnet50", 30, 0.32),
    ("facebook_resnet50", 60, 0.032),
    ("facebook_resnet50", 80, 0.0032),
    ("you_resnet50", 5, 12.8),
    ("you_resnet50_16k", 5, 6.4),
    ("you_alexnet", 10, 33.0),
    ("you_alexnet", 55, 33.0 / 4),  # half of the way down, to the power 2
    ("you_alexnet", 100, 0.0),
    ("tencent_resnet50", 31, 24.699),
    ("nvidia_resnet50", 16.5, 40.7 / 2),
    ("nvidia_resnet50", 33, 40.7),
    ("nvidia_resnet50", 90, 1e-4),
    ("google_resnet50", 25, 31.2),
    ("google_resnet50", 25 + 2_007 * 32_768 / 1_281_167, 1e-4),
    ("fujitsu_resnet50", 36, 13.0),
    ("fujitsu_resnet50", 36 + 780 * 86_016 / 1_281_167, 13.0 * 0.0025),
    ("amazon_resnet152", 5, 2.0),
    ("krizhevsky_alexnet", 1, 0.08),
    ("resnet50_a3", 5, 8e-3),
    ("resnet50_a3", 100, 1e-6),
    ("convnext_t", 20, 4e-3),
    ("convnext_t", 160, 4e-3 / 2 + 1e-6 / 2),  # half of the way down a cosine
    ("vit_s16", 5_000 * 1_024 / 1_281_167, 5e-4),
    ("vit_s16", 10_000 * 1_024 / 1_281_167, 1e-3),
    ("vit_s16", 90, 0.0),
]


@pytest.mark.parametrize(("name", "epoch", "rate"), PUBLISHED_RATES)
def test_published_rates(name, epoch, rate):
    config = find_recipe(name).config()
    assert learning_rate(config.schedule, epoch) == pytest.approx(rate, rel=1e-9, abs=1e-12)


def test_the_other_figures_of_the_modern_recipes():
    vit, convnext, a3 = (find_recipe(name).config() for name in ("vit_s16", "convnext_t", "resnet50_a3"))
    assert [c.global_batch for c in (vit, convnext, a3)] == [1_024, 4_096, 2_048]
    assert [c.schedule.epochs for c in (vit, convnext, a3)] == [90, 300, 100]
    assert [c.optim.optimizer for c in (vit, convnext, a3)] == ["adamw", "adamw", "lamb"]
    # big_vision's decay of 1e-4 a step at the peak, where the rate multiplies it
    assert vit.optim.weight_decay * vit.schedule.lr == pytest.approx(1e-4)
    assert (convnext.optim.weight_decay, a3.optim.weight_decay) == (0.05, 0.02)
    assert [c.optim.clip_norm for c in (vit, convnext, a3)] == [1.0, 0.0, 1.0]
    assert [(c.data.mixup, c.data.cutmix) for c in (vit, convnext, a3)] == [(0.2, 0.0), (0.8, 1.0), (0.1, 1.0)]
    # levels 10, 9 and 6 of 10
    assert [(c.data.rand_ops, c.data.rand_magnitude / 3) for c in (vit, convnext, a3)] == [(2, 10), (2, 9), (2, 6)]
    assert [c.optim.label_smoothing for c in (vit, convnext, a3)] == [0.0, 0.1, 0.0]
    assert (a3.optim.loss, a3.data.image_size, a3.data.eval_size) == ("bce", 160, 224)
    assert (convnext.model.drop_path, convnext.optim.averaging_decay) == (0.1, 0.9999)


def test_fujitsus_other_figures():
    config = find_recipe("fujitsu_resnet50").config()
    assert find_recipe("fujitsu_resnet50").ranks * 42 == config.global_batch == 86_016
    o = config.optim
    assert (o.momentum, o.weight_decay, o.trust_coefficient, o.lars_eps) == (0.96, 5e-5, 0.0025, 1e-9)
    assert (o.decoupled_weight_decay, o.label_smoothing, o.precision) == (True, 0.1, "fp16")
    assert config.schedule.decay_power == 2.2
    assert (config.comm.grouping, config.comm.group_base, config.comm.wire_dtype) == ("cubic", 3, "fp16")
    assert config.data.crop_area[1] == 0.9
    assert config.data.crop_aspect == (2 / 3, 1.5)
    assert config.data.full_crop_from_epoch == 85
    # halfway through the decay: power 2.2 towards the end rate
    half = learning_rate(config.schedule, 36 + 390 * 86_016 / 1_281_167)
    assert half == pytest.approx(0.0325 + (13 - 0.0325) * 0.5**2.2)


def test_sonys_batch_control():
    config = find_recipe("sony_resnet50_2018").config()
    assert [phase.global_batch for phase in config.schedule.batch_phases] == [2_176 * 16, 2_176 * 32]
    before, after = (learning_rate(config.schedule, epoch) for epoch in (30 - 1e-9, 30))
    assert before == pytest.approx(after)  # the batch grows instead of the rate falling
    assert find_recipe("sony_resnet50").config().global_batch == 3_456 * 16
    assert config.comm.algorithm == "torus"


def test_google_shares_batch_norm_over_128_samples():
    recipe = find_recipe("google_resnet50")
    config = recipe.config()
    assert config.model.bn_group_ranks * config.global_batch // recipe.ranks == 128
    assert config.comm.sharded_update


def test_facebook_and_tencent_particulars():
    facebook = find_recipe("facebook_resnet50").config()
    assert facebook.model.zero_init_last_gamma
    assert facebook.optim.optimizer == "sgd"
    tencent = find_recipe("tencent_alexnet").config()
    assert tencent.model.model == "alexnet_bn_pool5"
    assert not tencent.optim.decay_norm_bias
    assert tencent.comm.algorithm == "hybrid"


def test_the_speed_runs_rates_are_those_of_a_summed_loss():
    """A step of the summed loss with logits / 256 moves shifts and head as far as one of the mean with logits / 9."""
    config = find_recipe("cifar10").config()
    optim, lr, batch = config.optim, learning_rate(config.schedule, 0), config.global_batch
    assert lr * optim.bias_lr_scale == pytest.approx(batch * 0.0573)
    assert lr * optim.head_lr_scale / 9**2 == pytest.approx(batch * 0.5415 / 256**2)
    assert lr * optim.weight_decay == pytest.approx(1.0418e-6 * batch, rel=1e-3)


def test_the_longer_speed_run_takes_its_share_of_the_rates_and_evaluates_once():
    short, config = find_recipe("cifar10").config(), find_recipe("cifar10_96").config()
    rates = [
        (c.schedule.lr * c.optim.bias_lr_scale / c.global_batch, c.schedule.lr * c.optim.head_lr_scale / c.global_batch)
        for c in (short, config)
    ]
    assert rates[1] == pytest.approx([rate * 9 / 11.5 for rate in rates[0]])
    assert config.schedule.lr * config.optim.weight_decay == pytest.approx(0.0016)
    assert (config.model.model, config.data.cutout, config.data.shift_pixels) == ("whitenet_deep", 12, 4)
    assert config.run.eval_every_epochs > config.schedule.epochs


@pytest.mark.parametrize("point", POINTS.values(), ids=lambda point: str(point.global_batch))
def test_mlperf_rows(point):
    recipe = find_recipe("mlperf_resnet50")
    config = recipe.config(point.global_batch)
    assert learning_rate(config.schedule, point.warmup_epochs) == pytest.approx(point.lr)
    assert learning_rate(config.schedule, config.schedule.epochs) == pytest.approx(1e-4)
    assert (config.optim.momentum, config.optim.weight_decay) == (point.momentum, point.weight_decay)
    # a schedule that ended before the published convergence epoch, or long after it, would be misread steps
    assert point.epochs_to_target <= config.schedule.epochs <= point.epochs_to_target + 6
    assert recipe.batch_note(config) is None


def test_mlperf_between_rows_takes_the_nearest_and_says_so():
    recipe = find_recipe("mlperf_resnet50")
    config = recipe.config(6_144)
    assert nearest_point(6_144).global_batch == 8_192
    assert learning_rate(config.schedule, 5) == pytest.approx(17 * (6_144 / 8_192) ** 0.5)
    note = recipe.batch_note(config)
    assert note is not None
    assert "8,192" in note
    assert "6,144" in note


def test_another_batch_scales_a_published_rate_and_says_so():
    recipe = find_recipe("facebook_resnet50")
    config = recipe.config(1_024)
    assert learning_rate(config.schedule, 5) == pytest.approx(0.4)
    assert learning_rate(config.schedule, 0) == pytest.approx(0.1)
    assert "8,192" in str(recipe.batch_note(config))
    assert recipe.batch_note(recipe.config()) is None


def test_the_fast_recipe_costs_a_third_of_its_epochs():
    config = find_recipe("resnet50_fast").config()
    spans = size_spans(config)
    assert [(span.epochs, span.image_size) for span in spans] == [
        *((12, 88), *((pytest.approx(2.4), size) for size in (112, 128, 144, 160)), (pytest.approx(5.4), 176)),
    ]
    phases = resolve_phases(config.schedule.batch_phases, IMAGENET_SAMPLES, 8)
    steps = total_steps(phases, IMAGENET_SAMPLES, config.schedule.epochs)
    assert steps == 16_891
    assert steps * config.global_batch - 27 * IMAGENET_SAMPLES in range(config.global_batch)
    assert full_size_epochs(config) == pytest.approx(8.786, abs=1e-3)
    # Mild itself: half of 176 px for 40 % of 27 epochs, growing evenly until 80 %
    mild = 27 * (176 / 224) ** 2 * (0.4 * 0.25 + 0.4 * 7 / 12 + 0.2)
    assert full_size_epochs(config) == pytest.approx(mild, rel=0.02)
    assert full_size_epochs(find_recipe("resnet50").config()) == config_epochs("resnet50")
    assert config.optim.averaging_decay ** (100 / config.optim.averaging_every_steps) == pytest.approx(0.5)
    assert config.data.eval_size == 224 > config.data.largest_image_size == 176


def test_a_dry_run_shows_the_sizes_and_their_cost(capsys):
    assert main(["train", "resnet50_fast", "--dry-run", "--world-size", "8", "--epochs", "13.5"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    sizes = "88 px, 112 from epoch 6, 128 from epoch 7.2, 144 from epoch 8.4, 160 from epoch 9.6, 176 from epoch 10.8"
    assert f"images {sizes}: as many pixels as 4.39 epochs at 224 px" in text
    assert main(["train", "resnet50", "--dry-run", "--world-size", "8"]) == 0
    assert "as many pixels" not in capsys.readouterr().out


def config_epochs(name):
    return find_recipe(name).config().schedule.epochs


@pytest.mark.parametrize("epochs", [4, np.int64(4), 19.0464])
def test_image_sizes_follow_the_epochs(epochs):
    recipe, config = find_recipe("cifar10"), get_recipe("cifar10", epochs=epochs)
    whole = recipe.config()
    shares = [[span.from_epoch / c.schedule.epochs for span in size_spans(c)] for c in (whole, config)]
    assert shares[1] == pytest.approx(shares[0], abs=1e-6)
    assert [span.image_size for span in size_spans(config)] == [24, 32]
    note = recipe.size_note(config)
    assert note is not None
    assert "the same fractions of the run as in cifar10 (9.5232 epochs): --size-phases 0:24," in note
    assert recipe.size_note(whole) is None


def test_another_size_of_training_images_alone_gets_a_note():
    """timm's --img-size sets both sizes."""
    note = find_recipe("finetune").eval_note
    told = str(note(get_recipe("finetune", image_size=128)))
    assert told.startswith(
        "training images have 128 px and evaluation images 224 px; --eval-size 128 --eval-resize 146"
    )
    assert note(get_recipe("finetune")) is None
    assert note(get_recipe("finetune", image_size=128, eval_size=160)) is None
    assert "--eval-size 16 evaluates" in str(find_recipe("digits").eval_note(get_recipe("digits", image_size=16)))
    for name, recipe in all_recipes().items():
        assert recipe.eval_note(get_recipe(name)) is None


def test_image_sizes_that_are_given_stay():
    recipe = find_recipe("cifar10")
    config = get_recipe("cifar10", epochs=4, size_phases=(SizePhase(0, 24), SizePhase(3, 32)))
    assert [span.epochs for span in size_spans(config)] == [3, 1]
    assert recipe.size_note(config) is None
    assert recipe.size_note(get_recipe("cifar10", epochs=4, size_phases=())) is None
    assert get_recipe("cifar10", seed=3).data.size_phases == recipe.config().data.size_phases


def test_the_default_takes_the_same_path_as_the_large_ones():
    config = find_recipe(DEFAULT).config()
    assert config.optim.optimizer == "lars"
    assert config.optim.label_smoothing == 0.1
    assert config.schedule.warmup_epochs > 0
    assert len(config.schedule.batch_phases) == 2
    assert config.schedule.batch_phases[1].from_epoch < config.schedule.epochs
    assert config.comm.grouping == "cubic"
    assert config.run.target_top1 == 0.99
    for ranks in (1, 2, 4):  # one GPU, two CPU processes, a 2x2 grid
        resolve_phases(config.schedule.batch_phases, config.data.train_samples, ranks)


def test_a_recipe_names_where_its_data_set_is_published():
    config = get_recipe("cifar10")
    (row,) = list_recipes(["cifar10"])
    assert published_data(config) == row["data"] == "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz"
    assert published_data(config.override(dataset="images")) == "", "another data set"
    assert published_data(get_recipe("resnet50")) == ""


def test_listing():
    rows = list_recipes()
    assert json.loads(json.dumps(rows)) == rows
    assert {"name", "claim", "source", "ranks", "model", "global_batch", "target"} <= set(rows[0])
    text = format_recipes()
    assert all(row["name"] in text for row in rows)


def test_a_listing_that_is_piped_is_not_cut(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert all(line.endswith(row["claim"]) for row, line in zip(list_recipes(), format_recipes().splitlines()[1:]))


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_listing_has_a_line_for_each_recipe_at_any_width(monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    lines = format_recipes().splitlines()
    assert max(map(len, lines)) <= int(columns)
    rows = list_recipes()
    assert len(lines) <= 1 + len(rows) + 4, "a line for each, and the note"
    for row, line in zip(rows, lines[1:], strict=False):
        assert line.startswith(row["name"])
        assert all_recipes()[row["name"]].standing in line
        end = line.rpartition("  ")[2].removesuffix("…")
        assert row["claim"].startswith(end)
        assert columns == "40" or len(end) > 10


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("name", all_recipes())
def test_a_recipe_in_full(monkeypatch, columns, name):
    """Claim, what it rests on, source, the work and the commands, none of them cut."""
    monkeypatch.setenv("COLUMNS", columns)
    lines = format_recipes([name]).splitlines()
    assert lines[0] == name
    assert max(map(len, lines)) <= int(columns)
    text = "".join("".join(lines).split())
    (row,) = list_recipes([name])
    for value in (row["claim"], row["evidence"], row["source"], *row["chosen"], f"{row['command']} --dry-run"):
        assert "".join(value.split()) in text
    assert f"{row['epochs']:g}epochs" in text
    assert (f"--cluster{row['cluster']}" in text) == (row["cluster"] != "local")


def test_own_recipes_are_shown_and_claim_nothing(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["recipes", "hyperbatch.recipes.everyday:digits"]) == 0
    assert "not measured yet" in capsys.readouterr().out
    assert main(["recipes", "cifr10"]) == 2
    assert "unknown recipe 'cifr10'; did you mean 'cifar10'?" in capsys.readouterr().err


def test_every_claim_says_what_it_rests_on():
    """A record is there and is of this recipe; a claim of our own is measured or says that it is not."""
    for name, recipe in all_recipes().items():
        assert recipe.standing == recipe.evidence.split()[0].replace("not", "none yet")
        if recipe.record:
            folder = Path(__file__).parents[2] / "records" / recipe.record
            assert tomllib.loads((folder / "plan.toml").read_text())["recipe"] == name
            assert (folder / "rows.jsonl").exists()
        elif not recipe.published:
            assert "not measured yet" in recipe.claim
            assert recipe.evidence == "not measured yet"


@pytest.mark.parametrize("name", ["digits", "mlperf_resnet50"])
def test_a_program_may_give_numpys_numbers(name):
    assert get_recipe(name, global_batch=np.int64(4096)).global_batch == 4096
    with pytest.raises(InputError, match="global_batch is 0; give a whole number of at least 1"):
        get_recipe(name, global_batch=0)


def test_a_recipe_without_a_name():
    with pytest.raises(InputError, match="name is None; give the name of a recipe"):
        get_recipe(None)


def test_unknown_recipe_names_the_nearest():
    with pytest.raises(InputError, match="did you mean 'fujitsu_resnet50'"):
        find_recipe("fujitsu_resnet")


def test_imagenet_count_is_the_one_configs_assume():
    assert Config().data.train_samples == IMAGENET_SAMPLES


def test_recipes_load_no_torch():
    code = (
        "import sys; from hyperbatch.recipes.listing import format_recipes; format_recipes(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_docs_list_every_recipe_with_its_claim():
    text = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
    for name, recipe in all_recipes().items():
        assert f"| `{name}` |" in text
        assert recipe.claim in text


def test_fine_tuning_without_weights_is_told():
    assert "use --init-from to start from pretrained weights" in str(weights_note(get_recipe("finetune")))
    assert weights_note(get_recipe("finetune", init_from="timm")) is None
    assert weights_note(get_recipe("resnet50")) is None
