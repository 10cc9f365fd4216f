"""The report in a real browser, from a file: the script runs, the charts answer to the pointer, nothing is logged."""

import html
import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from hyperbatch import cli
from hyperbatch.plan.types import GroupTiming, StepTiming
from hyperbatch.recipes import find_recipe
from hyperbatch.record import Result, RunRecord, RunWriter
from hyperbatch.report import write_report

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs a Chromium (chromium or google-chrome on the PATH)")

# Appended to a copy of the page: acts as a reader would and leaves what it saw for --dump-dom.
READER = """
<script>
const seen = {};
const svg = document.querySelector('svg[data-key=loss]');
const visible = g => getComputedStyle(g).display !== 'none';
const shown = () => [...svg.querySelectorAll('.axis')].filter(visible).map(g => g.classList[1]);
const move = share => {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent('pointermove', { clientX: box.left + share * box.width, clientY: box.top + 20 }));
  return [...document.querySelector('.tip').childNodes].map(node => node.textContent);
};
seen.axis = shown();
seen.tip = move(0.999);
seen.circles = document.querySelectorAll('.hover circle').length;
const reads = () => Object.fromEntries([...document.querySelectorAll('svg[data-key]')].map(
  chart => [chart.dataset.key, chart.closest('figure').querySelector('.read').textContent]));
seen.reads = reads();
seen.cursors = [...document.querySelectorAll('.cursor')].map(cursor => cursor.hidden ? null : cursor.style.left);
document.querySelector('[data-set-axis=step]').click();
seen.axis_after = shown();
seen.tip_after = move(0.999);
svg.dispatchEvent(new PointerEvent('pointerleave'));
seen.hidden = document.querySelector('.tip').hidden;
seen.reads_after = Object.values(reads()).join('');
const heat = document.querySelector('svg[data-heat]'), cells = heat.getBoundingClientRect();
heat.dispatchEvent(new PointerEvent('pointermove', { clientX: cells.left + 1, clientY: cells.bottom - 2 }));
seen.heat_tip = [...document.querySelector('.tip').childNodes].map(node => node.textContent);
seen.heat_reads = reads();
heat.dispatchEvent(new PointerEvent('pointerleave'));
seen.names = [...document.querySelectorAll('.heat .names span')].map(
  name => [name.textContent, name.getBoundingClientRect().height, parseFloat(getComputedStyle(name).fontSize)]);
seen.cell_height = cells.height;
seen.sideways = document.documentElement.scrollWidth > document.documentElement.clientWidth;
seen.cut = [...document.querySelectorAll('.card *')].filter(part => {
  const box = part.getBoundingClientRect();
  const outside = box.width && (box.right > innerWidth + 1 || box.left < -1);
  return outside || part.matches('.scroll, pre') && part.scrollWidth > part.clientWidth + 1;
}).map(part => part.tagName + '.' + (part.className.baseVal ?? part.className) + ' ' + part.textContent.slice(0, 40));
seen.small = [...document.querySelectorAll('svg text')].filter(text => {
  const pixels = text.getScreenCTM().a * parseFloat(getComputedStyle(text).fontSize);
  return text.getBoundingClientRect().width && pixels < 9;
}).map(text => text.textContent);
seen.width = innerWidth;
seen.requests = performance.getEntriesByType('resource').length;
const out = document.createElement('pre');
out.id = 'seen';
out.textContent = JSON.stringify(seen);
parent.document.body.append(out);
</script>
"""


GROUP = {"parameters": ["layer4.2.conv3.weight", "layer4.2.bn3.weight"], "bytes": 4_000_000, "dtype": "float32"}
MEANS = {"data_wait_s": 0.001, "forward_s": 0.02, "backward_s": 0.05, "update_s": 0.01, "step_s": 0.1}
TIMING = StepTiming(
    step_s=0.1,
    forward_s=0.03,
    backward_s=0.05,
    exposed_comm_s=0.015,
    update_s=0.005,
    groups=tuple(
        GroupTiming(
            index=i, algorithm="flat", bytes=4_000_000, ready_s=0.05, start_s=0.05 + i / 100, end_s=0.06 + i / 100
        )
        for i in range(3)
    ),
)


