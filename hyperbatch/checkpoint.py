"""A checkpoint is one file with the state of a run at a step: checkpoints/step-00000120.pt. It is written atomically.

`Checkpoint` is the content of the file. Tensors are stored by name, so that a different number of ranks can read them;
only the batch-norm statistics, which differ between ranks, are then merged. engine/snapshot.py takes a checkpoint of a
run and continues a run from one; engine/saver.py writes it while the run continues.

Two kinds of checksums are verified when a file is read. The checksum of the file (durable.py) shows that its bytes are
those that were written; it is verified before anything else is read. The checksums of the tensors show that each tensor
still has the values that it had when the checkpoint was taken.
"""

from __future__ import annotations

import contextlib
import errno
import json
import re
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from hyperbatch import durable
from hyperbatch.config import Config, format_value
from hyperbatch.config import fields as config_fields
from hyperbatch.errors import Damaged, InputError
from hyperbatch.models.norm import merge_rows
from hyperbatch.params import head_layer
from hyperbatch.plan.types import GroupPlan
from hyperbatch.vocabulary import DEVICE_PRECISIONS

FORMAT = 1
TABLES = ("model", "norm", "optimizer", "average", "average_norm")  # fields that hold tensors
# The errors of reading values whose types differ from those that were written
NOT_OURS = (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError, OverflowError)
BEST = "best.pt"  # a link to the checkpoint of the best evaluation


