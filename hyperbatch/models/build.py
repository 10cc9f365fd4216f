"""Builds models by name: built-in ones, timm's, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from hyperbatch.config import ModelConfig
from hyperbatch.errors import InputError, check_whole, first_line, load_object, nearest, own_code
from hyperbatch.models.alexnet import AlexNetBN
from hyperbatch.models.initial import dirac_
from hyperbatch.models.layers import adopt
from hyperbatch.models.resnet import IMAGENET_DEPTHS, SMALL_DEPTHS, imagenet_resnet, resnet_d, small_resnet
from hyperbatch.models.vit import VisionTransformer
from hyperbatch.models.whitenet import WhiteNet
from hyperbatch.vocabulary import TIMM_MODEL, is_foreign

DEFAULT_BN_MOMENTUM = 0.1  # torch's
DEFAULT_BN_EPS = 1e-5  # torch's

T = TypeVar("T")

_RESNETS: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(imagenet_resnet, depth) for depth in IMAGENET_DEPTHS},
    "resnet50d": partial(resnet_d, 50),
    **{f"resnet{depth}": partial(small_resnet, depth) for depth in SMALL_DEPTHS},
    "resnet20x4": partial(small_resnet, 20, 4),
}
_ALEXNETS: dict[str, Callable[..., nn.Module]] = {
    "alexnet_bn": partial(AlexNetBN, norm_after_pool5=False),
    "alexnet_bn_pool5": partial(AlexNetBN, norm_after_pool5=True),
}
_WHITENETS: dict[str, Callable[..., nn.Module]] = {
    "whitenet": partial(WhiteNet, (64, 256, 256), 2),
    "whitenet_deep": partial(WhiteNet, (128, 384, 512), 3),
}
_VITS: dict[str, Callable[..., nn.Module]] = {
    "vit_s16": partial(VisionTransformer, patch=16, width=384, depth=12, heads=6),
    "vit_cifar": partial(VisionTransformer, patch=4, width=384, depth=7, heads=6),
}


# Which of the two rates each built-in model supports
_DROPS = {**dict.fromkeys(_ALEXNETS, ("dropout",)), **dict.fromkeys(_VITS, ("dropout", "drop_path"))}
# The names of these arguments in timm's and users' models
_DROP_NAMES = {"dropout": ("dropout", "drop_rate"), "drop_path": ("drop_path", "drop_path_rate")}


def model_names() -> list[str]:
    """The built-in names, sorted."""
    return sorted([*_RESNETS, *_ALEXNETS, *_WHITENETS, *_VITS])


def create_model(
    name: str,
    *,
    classes: int = 1000,
    in_channels: int = 3,
    zero_init_last_gamma: bool = False,
    bn_momentum: float = DEFAULT_BN_MOMENTUM,
    bn_eps: float = DEFAULT_BN_EPS,
    activation: str | None = None,
    dropout: float | None = None,
    drop_path: float | None = None,
    init: str = "default",
    blurpool: bool = False,
) -> nn.Module:
    """Builds a model on the CPU with random initial weights: a built-in name, `timm/NAME`, or
    `package.module:callable`.

    dropout, drop_path: rates for models that support them. None keeps the default of the model.
    """
    check_whole("classes", classes)
    check_whole("in_channels", in_channels)
    if activation is not None and name not in _WHITENETS:
        raise InputError(f"--activation {activation}: {name} has a fixed activation; leave it out")
    if blurpool and name not in _RESNETS:
        raise InputError(f"--blurpool: only the built-in ResNets have it, not {name}; leave it off")
    if zero_init_last_gamma and name in (*_ALEXNETS, *_WHITENETS, *_VITS):
        what = "no residual blocks" if name in _ALEXNETS else "no trained norm scales"
        what = "no norms that end its blocks" if name in _VITS else what
        raise InputError(f"--zero-init-last-gamma: {name} has {what}; leave it off")
    drops = {key: rate for key, rate in (("dropout", dropout), ("drop_path", drop_path)) if rate is not None}
    for key, rate in drops.items():
        if name in model_names() and key not in _DROPS.get(name, ()):
            raise _no_drop(key, rate, name)
    if name in _RESNETS:
        model = _RESNETS[name](
            classes=classes,
            in_channels=in_channels,
            zero_init_last_gamma=zero_init_last_gamma,
            bn_momentum=bn_momentum,
            blurpool=blurpool,
        )
    elif name in _ALEXNETS:
        model = _ALEXNETS[name](classes=classes, in_channels=in_channels, bn_momentum=bn_momentum, **drops)
    elif name in _WHITENETS:
        options = {} if activation is None else {"activation": activation}
        model = _WHITENETS[name](
            classes=classes, in_channels=in_channels, bn_momentum=bn_momentum, bn_eps=bn_eps, **options
        )
    elif name in _VITS:
        model = _VITS[name](classes=classes, in_channels=in_channels, **drops)
    elif is_foreign(name):
        model = adopt(foreign_model(name, classes, in_channels, zero_init_last_gamma, drops))
        if any(param.is_floating_point() and param.dtype != torch.float32 for param in model.parameters()):
            model.float()  # all models start in fp32; the run chooses the precision that it computes in
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data = tensor.data.contiguous()  # the elements of an expanded tensor share memory
    else:
        raise InputError(f"unknown model {name!r}{nearest(name, model_names())}")
    for module in model.modules():
        if isinstance(module, _BatchNorm):  # with the defaults, a foreign model keeps its own values
            module.momentum = module.momentum if bn_momentum == DEFAULT_BN_MOMENTUM else bn_momentum
            module.eps = module.eps if bn_eps == DEFAULT_BN_EPS else bn_eps
    if init == "dirac":
        dirac_(model)
    return model


def foreign_model(
    name: str,
    classes: int,
    in_channels: int = 3,
    zero_init_last_gamma: bool = False,
    drops: dict[str, float] | None = None,
) -> nn.Module:
    """Builds timm's or the user's model unchanged, with torch's own layers. drops: rates of "dropout" and
    "drop_path"."""
    if name.startswith(TIMM_MODEL):
        return _timm_model(name.removeprefix(TIMM_MODEL), classes, in_channels, zero_init_last_gamma, drops or {})
    return _own_model(name, classes, in_channels, zero_init_last_gamma, drops or {})


def create_from(config: ModelConfig, *, classes: int, in_channels: int) -> nn.Module:
    """Builds the model of a config. Weights that come from a file or from the data are not set yet."""
    return create_model(
        config.model,
        classes=classes,
        in_channels=in_channels,
        zero_init_last_gamma=config.zero_init_last_gamma,
        bn_momentum=config.bn_momentum,
        bn_eps=config.bn_eps,
        activation=config.activation,
        dropout=config.dropout,
        drop_path=config.drop_path,
        init=config.init,
        blurpool=config.blurpool,
    )


def without_values(build: Callable[[], T]) -> T:
    """Returns the result of `build` on torch's meta device, which allocates nothing, or on the CPU if `build` needs
    numbers, as for timm's RegNets."""
    try:
        with torch.device("meta"):
            return build()
    except Exception:  # either the meta device fails, or `build` fails on every device
        return build()