def make_run(folder: Path, steps: int = 40) -> Path:
    with RunWriter(folder, tensorboard=False) as writer:
        for step in range(1, steps + 1):
            place = {"step": step, "epoch": step / 10, "time_s": step / 2}
            writer.step(**place, loss=5 - step / 10, lr=step / 100, global_batch=32 + step // 30 * 32, images_per_s=900)
            writer.layers(**place, trust_ratios={"fc.weight": 0.1, "layer4.2.conv3.weight": 0.01 * step})
            if step % 10 == 0:
                writer.eval(**place, top1=step / steps * 0.995, top5=0.999, val_loss=20 / step, samples=360)
    RunRecord(
        recipe="digits",
        config=find_recipe("digits").config().to_dict(),
        environment={"device": "cpu", "device_type": "cpu", "cores": 2},
        world_size=2,
        grid="1x2",
        result=Result(reached=True, target_top1=0.99, top1=0.995, time_to_target_s=20, train_s=19, steps=steps),
        classes=[f"Saint Bernard, kind {number}" for number in range(12)],
        by_class={"samples": [30] * 12, "right": list(range(18, 30)), "confusions": [[0, 1, 9], [3, 2, 4]]},
        trust_ratios={"fc.weight": 0.1, "layer4.2.conv3.weight": 0.4},
        plan={"strategy": "equal", "groups": [GROUP | {"index": index} for index in range(3)]},
        phases=[{"global_batch": 32, "batch_per_rank": 16, "accumulation": 1, "first_step": 0}],
        timing=TIMING.to_dict(),
        ranks=[{"rank": rank, "host": f"a-host-with-a-name-{rank}", "device": "cpu", **MEANS} for rank in range(2)],
        clock={"init_s": 1, "train_s": 19, "eval_s": 1, "pause_s": 0},
        folder=str(folder),
    ).save(folder)
    return folder


def browse(page: Path, tmp_path: Path, *options: str) -> subprocess.CompletedProcess[str]:
    profile = tmp_path / "profile"
    command = [
        *(str(CHROMIUM), "--headless", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"),
        *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--no-first-run"),
        *(("--no-sandbox",) if os.geteuid() == 0 else ()),  # Chromium's sandbox refuses to run as root
        *(f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=2000"),
        *(*options, page.as_uri()),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def read(page: Path, tmp_path: Path, width: int = 1200) -> dict:
    """What a reader sees in a frame of that width: Chromium makes no window of less than 500 pixels."""
    text = page.read_text(encoding="utf-8").replace("</body>", READER + "</body>")
    copy = tmp_path / "copy.html"
    frame = f'<iframe srcdoc="{html.escape(text)}" width="{width}" height="900" style="border:0"></iframe>'
    copy.write_text(f'<!doctype html><meta charset="utf-8"><body>{frame}</body>', encoding="utf-8")
    result = browse(copy, tmp_path, "--dump-dom", "--window-size=1500,1000")
    assert "CONSOLE" not in result.stderr, result.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout)
    assert found, result.stderr
    return json.loads(found[1])


def test_one_run_answers_to_the_pointer(tmp_path):
    seen = read(write_report([make_run(tmp_path / "run")]), tmp_path)
    assert seen["axis"] == ["time"]
    assert seen["tip"] == ["20.0 s", "1"]  # the last step: 5 - 40 / 10
    assert seen["circles"] == 6
    values = {"accuracy": "99.5 %", "loss": "1", "val_loss": "0.5", "rate": "0.4", "batch": "64", "speed": "900"}
    assert seen["reads"] == values, "every chart says its value at that moment"
    assert seen["reads_after"] == ""
    assert seen["cursors"] == ["98.75%"], "the heat map's last of 40 columns"
    assert seen["heat_tip"] == ["step 1", "layer4.2.conv3.weight  0.01"], "the lowest row, the first column"
    assert seen["heat_reads"]["loss"] == "4.9"
    assert seen["axis_after"] == ["step"]
    assert seen["tip_after"][0] == "step 40"
    assert seen["hidden"]
    assert seen["requests"] == 0


def test_several_runs_have_a_row_each(tmp_path):
    folders = [make_run(tmp_path / name, steps) for name, steps in (("a", 40), ("b", 20))]
    seen = read(write_report(folders, tmp_path / "both.html"), tmp_path)
    assert [text.split()[0] for text in seen["tip"][1:]] == ["a", "b"]


@pytest.mark.parametrize("width", [390, 800, 1400])
def test_nothing_is_cut_and_everything_is_readable_in_any_window(tmp_path, width):
    for number, folders in enumerate(([make_run(tmp_path / "a")], [tmp_path / "a", make_run(tmp_path / "b")])):
        page = write_report(folders, tmp_path / f"{number}.html")
        seen = read(page, tmp_path, width)
        assert seen["width"] == width
        assert not seen["sideways"]
        assert seen["cut"] == []
        assert seen["small"] == [], "text of less than 9 pixels"


def test_every_layer_has_a_line_of_the_heat_map_that_can_be_read(tmp_path):
    seen = read(write_report([make_run(tmp_path / "a")]), tmp_path, 1400)
    assert [name for name, _, _ in seen["names"]] == ["fc.weight", "layer4.2.conv3.weight"]
    assert all(height >= size > 10 for _, height, size in seen["names"])
    assert seen["cell_height"] == pytest.approx(sum(height for _, height, _ in seen["names"]))


OVERLAPS = """
<script>
const texts = [...document.querySelectorAll('svg text')].filter(text => text.textContent);
const boxes = texts.map(text => text.getBoundingClientRect());
const out = document.createElement('pre');
out.id = 'seen';
out.textContent = JSON.stringify({ texts: texts.length, overlaps: texts.flatMap((text, i) => texts.slice(i + 1).filter(
  (_, k) => { const a = boxes[i], b = boxes[i + 1 + k]; return a.left < b.right && b.left < a.right
    && a.top + 3 < b.bottom && b.top + 3 < a.bottom; }).map(other => text.textContent + ' | ' + other.textContent)) });
document.body.append(out);
</script>
"""


@pytest.mark.parametrize(
    "command",
    [
        ["simulate", "mlperf_resnet50", "--cluster", "dgx_h100", "--gpus", "8,16,32,64,128,256,512,1024,2048,4096"],
        ["simulate", "mlperf_resnet50", "--cluster", "cloud_h200_efa", "--gpus", "8,64,512"],
        ["plan", "resnet50", "--cluster", "abci", "--gpus", "512"],
    ],
)
def test_the_texts_of_a_drawn_prediction_do_not_overlap(tmp_path, capsys, command):
    assert cli.main([*command, "--plot", str(tmp_path / "picture.svg")]) == 0
    page = tmp_path / "page.html"
    page.write_text(f"<body>{(tmp_path / 'picture.svg').read_text()}{OVERLAPS}</body>", encoding="utf-8")
    result = browse(page, tmp_path, "--dump-dom", "--window-size=1150,900")
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout)
    assert found, result.stderr
    seen = json.loads(found[1])
    assert seen["texts"] > 20
    assert seen["overlaps"] == []


def test_it_paints_and_prints(tmp_path):
    page = write_report([make_run(tmp_path / "run")])
    for options, made in (
        (["--screenshot={}", "--window-size=1200,900"], tmp_path / "light.png"),
        (["--screenshot={}", "--window-size=1200,900", "--force-dark-mode"], tmp_path / "dark.png"),
        (["--print-to-pdf={}"], tmp_path / "page.pdf"),
    ):
        result = browse(page, tmp_path, *(option.format(made) for option in options))
        assert made.exists(), result.stderr
    from PIL import Image

    corners = {}
    for name in ("light", "dark"):
        with Image.open(tmp_path / f"{name}.png") as picture:
            colors = picture.convert("RGB").getcolors(1 << 24)
            assert colors
            assert len(colors) > 50
            corners[name] = picture.convert("L").getpixel((2, 2))
    assert corners["light"] > 200 > 60 > corners["dark"]