@dataclass(slots=True)
class Progress:
    """The progress of a run."""

    step: int = 0  # steps done
    position: int = 0  # samples consumed
    top1: float | None = None
    top1_plain: float | None = None  # without test-time augmentation, if the run uses it
    top5: float | None = None  # with more than five classes
    val_loss: float | None = None
    time_to_target_s: float | None = None
    evaluated_s: float = 0.0  # the run's time when the last evaluation ended
    evaluated_step: int = 0  # steps done at the last evaluation
    best_step: int = 0  # the step of the best checkpoint, among those that followed an evaluation
    best_top1: float | None = None
    passed_over: int = 0  # samples of the stream before `position` that rollbacks have skipped
    rollbacks: list[dict[str, Any]] = field(default_factory=list)  # engine/rollback.py: `Rollback.to_dict()`
    highest_top1: float | None = None  # over all evaluations
    stale_evals: int = 0  # evaluations since the highest one

    def note_eval(self, top1: float) -> None:
        """Must be called after an evaluation."""
        if self.highest_top1 is None or top1 > self.highest_top1:
            self.highest_top1, self.stale_evals = top1, 0
        else:
            self.stale_evals += 1

    def is_stale(self, patience_evals: int) -> bool:
        """Whether the last `patience_evals` evaluations have not improved the accuracy; False if it is 0."""
        return 0 < patience_evals <= self.stale_evals

    def note_best(self) -> None:
        """Must be called when a checkpoint is taken. Of several with the same accuracy, the first stays the best."""
        if self.top1 is None or self.evaluated_step != self.step:
            return
        if self.best_top1 is None or self.top1 > self.best_top1:
            self.best_step, self.best_top1 = self.step, self.top1


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixed:
    """What a run measured before its first step. A resumed run uses the same values, because others would give other
    bits. Older checkpoints may lack the last three."""

    order: list[str]  # names of parameters, in the order in which backward finishes them
    plan: GroupPlan
    max_batch_per_rank: int  # samples of a micro-step that fit into memory
    decoder: str | None = None  # decoder of JPEG files
    cpu_decode_share: float = 0.0  # the share of JPEG files that the CPU decodes next to a GPU's decoder
    data: dict[str, dict[str, Any]] | None = None  # split -> the samples that it contains (data/identity.py)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A run at a step. The fields are the keys of the file, except `path` and `skipped`, which `load` adds."""

    config: Config
    progress: Progress
    fixed: Fixed
    clock: dict[str, float]
    data_wait_s: float
    model: dict[str, Tensor]  # name -> weight; fp32 masters in 16-bit runs
    norm: dict[str, Tensor]  # name -> tensor[world_size, ...]: batch-norm statistics of every rank
    optimizer: dict[str, Tensor]
    scaler: dict[str, Any]
    train_samples: int
    classes: list[str]
    channels: int
    average: dict[str, Tensor] = field(default_factory=dict)  # average of the weights over steps, if the run has one
    average_norm: dict[str, Tensor] = field(default_factory=dict)  # name -> tensor[world_size, ...]
    mean: list[float] = field(default_factory=list)  # mean of pixels in [0, 1] for normalisation; [] in older files
    std: list[float] = field(default_factory=list)  # their standard deviation; [] in older files
    whole: bool = False  # whether evaluation uses whole images instead of their centre
    path: str = ""
    skipped: tuple[str, ...] = ()  # why newer checkpoints could not be read

    def to_dict(self) -> dict[str, Any]:
        """Returns the content of the file: tensors, lists, strings and numbers, which torch loads without running
        code."""
        stored = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("path", "skipped")}
        fixed = {f.name: getattr(self.fixed, f.name) for f in fields(self.fixed)} | {"plan": self.fixed.plan.to_dict()}
        return (
            {"format": FORMAT}
            | stored
            | {
                "config": self.config.to_dict(),
                "progress": asdict(self.progress),
                "fixed": fixed,
            }
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        fixed: dict[str, Any] = _known(Fixed, values["fixed"])
        typed = {
            "config": Config.from_dict(values["config"]),
            "progress": Progress(**_known(Progress, values["progress"])),
            "fixed": Fixed(**{**fixed, "plan": GroupPlan.from_dict(fixed["plan"])}),
        }
        return cls(**_known(cls, values) | typed)

    def weights(self, *, averaged: bool = True) -> dict[str, Tensor]:
        """Returns weights and merged batch-norm statistics, for evaluation and export.

        averaged: True returns the averaged weights of a run that evaluates these; False returns the trained weights.
        """
        try:
            trained = {**self.model, **merge_rows(self.norm)}
            if self.which(averaged=averaged) == "trained":
                return trained
            return {**trained, **self.average, **merge_rows(self.average_norm)}
        except NOT_OURS as error:
            raise InputError(f"checkpoint {self.path}: its statistics do not fit each other: {error}") from error

    def which(self, *, averaged: bool = True) -> str:
        """Returns which weights `weights` returns: "averaged" or "trained". Lookahead's average does not count, because
        the trained weights are set to it."""
        return "averaged" if averaged and self.config.optim.averaging == "ema" else "trained"


def save(folder: Path, saved: Checkpoint, *, keep: int, keep_best: bool = True) -> Path:
    """Writes step-N.pt (`durable.write`), then deletes all but the newest `keep` and, with `keep_best`, the best
    one."""
    durable.make_folder(folder)
    path = _path(folder, saved.progress.step)
    values = saved.to_dict()
    values["checksums"] = checksums(values)
    durable.write(path, lambda file: torch.save(values, file))
    best = _path(folder, saved.progress.best_step)
    files = _files(folder)  # does not contain this file if the folder was deleted meanwhile
    before, after = [file for file in files if file < path], [file for file in files if file > path]
    # Later files are from before this run was rolled back or resumed; they must not be taken for its newest ones.
    for old in [*before[: max(0, len(before) + 1 - keep)], *after]:
        if not (keep_best and old == best):
            old.unlink(missing_ok=True)
    _link_best(folder / BEST, best)
    return path


def _link_best(link: Path, best: Path) -> None:
    """Gives the best checkpoint a second name, if it is kept and the file system has links."""
    with contextlib.suppress(OSError):
        if not best.exists():
            link.unlink(missing_ok=True)
        elif not link.is_symlink() or link.readlink() != Path(best.name):
            partial = link.with_suffix(durable.PARTIAL)
            partial.unlink(missing_ok=True)
            partial.symlink_to(best.name)
            partial.replace(link)


def _path(folder: Path, step: int) -> Path:
    return folder / f"step-{step:08d}.pt"


def _files(folder: Path) -> list[Path]:
    return sorted(p for p in folder.glob("step-*.pt") if re.fullmatch(r"step-\d+\.pt", p.name))


def load(path: Path, *, before_step: int | None = None) -> Checkpoint:
    """Returns one checkpoint, or the newest readable one of a run's folder. before_step: only older ones are
    considered."""
    if path.is_dir():
        return _load_newest(path / "checkpoints" if (path / "checkpoints").is_dir() else path, before_step)
    try:
        values = _read(path)
    except InputError:
        raise
    except FileNotFoundError:
        raise InputError(
            f"{path} does not exist; give the folder of a run, a checkpoint or an exported model"
        ) from None
    except Exception as error:
        # EINVAL: in a truncated file, torch seeks to a position before the file's beginning.
        if isinstance(error, OSError) and error.errno != errno.EINVAL:
            raise InputError(f"{path} cannot be read: {error.strerror or error}") from error
        raise Damaged(f"{path} cannot be read: it is damaged or not a checkpoint ({type(error).__name__})") from error
    if not _is_checkpoint(values):
        raise InputError(f"{path} is not a hyperbatch checkpoint of format {FORMAT}")
    return _checkpoint_of(values, path)


def _checkpoint_of(values: Mapping[str, Any], path: Path) -> Checkpoint:
    """Returns the checkpoint with these values, which were read from `path`. Raises InputError if they are not
    complete."""
    try:
        _check_tables(values)
        return replace(Checkpoint.from_dict(values), path=str(path))
    except InputError as error:
        raise InputError(f"checkpoint {path}: {error}") from error
    except NOT_OURS as error:
        raise InputError(f"checkpoint {path} is not complete: {error}") from error


def _check_tables(values: Mapping[str, Any]) -> None:
    """Raises InputError if a table does not map names to tensors, or if the fields that describe images and classes
    have wrong types. The file may come from anybody."""
    for table in TABLES:
        tensors = values.get(table, {})
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in tensors.items()
        ):
            raise InputError(f"its {table!r} is not a table of tensors")
    for table in ("norm", "average_norm"):
        if len({tensor.shape[:1] for tensor in values.get(table, {}).values()} | {torch.Size()}) > 2:
            raise InputError(f"its {table!r} has entries of different numbers of ranks")
    for name, kind, what in (("classes", str, "names"), ("mean", float, "numbers"), ("std", float, "numbers")):
        found = values.get(name, [])
        if not isinstance(found, list) or not all(isinstance(item, kind) for item in found):
            raise InputError(f"its {name!r} is not a list of {what}")
    if type(values["channels"]) is not int or values["channels"] < 1:
        raise InputError("its 'channels' is not a number of channels")


