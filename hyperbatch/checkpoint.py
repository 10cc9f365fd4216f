"""One file holds a run at a step: checkpoints/step-00000120.pt, written whole or not at all.

    model        name -> tensor (fp32 masters in 16-bit runs), without batch-norm statistics
    norm         name -> tensor[world_size, ...]: batch-norm statistics of every rank
    optimizer    name -> tensor
    progress     step, position in the sample stream, clock, results so far
    fixed        what was measured once and must not change: order, group plan, batch that fits, grid
    config       the run's config

Tensors are kept by name, so another world size can read them; only `norm` is merged then.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hyperbatch.config import Config, fields
from hyperbatch.errors import InputError
from hyperbatch.models.norm import merge_norm_statistics

FORMAT = 1


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Writes step-N.pt by an atomic move after the bytes are on disk, then drops all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    partial = path.with_suffix(".partial")
    with open(partial, "wb") as file:
        torch.save({"format": FORMAT, **state}, file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
    saved = _saved(folder)
    newest = saved.index(path)
    # Later files are of an attempt that this run went back behind; they must not pass for its newest.
    for old in [*saved[: max(0, newest + 1 - keep)], *saved[newest + 1 :]]:
        old.unlink(missing_ok=True)
    return path


def _saved(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", p.name))


def load(path: Path) -> dict[str, Any]:
    """One checkpoint, or the newest of a run's folder that can be read; `path` and `skipped` say which it was."""
    if path.is_dir():
        return _load_newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise InputError(f"checkpoint {path} does not exist") from None
    except Exception as error:
        raise InputError(f"checkpoint {path} cannot be read: {type(error).__name__}") from error
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise InputError(f"{path} is not a hyperbatch checkpoint of format {FORMAT}")
    return state | {"path": str(path), "skipped": []}


def _load_newest(folder: Path) -> dict[str, Any]:
    failures = []
    for path in reversed(_saved(folder)):
        try:
            state = load(path)
        except InputError as error:  # torn by a full disk, say: the one before it still counts
            failures.append(str(error))
            continue
        return state | {"skipped": failures}
    raise InputError("; ".join(failures) or f"no checkpoint in {folder}: nothing to resume or evaluate")


def check_same_run(saved: Mapping[str, Any], config: Config) -> None:
    """InputError naming every field in which the resumed config differs and may not."""
    if saved.get("recipe") != config.recipe:
        name = saved.get("recipe")
        raise InputError(
            f"--resume: the saved run is of recipe {name}; continue it with `hyperbatch train {name} --resume`"
        )
    now = config.to_dict()
    differences = []
    for spec in fields():
        # A checkpoint of an older version does not know every field: it ran with the default.
        before, after = saved.get(spec.section, {}).get(spec.name, spec.default), now[spec.section][spec.name]
        if not spec.free and spec.coerce(before) != spec.coerce(after):
            differences.append(f"{spec.name} {before} -> {after}")
    if differences:
        raise InputError(f"--resume: the saved run had another config: {'; '.join(differences)}; use another --out")


def load_weights(path: Path) -> dict[str, Tensor]:
    """name -> tensor from a .safetensors file, a checkpoint of ours (norm statistics merged), or a torch state dict."""
    if not path.exists():
        raise InputError(f"weights {path} do not exist")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except Exception as error:
            raise InputError(f"weights {path} cannot be read: {error}") from error
    if path.is_dir():
        return weights_of(load(path))
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise InputError(f"{path} is no weights file: neither .safetensors nor what torch.save writes") from error
    if isinstance(state, dict) and state.get("format") == FORMAT:
        return weights_of(state)
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise InputError(f"weights {path} hold no name -> tensor table")
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def weights_of(state: Mapping[str, Any]) -> dict[str, Tensor]:
    """Weights and merged batch-norm statistics of a checkpoint: what evaluation and export use."""
    return {**state["model"], **merge_norm_statistics(per_rank(state["norm"]))}


def per_rank(stacked: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """The buffers of each rank from name -> tensor[world_size, ...]."""
    ranks = next((len(tensor) for tensor in stacked.values()), 1)
    return [{name: tensor[rank] for name, tensor in stacked.items()} for rank in range(ranks)]


def export(run: Path, output: Path | None = None) -> Path:
    """Writes a run's newest weights, batch-norm statistics merged, as safetensors with torchvision's names."""
    from safetensors.torch import save_file

    state = load(run)
    path = output or (run if run.is_dir() else run.parent) / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in weights_of(state).items()}
    metadata = {"format": "pt", "model": state["config"]["model"]["model"], "step": str(state["progress"]["step"])}
    try:
        save_file(tensors, path, metadata=metadata)
    except Exception as error:
        raise InputError(f"{path} cannot be written: {error}; choose another --output") from None
    return path
