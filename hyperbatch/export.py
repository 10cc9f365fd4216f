"""Exports a trained model to a file: its weights and everything that is needed to use them.

    run, checkpoint ──load_trained──┐                          ┌── export ──────> model.safetensors
    model.safetensors ─load_trained─┴─> TrainedModel ──────────┼── export_onnx ─> model.onnx
                                        build() -> nn.Module   └── (run only) export_dcp ─> model.dcp/

A file describes how its model is built, the names of its classes, and how images are preprocessed. Loading it runs no
code from it: the code of a custom model is imported only if the caller trusts the file.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from hyperbatch import checkpoint, durable
from hyperbatch.checkpoint import Checkpoint
from hyperbatch.config import Config
from hyperbatch.errors import InputError
from hyperbatch.models import create_from
from hyperbatch.vocabulary import IMAGENET_MEAN, IMAGENET_STD, TIMM_MODEL

CHECKED_IMAGES = 3  # batch size with which an ONNX file is compared with the model
CHECKED_SHARE = 1e-3  # largest difference as a share of the largest logit: the order of additions differs


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedModel:
    """Weights with merged batch-norm statistics, and everything that is needed to use them."""

    config: Config  # of the run
    classes: tuple[str, ...]
    channels: int
    mean: tuple[float, ...]  # of pixels in [0, 1]; empty if an older version did not store it
    std: tuple[float, ...]
    whole: bool  # whether whole images are resized to the model's size; otherwise their centre is cropped
    step: int
    which: str  # "averaged" or "trained"
    weights: dict[str, Tensor]
    path: str

    @classmethod
    def of_checkpoint(cls, saved: Checkpoint, *, averaged: bool) -> Self:
        mean, std = tuple(saved.mean), tuple(saved.std)
        if not mean and saved.config.data.dataset == "images":
            mean, std = IMAGENET_MEAN, IMAGENET_STD  # used for all image files
        return cls(
            config=saved.config,
            classes=tuple(saved.classes),
            channels=saved.channels,
            mean=mean,
            std=std,
            whole=saved.whole,
            step=saved.progress.step,
            which=saved.which(averaged=averaged),
            weights=saved.weights(averaged=averaged),
            path=saved.path,
        )

    @property
    def size(self) -> int:
        """Side length in pixels of the model's input."""
        return self.config.data.eval_size

    @property
    def resize(self) -> int | None:
        """Length of the shorter side of an image before its centre is cropped; None: whole images are used."""
        return None if self.whole else self.config.data.eval_resize

    def about(self) -> dict[str, str]:
        """Returns the metadata of an exported file. Paths on the run's machine are omitted."""
        config = self.config.override(data=None, out=None, init_from=None, resume=False)
        return {
            "model": config.model.model,
            "classes": json.dumps(self.classes),
            "channels": str(self.channels),
            "size": str(self.size),
            "resize": json.dumps(self.resize),
            "mean": json.dumps(self.mean),
            "std": json.dumps(self.std),
            "step": str(self.step),
            "weights": self.which,
            "config": json.dumps(config.to_dict()),
        }

    @classmethod
    def of_file(cls, about: dict[str, str], weights: dict[str, Tensor], path: str) -> Self:
        """The inverse of `about`."""
        try:
            return cls(
                config=Config.from_dict(json.loads(about["config"])),
                classes=tuple(json.loads(about["classes"])),
                channels=int(about["channels"]),
                mean=tuple(json.loads(about["mean"])),
                std=tuple(json.loads(about["std"])),
                whole=json.loads(about["resize"]) is None,
                step=int(about["step"]),
                which=about["weights"],
                weights=weights,
                path=path,
            )
        except InputError:
            raise
        except (KeyError, TypeError, ValueError, AttributeError):
            raise InputError(
                f"{path} contains weights, but not the names of the model and the classes; give a run's folder, a "
                "checkpoint, or a file that `hyperbatch export` wrote"
            ) from None

    def check_trust(self, trust_code: bool, *, data: bool = False) -> None:
        """Raises InputError if using the model, or with `data` its data set, would import code that the file names,
        unless `trust_code` is True."""
        named = {"model": self.config.model.model} | ({"data set": self.config.data.dataset} if data else {})
        for what, name in named.items():
            if ":" in name and not name.startswith(TIMM_MODEL) and not trust_code:
                raise InputError(
                    f"{self.path} names {name} as its {what}, which is Python code that would be imported and run; "
                    "use --trust-code (in Python trust_code=True) if you trust it"
                )

    def build(self, *, trust_code: bool = False) -> nn.Module:
        """Returns the model with these weights, in evaluation mode, on the CPU."""
        self.check_trust(trust_code)
        model = create_from(self.config.model, classes=len(self.classes), in_channels=self.channels)
        if self.config.optim.precision == "fp64":
            model.double()  # before the weights are copied, which would otherwise be rounded
        checkpoint.fill_model(model, self.weights, where=self.path)
        return model.eval()