def _read(path: Path) -> Any:
    """Returns the content of any file that torch.save has written. Raises Damaged if a checksum does not match."""
    checked = durable.check(path)
    values = torch.load(path, map_location="cpu", weights_only=True)
    if not _is_checkpoint(values) or "checksums" not in values:  # older checkpoints have none
        return values
    if not checked:
        raise Damaged(f"checkpoint {path} is damaged: its checksum is missing")
    found, written = checksums(values), values["checksums"]
    changed = [name for name in found | written if found.get(name) != written.get(name)]
    if changed:
        raise Damaged(f"checkpoint {path} is damaged: {changed[0]} does not match its checksum")
    return values


def checksums(values: Mapping[str, Any]) -> dict[str, int]:
    """Returns the CRC-32 of each tensor of a checkpoint's values, e.g. of `model/fc.weight`."""
    tensors = {f"{table}/{name}": tensor for table in TABLES for name, tensor in values.get(table, {}).items()}
    return {name: zlib.crc32(tensor.reshape(-1).view(torch.uint8).numpy()) for name, tensor in tensors.items()}


def _known(kind: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values that are fields of the dataclass: a file from another version may have more."""
    return {f.name: values[f.name] for f in fields(kind) if f.name in values}


def _is_checkpoint(values: Any) -> bool:
    return isinstance(values, dict) and values.get("format") == FORMAT


def _load_newest(folder: Path, before_step: int | None) -> Checkpoint:
    failures: list[InputError] = []
    for path in reversed(_files(folder)):
        if before_step is not None and path >= _path(folder, before_step):
            continue
        try:
            saved = load(path)
        except InputError as error:  # for example, truncated by a full disk: the previous one is tried
            failures.append(error)
            continue
        return replace(saved, skipped=tuple(map(str, failures)))
    if not failures:
        raise InputError(f"{folder} has no checkpoint; use the folder of a run that has saved one")
    kind = Damaged if all(isinstance(failure, Damaged) for failure in failures) else InputError
    raise kind("; ".join(map(str, failures)))


def set_aside(folder: Path) -> None:
    """Renames all checkpoints of a run's folder to step-N.pt.damaged, so that they are not read again."""
    for path in _files(folder / "checkpoints"):
        path.rename(path.with_name(f"{path.name}.damaged"))


def check_same_run(saved: Config, config: Config) -> None:
    """Raises InputError that names every field in which the resumed config differs and must not. A run may become
    longer."""
    if saved.recipe != config.recipe:
        raise InputError(
            f"--resume: the saved run is of recipe {saved.recipe}; "
            f"continue it with `hyperbatch train {saved.recipe} --resume`"
        )
    differences = [
        f"{spec.name} {format_value(spec.of(saved))} -> {format_value(spec.of(config))}"
        for spec in config_fields()
        if not spec.free and spec.of(saved) != spec.of(config) and not _may_become(spec.name, saved, config)
    ]
    if differences:
        raise InputError(
            f"--resume: the config differs from that of the saved run: {'; '.join(differences)}; use another --out"
        )


def _may_become(name: str, saved: Config, config: Config) -> bool:
    if name == "precision":
        return config.optim.precision in DEVICE_PRECISIONS  # the saved precision is used
    return name == "epochs" and config.schedule.epochs > saved.schedule.epochs


class Weights(NamedTuple):
    """Initial weights for a model."""

    tensors: dict[str, Tensor]
    classes: tuple[str, ...] | None  # the classes that they were trained for; None: not known


def load_weights(path: Path) -> Weights:
    """Loads weights from a .safetensors file, a run or checkpoint of ours (norm statistics are merged), or a torch
    state dict."""
    if not path.exists():
        raise InputError(f"weights {path} do not exist")
    if path.suffix == ".safetensors":
        from safetensors.torch import load_file

        try:
            return Weights(load_file(path), _class_names(safetensors_metadata(path)))
        except Exception as error:
            raise InputError(f"weights {path} cannot be read: {error}") from error
    if path.is_dir():
        saved = load(path)
        return Weights(saved.weights(), tuple(saved.classes))
    try:
        state = _read(path)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{path} is not a weights file: it is neither .safetensors nor written by torch.save"
        ) from error
    if _is_checkpoint(state):
        saved = _checkpoint_of(state, path)
        return Weights(saved.weights(), tuple(saved.classes))
    for key in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(key), dict):
            state = state[key]
    if not isinstance(state, dict) or not all(isinstance(v, Tensor) for v in state.values()):
        raise InputError(f"weights {path} do not map names to tensors")
    return Weights({name.removeprefix("module."): tensor for name, tensor in state.items()}, None)


