"""The report in a real browser, from a file: the script runs, the charts answer to the pointer, nothing is logged."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

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
document.querySelector('[data-set-axis=step]').click();
seen.axis_after = shown();
seen.tip_after = move(0.999);
svg.dispatchEvent(new PointerEvent('pointerleave'));
seen.hidden = document.querySelector('.tip').hidden;
seen.sideways = document.documentElement.scrollWidth > document.documentElement.clientWidth;
seen.requests = performance.getEntriesByType('resource').length;
const out = document.createElement('pre');
out.id = 'seen';
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>
"""


def make_run(folder: Path, steps: int = 40) -> Path:
    with RunWriter(folder, tensorboard=False) as writer:
        for step in range(1, steps + 1):
            place = {"step": step, "epoch": step / 10, "time_s": step / 2}
            writer.step(**place, loss=5 - step / 10, lr=step / 100, global_batch=32 + step // 30 * 32, images_per_s=900)
            if step % 10 == 0:
                writer.eval(**place, top1=step / steps * 0.995, top5=0.999, val_loss=20 / step, samples=360)
    RunRecord(
        recipe="digits",
        config={"run": {"seed": 0}},
        environment={"device": "cpu", "device_type": "cpu", "cores": 2},
        world_size=2,
        grid="1x2",
        result=Result(reached=True, target_top1=0.99, top1=0.995, time_to_target_s=20, train_s=19, steps=steps),
        classes=[f"Saint Bernard, kind {number}" for number in range(12)],
        by_class={"samples": [30] * 12, "right": list(range(18, 30)), "confusions": [[0, 1, 9], [3, 2, 4]]},
        trust_ratios={"fc.weight": 0.1, "conv1.weight": 0.01},
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


def read(page: Path, tmp_path: Path, *options: str) -> dict:
    copy = tmp_path / "copy.html"
    copy.write_text(page.read_text(encoding="utf-8").replace("</body>", READER + "</body>"), encoding="utf-8")
    result = browse(copy, tmp_path, "--dump-dom", *options)
    assert "CONSOLE" not in result.stderr, result.stderr
    found = re.search(r'<pre id="seen">(.*?)</pre>', result.stdout)
    assert found, result.stderr
    return json.loads(found[1])


def test_one_run_answers_to_the_pointer(tmp_path):
    seen = read(write_report([make_run(tmp_path / "run")]), tmp_path, "--window-size=1200,900")
    assert seen["axis"] == ["time"]
    assert seen["tip"] == ["20.0 s", "1"]  # the last step: 5 - 40 / 10
    assert seen["circles"] == 6
    assert seen["axis_after"] == ["step"]
    assert seen["tip_after"][0] == "step 40"
    assert seen["hidden"]
    assert seen["requests"] == 0


def test_several_runs_have_a_row_each(tmp_path):
    folders = [make_run(tmp_path / name, steps) for name, steps in (("a", 40), ("b", 20))]
    seen = read(write_report(folders, tmp_path / "both.html"), tmp_path, "--window-size=1200,900")
    assert [text.split()[0] for text in seen["tip"][1:]] == ["a", "b"]


def test_a_narrow_window_does_not_scroll_sideways(tmp_path):
    for number, folders in enumerate(([make_run(tmp_path / "a")], [tmp_path / "a", make_run(tmp_path / "b")])):
        page = write_report(folders, tmp_path / f"{number}.html")
        assert not read(page, tmp_path, "--window-size=500,900")["sideways"]


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