def _no_drop(key: str, rate: float, name: str, why: str = "") -> InputError:
    what = {"dropout": "dropout", "drop_path": "stochastic depth"}[key]
    return InputError(f"--{key.replace('_', '-')} {rate:g}: {name} has no {what}{why}; leave it out")


def _timm() -> Any:
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:
        reason, advice = first_line(error), "run pip install 'hyperbatch[timm]'"
        if isinstance(error, RuntimeError):  # torchvision was built for another torch
            advice = f"install the torchvision that was built for torch {torch.__version__}"
        raise InputError(f"timm cannot be imported ({reason}); {advice}") from error
    return timm


def _timm_model(
    name: str, classes: int, in_channels: int, zero_init_last_gamma: bool, drops: dict[str, float]
) -> nn.Module:
    try:
        timm = _timm()
    except InputError as error:
        raise InputError(f"model 'timm/{name}' needs timm: {error}") from error
    if not timm.is_model(name):
        raise InputError(
            f"timm has no model {name!r}{nearest(name, timm.list_models(), listed_by='timm.list_models()')}"
        )
    options: dict[str, Any] = {"zero_init_last": True} if zero_init_last_gamma else {}
    options |= {_DROP_NAMES[key][1]: rate for key, rate in drops.items()}
    try:
        return timm.create_model(name, num_classes=classes, in_chans=in_channels, **options)
    except TypeError as error:
        for key, rate in drops.items():
            if f"'{_DROP_NAMES[key][1]}'" in str(error):
                raise _no_drop(key, rate, f"timm/{name}") from error
        raise InputError(f"model 'timm/{name}': {error}") from error
    except RuntimeError as error:  # the tag of the weights is unknown, such as resnet18.a1
        reason = str(error).partition("\n")[0].rstrip(".")
        raise InputError(f"model 'timm/{name}' cannot be built: {reason}") from error


def fixed_size(model: str) -> int | None:
    """Returns the size in pixels of the only images that a timm model accepts; None if it accepts several sizes, or if
    it cannot be built, which an error says later."""
    try:
        about = _timm().get_pretrained_cfg(model.removeprefix(TIMM_MODEL))
    except (InputError, RuntimeError):  # no timm, or an unknown tag of the weights
        return None
    return about.input_size[-1] if about is not None and about.fixed_input_size else None


