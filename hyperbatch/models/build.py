"""Models by name: built in, from timm, or the user's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from hyperbatch.errors import InputError, load_object, nearest
from hyperbatch.models.alexnet import AlexNetBN
from hyperbatch.models.layers import adopt
from hyperbatch.models.resnet import IMAGENET_DEPTHS, SMALL_DEPTHS, imagenet_resnet, small_resnet

DEFAULT_BN_MOMENTUM = 0.1  # torch's

_RESNETS: dict[str, Callable[..., nn.Module]] = {
    **{f"resnet{depth}": partial(imagenet_resnet, depth) for depth in IMAGENET_DEPTHS},
    **{f"resnet{depth}": partial(small_resnet, depth) for depth in SMALL_DEPTHS},
    "resnet20x4": partial(small_resnet, 20, 4),
}
_ALEXNETS: dict[str, Callable[..., nn.Module]] = {
    "alexnet_bn": partial(AlexNetBN, norm_after_pool5=False),
    "alexnet_bn_pool5": partial(AlexNetBN, norm_after_pool5=True),
}


def model_names() -> list[str]:
    """The built-in names, sorted."""
    return sorted([*_RESNETS, *_ALEXNETS])


def create_model(
    name: str,
    *,
    classes: int = 1000,
    in_channels: int = 3,
    zero_init_last_gamma: bool = False,
    bn_momentum: float = DEFAULT_BN_MOMENTUM,
) -> nn.Module:
    """A built-in name, `timm/NAME`, or `package.module:callable`, with freshly drawn weights on the CPU."""
    if name in _RESNETS:
        return _RESNETS[name](
            classes=classes,
            in_channels=in_channels,
            zero_init_last_gamma=zero_init_last_gamma,
            bn_momentum=bn_momentum,
        )
    if name in _ALEXNETS:
        if zero_init_last_gamma:
            raise InputError(f"--zero-init-last-gamma: {name} has no residual blocks; leave it off")
        return _ALEXNETS[name](classes=classes, in_channels=in_channels, bn_momentum=bn_momentum)
    if name.startswith("timm/"):
        model = _timm_model(name.removeprefix("timm/"), classes, in_channels, zero_init_last_gamma)
    elif ":" in name:
        model = _own_model(name, classes, in_channels, zero_init_last_gamma)
    else:
        raise InputError(f"unknown model {name!r}{nearest(name, model_names())}")
    if bn_momentum != DEFAULT_BN_MOMENTUM:  # the default leaves a foreign model its own
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                module.momentum = bn_momentum
    return adopt(model)


def _timm_model(name: str, classes: int, in_channels: int, zero_init_last_gamma: bool) -> nn.Module:
    try:
        import timm  # pyright: ignore[reportMissingImports]
    except (ImportError, RuntimeError) as error:  # RuntimeError: a torchvision that does not fit this torch
        reason = str(error).splitlines()[0]
        raise InputError(
            f"model 'timm/{name}' needs timm, which does not import here ({reason}); pip install 'hyperbatch[timm]'"
        ) from error
    if not timm.is_model(name):
        raise InputError(f"timm has no model {name!r}{nearest(name, timm.list_models())}")
    options = {"zero_init_last": True} if zero_init_last_gamma else {}
    try:
        return timm.create_model(name, num_classes=classes, in_chans=in_channels, **options)
    except TypeError as error:
        raise InputError(f"model 'timm/{name}': {error}") from error


def _own_model(path: str, classes: int, in_channels: int, zero_init_last_gamma: bool) -> nn.Module:
    build = load_object(path, "model")
    try:
        signature = inspect.signature(build)
    except (TypeError, ValueError) as error:  # not callable, or a builtin that says nothing about its arguments
        raise InputError(f"model {path!r} is a {type(build).__name__}; give package.module:callable") from error
    parameters = signature.parameters.values()
    taken = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    takes_all = any(p.kind == p.VAR_KEYWORD for p in parameters)
    offered: dict[str, Any] = {"classes": classes, "num_classes": classes, "in_channels": in_channels}
    if takes_all and "num_classes" not in taken:
        del offered["num_classes"]
    if zero_init_last_gamma:
        if "zero_init_last_gamma" not in taken:
            raise InputError(f"--zero-init-last-gamma: {path} takes no such argument; leave it off")
        offered["zero_init_last_gamma"] = True
    given = {name: value for name, value in offered.items() if takes_all or name in taken}
    try:
        signature.bind(**given)
    except TypeError as error:
        raise InputError(f"model {path!r}: {error}; only {', '.join(given) or 'nothing'} can be given to it") from error
    model = build(**given)
    if not isinstance(model, nn.Module):
        raise InputError(f"model {path!r} returned a {type(model).__name__}; it must return a torch.nn.Module")
    return model
