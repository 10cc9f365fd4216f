"""The wheel as pip would install it: what is in it, and training from it in another folder without any extra."""

from __future__ import annotations

import email.parser
import email.policy
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Packages of extras. None in sys.modules: neither found nor imported.
WITHOUT = ("tensorboard", "sklearn", "scipy", "simplejpeg", "timm", "torchvision")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by setuptools from a copy of what belongs to it, since a build leaves files beside the sources."""
    pytest.importorskip("setuptools", minversion="77")
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(ROOT / "hyperbatch", source / "hyperbatch", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "NOTICE"):
        shutil.copy(ROOT / name, source / name)
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(folder)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    (path,) = folder.glob("hyperbatch-*-py3-none-any.whl")
    return path


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as file:
        (name,) = (name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
        return email.parser.BytesParser(policy=email.policy.default).parsebytes(file.read(name))


def test_it_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    assert {name.split("/")[0].split("-")[0] for name in names} == {"hyperbatch"}
    ours = {str(path.relative_to(ROOT)) for path in (ROOT / "hyperbatch").rglob("*") if path.is_file()}
    assert {name for name in ours if "__pycache__" not in name} == {n for n in names if n.startswith("hyperbatch/")}
    assert {Path(name).name for name in names if ".dist-info/licenses/" in name} == {"LICENSE", "NOTICE"}


def test_only_extras_need_heavy_packages(metadata):
    needed = {re.split(r"[^\w-]", line)[0] for line in metadata.get_all("Requires-Dist") if "extra ==" not in line}
    assert needed == {"torch", "numpy", "pillow", "rich", "safetensors"}


def test_the_readme_can_be_read_on_pypi(metadata):
    """No link leads nowhere: files are named by their path, and the picture, which PyPI could not load, is left out."""
    text = metadata.get_payload()
    assert re.findall(r"\]\((?!https://)[^)]+\)", text) == []
    assert "![" not in text
    assert "fine-tuning (`docs/finetune.md`)" in text
    assert metadata.get_all("Project-URL") is None, "no address is invented"


def test_it_trains_from_another_folder_without_any_extra(wheel, tmp_path):
    site, work = tmp_path / "site", tmp_path / "work"
    with zipfile.ZipFile(wheel) as file:
        file.extractall(site)
    (site / "sitecustomize.py").write_text(f"import sys\nsys.modules.update(dict.fromkeys({WITHOUT!r}))\n")
    work.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}

    def run(*words):
        done = subprocess.run(
            [sys.executable, *words], cwd=work, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode in (0, 3), done.stderr[-3000:]  # 3: two steps do not reach the target
        return done.stdout

    assert run("-c", "import hyperbatch; print(hyperbatch.__file__)").startswith(str(site))
    out = run("-m", "hyperbatch", "train", "digits", "--max-steps", "2", "--device", "cpu", "--out", "run")
    assert "digits missed its target" in out
    assert "warning" not in out
    assert (work / "run" / "report.html").exists()
    assert not (work / "run" / "tensorboard").exists()
    assert "h200x8" in run("-m", "hyperbatch", "plan", "resnet50", "--cluster", "h200x8", "--gpus", "8")