def load_trained(path: Path, *, averaged: bool = True) -> TrainedModel:
    """Loads a run's newest checkpoint from its folder, a checkpoint, or a file that `export` wrote. Runs no code from
    it.

    averaged: as for `Checkpoint.weights`.
    """
    if path.suffix == ".onnx" and path.exists():
        raise InputError(
            f"{path} is an export for other programs; use the run, a checkpoint, or a .safetensors file of it"
        )
    if path.suffix != ".safetensors" or path.is_dir():
        return TrainedModel.of_checkpoint(checkpoint.load(path), averaged=averaged)
    weights = checkpoint.load_weights(path).tensors
    trained = TrainedModel.of_file(checkpoint.safetensors_metadata(path), weights, str(path))
    if trained.which == "averaged" and not averaged:
        raise InputError(f"{path} holds averaged weights only; for --weights trained give the run or a checkpoint")
    return trained


def export(run: Path, output: Path | None = None, *, averaged: bool = True) -> Path:
    """Writes a run's newest weights, with merged batch-norm statistics, as safetensors with torchvision's names.

    averaged: as for `Checkpoint.weights`.
    """
    from safetensors.torch import save_file

    trained = load_trained(run, averaged=averaged)
    path = output or _beside(run) / "model.safetensors"
    tensors = {name: tensor.contiguous() for name, tensor in trained.weights.items()}
    with _whole(path) as partial:
        save_file(tensors, partial, metadata={"format": "pt", **trained.about()})
    return path


def export_onnx(run: Path, output: Path | None = None, *, averaged: bool = True, trust_code: bool = False) -> Path:
    """Writes a run's newest weights as an ONNX model: images float32[n, channels, size, size] -> logits[n, classes].

    Images must be normalised as the file's metadata says, which is the same as that of `export`. If onnxruntime is
    installed, the file's logits are compared with the model's before the file gets its name.
    """
    trained = load_trained(run, averaged=averaged)
    path = output or _beside(run) / "model.onnx"
    model = trained.build(trust_code=trust_code).float()
    images = torch.randn(
        CHECKED_IMAGES, trained.channels, trained.size, trained.size, generator=torch.Generator().manual_seed(0)
    )
    with torch.no_grad():
        expected = model(images)
    program = _onnx_program(model, images)
    program.model.metadata_props.update(trained.about())
    with _whole(path) as partial:
        program.save(partial, external_data=False)
        _check_onnx(partial, images, expected)
    return path


def _onnx_program(model: nn.Module, images: Tensor) -> Any:
    try:
        import onnxscript  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise InputError(f"--format onnx needs {error.name}; run pip install 'hyperbatch[onnx]'") from error
    with warnings.catch_warnings(), _quiet_onnx():
        warnings.simplefilter("ignore")  # torch's exporter calls what torch deprecates
        try:
            return torch.onnx.export(
                model,
                (images,),
                dynamo=True,
                verbose=False,
                dynamic_shapes=({0: torch.export.Dim("batch")},),
                input_names=["images"],
                output_names=["logits"],
            )
        except (torch.onnx.OnnxExporterError, RuntimeError) as error:
            while error.__cause__ is not None:  # finds the error of the step that failed
                error = error.__cause__
            reason = (str(error).strip().splitlines() or [""])[0]
            raise InputError(
                f"torch cannot make an ONNX program of the model ({type(error).__name__}: {reason}); use --format "
                "safetensors"
            ) from error