def _class_names(about: Mapping[str, str]) -> tuple[str, ...] | None:
    try:
        names = json.loads(about.get("classes", "null"))
    except ValueError:  # in a file of other programs, "classes" may mean something else
        return None
    return tuple(names) if isinstance(names, list) else None


def safetensors_metadata(path: Path) -> dict[str, str]:
    """Returns the metadata of a .safetensors file."""
    from safetensors import safe_open

    try:
        with safe_open(path, "pt") as file:
            return file.metadata() or {}
    except Exception as error:
        raise InputError(f"weights {path} cannot be read: {error}") from error


def fill_model(model: nn.Module, weights: Mapping[str, Tensor], *, where: str) -> None:
    """Copies weights and, if given, buffers into the model. Raises InputError with the names that do not fit."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = [name for name, _ in model.named_parameters() if name not in weights]
    unknown = [name for name in weights if name not in own]
    other = [name for name in weights if name in own and weights[name].shape != own[name].shape]
    if missing or unknown or other:
        faults = (("missing", missing), ("unknown", unknown), ("of another shape", other))
        text = ", ".join(f"{len(names)} {what} (e.g. {names[0]})" for what, names in faults if names)
        raise InputError(
            f"weights in {where} do not fit the model: {text}; use weights that were trained with the same model and "
            f"the same number of image channels"
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)


def start_from(model: nn.Module, weights: Weights, *, classes: Sequence[str] | None, where: str) -> str | None:
    """Like `fill_model`, but if the weights' heads are for other classes, the model's heads keep their own weights.
    Returns a note if that is the case.

    classes: the names of the data's classes; None if they are not known, and only their number is compared.
    """
    heads = heads_of_others(model, weights, classes)
    if not heads:
        fill_model(model, weights.tensors, where=where)
        return None
    own = {name: param for name, param in model.named_parameters() if _layer(name) in heads}
    body = {name: tensor for name, tensor in weights.tensors.items() if _layer(name) not in heads}
    fill_model(model, body | {name: param.detach() for name, param in own.items()}, where=where)
    ours, theirs = own.get(f"{heads[0]}.weight"), weights.tensors.get(f"{heads[0]}.weight")
    what = f"the heads ({', '.join(heads)}) are" if len(heads) > 1 else f"the head ({heads[0]}) is"
    if ours is None or theirs is None:
        return f"{what} initialised anew: {where} has none"
    if len(ours) == len(theirs):
        return f"{what} initialised anew: {where} was trained for {len(theirs):,} other classes"
    return f"{what} initialised anew with {len(ours):,} classes: {where} was trained for {len(theirs):,}"


def heads_of_others(model: nn.Module, weights: Weights, classes: Sequence[str] | None) -> list[str]:
    """Returns the layers of the model that return logits, if the weights have these layers for other classes or lack
    the last one; otherwise [].

    Some models have several such layers, for example timm's distilled DeiT.
    """
    own = dict(model.named_parameters())
    other = {name for name, tensor in weights.tensors.items() if name in own and tensor.shape != own[name].shape}
    layers = [layer for layer in dict.fromkeys(map(_layer, own)) if layer in map(_layer, other)]
    counts = {(weights.tensors[name].shape[:1], own[name].shape[:1]) for name in other}
    rows_differ = all(weights.tensors[name].shape[1:] == own[name].shape[1:] for name in other)
    if len(counts) == 1 and rows_differ and "" not in layers:
        return layers
    head = head_layer(model)
    if head is None or other:
        return []  # the weights do not fit
    renamed = classes is not None and weights.classes is not None and tuple(classes) != weights.classes
    lacking = all(name not in weights.tensors for name in own if _layer(name) == head)
    return [head] if renamed or lacking else []


def _layer(name: str) -> str:
    return name.rpartition(".")[0]
