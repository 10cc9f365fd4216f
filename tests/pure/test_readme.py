"""README's figures are those of the files that hold the measurements, and its links lead somewhere."""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import fmean

import pytest

from hyperbatch.sweep.rows import read_rows

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])


def rows(bench):
    """Name -> median"""
    values = json.loads((ROOT / "benchmarks" / f"{bench}.json").read_text())
    return {row["name"]: row["median"] for row in values["rows"]}


def mean(record, name):
    return fmean(row.result[name] for row in record)


def figures():
    """The results column, as the files have it."""
    digits = read_rows(ROOT / "records" / "2026-11-15_digits_10_seeds")
    times = [row.result["time_to_target_s"] for row in digits]  # a number for each: all reached it
    cifar10 = read_rows(ROOT / "records" / "2026-11-16_cifar10_200_seeds")
    lars, data = rows("lars_h200"), rows("data_h200")
    validation = (ROOT / "docs" / "simulator_validation.md").read_text()
    errors = re.search(r"^\| \*\*simulator\*\* \| ([\d.]+)% \| ([\d.]+)% \|$", validation, re.MULTILINE)
    assert errors is not None
    return [
        f"{min(times):.1f} to {max(times):.1f} s",
        f"{mean(cifar10, 'top1') * 100:.2f} % in {mean(cifar10, 'run_s'):.3f} s",
        f"{lars['resnet50 / hyperbatch arena float32 / graph']:.3f} ms; "
        f"timm's Lars {lars['resnet50 / peer timm Lars / graph']:.1f} ms",
        f"{data['hyperbatch, folder, nvjpeg']:,.0f} img/s; DataLoader {data['DataLoader, folder, Pillow']:,.0f}",
        f"median error {errors[1]} %, worst {errors[2]} %",
    ]


def table(head):
    """Rows of cells of the table that begins so."""
    lines = (ROOT / "README.md").read_text().partition(f"\n| {head}")[2].partition("\n\n")[0].splitlines()
    return [line.strip("| ").split(" | ") for line in lines[2:]]


def test_every_result_is_the_one_of_its_file():
    assert [cells[1] for cells in table("what")] == figures()


def test_every_step_is_the_one_of_its_file():
    files = {"resnet50": "step_h200", "resnet50d": "step_resnet50d_h200", "own_blocks:network": "step_own_blocks_h200"}
    files |= {"timm/vit_small_patch16_224": "step_vit_s16_h200", "timm/convnext_tiny": "step_convnext_t_h200"}
    files |= {"timm/tf_efficientnetv2_s": "step_efficientnetv2_s_h200"}
    shown = table("training step")
    assert len(shown) == len(files)
    for what, *cells in shown:
        model, batch = re.findall("`(.+)`", what)[0], re.findall(r"batch (\d+)", what)[0]
        speeds = rows(files[model])
        ours = next(
            value for name, value in speeds.items() if re.match(f"batch {batch} / hyperbatch (fus|compil)ed", name)
        )
        theirs = speeds[f"batch {batch} / torch.compile reduce-overhead"]
        assert cells == [f"{ours:,.0f} img/s", f"{theirs:,.0f} img/s", f"{ours / theirs:.2f}"]


def test_it_fits_on_two_screens():
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 100


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_to_files_and_headings(page):
    lost = []
    for target in re.findall(r"\]\((?!\w+://)([^)\s]+)\)", page.read_text()):
        path, _, heading = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (heading and heading not in anchors(file)):
            lost.append(target)
    assert lost == []


def anchors(page):
    """The headings of a page as GitHub and mkdocs name them."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}