@contextlib.contextmanager
def _quiet_onnx() -> Iterator[None]:
    """A context without torch's warnings about packages for ONNX that are not installed."""
    import logging

    log = logging.getLogger("torch.onnx")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _check_onnx(path: Path, images: Tensor, expected: Tensor) -> None:
    try:
        import onnxruntime  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
    for count in (CHECKED_IMAGES, 1):  # also a batch size different from that of the export
        (answer,) = session.run(None, {"images": images[:count].numpy()})
        worst = (torch.from_numpy(answer) - expected[:count]).abs().max().item()
        if not worst <= CHECKED_SHARE * expected.abs().max().item():
            raise InputError(f"onnxruntime's logits differ from torch's by up to {worst:.2g}; no file was written")


def export_dcp(run: Path, output: Path | None = None, *, averaged: bool = True) -> Path:
    """Writes a run's newest checkpoint as a folder that torch.distributed.checkpoint loads on any number of ranks.

        model.NAME                       weights and merged batch-norm statistics, as `export` writes them
        optimizer.state.NAME.KEY         e.g. momentum_buffer, named as by get_optimizer_state_dict
        hyperbatch.json                  next to them: config and progress, for people and scripts

    averaged: as for `Checkpoint.weights`.
    """
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

    if run.suffix == ".safetensors" and not run.is_dir():
        raise InputError(f"{run} has no optimizer state; give the folder of the run or a checkpoint for --format dcp")
    saved = checkpoint.load(run)
    path = output or _beside(run) / "model.dcp"
    if path.exists():
        raise InputError(f"{path} exists already; remove it or choose another --output")
    state: dict[str, dict[str, Tensor]] = {}
    for name, tensor in saved.optimizer.items():
        key, _, parameter = name.partition("/")
        if parameter in saved.model and key != "master":  # the weights are the masters
            state.setdefault(parameter, {})[key] = tensor
    about = {
        "config": saved.config.to_dict(),
        "progress": asdict(saved.progress),
        "classes": saved.classes,
        "mean": saved.mean,
        "std": saved.std,
        "weights": saved.which(averaged=averaged),
    }
    partial = path.with_name(path.name + durable.PARTIAL)
    try:
        partial.mkdir()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is .*single process")  # that is intended
            tensors = {"model": saved.weights(averaged=averaged), "optimizer": {"state": state}}
            save_dcp(tensors, checkpoint_id=partial, no_dist=True)
        (partial / "hyperbatch.json").write_text(json.dumps(about, indent=2) + "\n")
        partial.rename(path)
    except (OSError, CheckpointException) as error:
        shutil.rmtree(partial, ignore_errors=True)
        causes = [cause for cause, _ in error.failures.values()] if isinstance(error, CheckpointException) else []
        raise InputError(f"{path} cannot be written: {(causes or [error])[0]}; choose another --output") from None
    return path


EXPORTS: dict[str, Callable[..., Path]] = {"safetensors": export, "dcp": export_dcp, "onnx": export_onnx}


def _beside(run: Path) -> Path:
    """Returns the default folder of a run's exports."""
    return run if run.is_dir() else run.parent


@contextlib.contextmanager
def _whole(path: Path) -> Iterator[Path]:
    """A context that yields a temporary path. Its file is renamed to `path` once it is complete, with the permissions
    of a new file."""
    if path.is_dir():
        raise InputError(f"--output {path} is a folder; give the name of a file")
    partial = path.with_name(path.name + durable.PARTIAL)
    try:
        partial.touch()
        permissions = stat.S_IMODE(partial.stat().st_mode)
        yield partial
        partial.chmod(permissions)  # safetensors creates a new file that only the owner may read
        os.replace(partial, path)
    except InputError:
        raise
    except Exception as error:
        why = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be written: {why}; choose another --output") from None
    finally:
        with contextlib.suppress(OSError):  # the folder is read-only, which was reported
            partial.unlink(missing_ok=True)