def pretrained_weights(model: str, *, in_channels: int, fetch: bool = True) -> dict[str, Tensor]:
    """Returns timm's pretrained weights for one of its models, or for one of our ResNets, which have the same names.
    They include the head that they were trained with. fetch=False: returns tensors without values
    (`without_values`)."""
    name = model.removeprefix(TIMM_MODEL)
    if not model.startswith(TIMM_MODEL) and name not in ("resnet50d", *(f"resnet{depth}" for depth in IMAGENET_DEPTHS)):
        raise InputError(f"--init-from timm: timm has no weights for {model}; use --model timm/NAME or resnet50")
    try:
        timm = _timm()
    except InputError as error:
        raise InputError(f"--init-from timm: {error}") from error
    if not timm.is_model_pretrained(name):
        raise InputError(f"--init-from timm: timm has no pretrained weights for {name!r}; see timm.list_pretrained()")
    try:
        build = partial(timm.create_model, name, pretrained=fetch, in_chans=in_channels)
        return (build() if fetch else without_values(build)).state_dict()
    except Exception as error:  # a hub, a proxy or a cache may raise anything
        reason = first_line(error)
        raise InputError(f"--init-from timm: the weights of {name!r} cannot be fetched: {reason}") from error


def _own_model(
    path: str, classes: int, in_channels: int, zero_init_last_gamma: bool, drops: dict[str, float]
) -> nn.Module:
    build = load_object(path, "model")
    if isinstance(build, nn.Module):
        raise InputError(f"model {path!r} is a network; give the class or the function that builds it")
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError) as error:  # not callable, or a builtin that says nothing about its arguments
        raise InputError(f"model {path!r} is a {type(build).__name__}; give package.module:callable") from error
    parameters = signature.parameters.values()
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    passes_on = any(p.kind == p.VAR_KEYWORD for p in parameters)
    offered: dict[str, Any] = {"classes": classes, "num_classes": classes, "in_channels": in_channels}
    if zero_init_last_gamma:
        if "zero_init_last_gamma" not in taken:
            raise InputError(f"--zero-init-last-gamma: {path} takes no such argument; leave it off")
        offered["zero_init_last_gamma"] = True
    for key, rate in drops.items():
        names = [name for name in _DROP_NAMES[key] if name in taken]
        if not names:
            raise _no_drop(key, rate, path, f" (it takes no argument {' or '.join(_DROP_NAMES[key])})")
        offered[names[0]] = rate
    given = {name: value for name, value in offered.items() if name in taken}
    try:
        signature.bind(**given)
    except TypeError as error:
        names = "classes or num_classes, in_channels, and the others in docs/models.md"
        raise InputError(f"model {path!r}: {error}; give it a default, since only {names} are passed") from error
    with own_code(f"model {path!r}", "it must return a torch.nn.Module"):
        model = _from_factory(build, path, given, offered) if passes_on else build(**given)
    if not isinstance(model, nn.Module):
        raise InputError(f"model {path!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    _check_modules(model, path)
    return model


def _check_modules(model: nn.Module, path: str) -> None:
    """Raises InputError if the model has modules whose weights cannot be accessed one by one, or do not exist yet."""
    for name, module in model.named_modules():
        what = f"model {path!r}: {name or 'the network'} is a {type(module).__name__}"
        if isinstance(module, nn.DataParallel):
            raise InputError(f"{what}; return the network inside of it, which a run distributes by itself (--nproc)")
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(f"{what}, which torch.jit has compiled; return the module that it was made of")
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            if is_lazy(tensor):
                raise InputError(
                    f"{what}, whose size is not known before its first batch; give the number of its inputs, or run "
                    "the network once where it is built"
                )
            if tensor.is_meta and torch.get_default_device().type != "meta":  # --dry-run builds it on the meta device
                raise InputError(f"{what} on torch's meta device, without values; build it on the CPU")
            if tensor.layout != torch.strided:
                raise InputError(f"{what} with a sparse tensor; register a dense one, and make it sparse in forward")


def _from_factory(build: Callable[..., Any], path: str, given: dict[str, Any], offered: dict[str, Any]) -> Any:
    """Calls a factory that passes **kwargs on, like torchvision's, so that its accepted names are unknown.

    given: the arguments that it declares itself. The number of classes is passed under each of its two names in turn,
    with and without the number of channels. Python's TypeError says which argument was not accepted.
    """
    counts = [name for name in ("classes", "num_classes") if name in offered]
    counts = [""] if any(name in given for name in counts) else counts  # it declares one of the names itself
    for channels in ("in_channels", ""):
        for count in counts:
            more = {name: offered[name] for name in (count, channels) if name and name not in given}
            try:
                return build(**given, **more)
            except TypeError as error:
                if not any(f"unexpected keyword argument '{name}'" in str(error) for name in more):
                    raise
    raise InputError(f"model {path!r} has no argument for the number of classes; call it classes or num_classes")
