"""Averages of the weights over steps: an exponential mean (EMA), or lookahead, which sets the weights to their average.

    every k steps:   average <- decay * average + (1 - decay) * weights
    lookahead:       weights <- average                                     (Zhang et al., 2019; as airbench uses it)

Weights are averaged in fp32 (from their masters, if there are any), and so are batch-norm statistics. The host knows
beforehand whether a step updates the average, and how large the share of the current weights is. The share is stored in
a device tensor and nothing waits for the device, so `update` can be captured in a CUDA graph.
"""

# pyright: reportPrivateImportUsage=false
from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from hyperbatch.arena import Arena
from hyperbatch.config import OptimConfig
from hyperbatch.models.norm import buffer_places
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.params import HALF_DTYPES


def average(old: Tensor, new: Tensor, new_share: float) -> Tensor:
    """The readable reference for `WeightAverage`, whose lerp is likewise exact at shares of 0 and 1."""
    return (1 - new_share) * old + new_share * new


def new_share_at(config: OptimConfig, *, step: int, done: float) -> float | None:
    """The share of the current weights in the average after step `step` (from 1); None if the average does not change.

    done: the fraction of the run that is finished, in [0, 1]. The EMA starts from the weights of its first update, as
    in torch; lookahead starts from the initial weights of the run and ends with the average itself.
    """
    if config.averaging == "none":
        return None
    if config.averaging == "lookahead" and done >= 1:
        return 0.0
    if step % config.averaging_every_steps:
        return None
    if config.averaging == "ema" and step == config.averaging_every_steps:
        return 1.0
    return 1 - config.averaging_decay * done**config.averaging_power


class WeightAverage:
    """The average of an arena's weights and of the model's floating-point buffers, in tensors that stay in place.

    average.set_share(share)         # the result of `new_share_at`, unless it is None
    average.update()                 # after the optimizer's step
    """

    def __init__(self, config: OptimConfig, model: nn.Module, arena: Arena, optimizer: LayerwiseOptimizer) -> None:
        self.config = config
        self._arena, self._optimizer = arena, optimizer
        self._weights = arena.new_buffers()  # the averages, in fp32, or in fp64 if the weights are fp64
        wide = torch.float64 if arena.dtype == torch.float64 else torch.float32
        places = buffer_places(model).items()
        self._places = {name: place for name, place in places if place[0].get_buffer(place[1]).is_floating_point()}
        self._sizes = [buffer.numel() for buffer in self._buffers()]
        self._now = torch.zeros(sum(self._sizes), dtype=wide, device=arena.device)  # the model's buffers, concatenated
        self._statistics = torch.zeros_like(self._now)  # the averages of these buffers
        self.share = torch.zeros((), dtype=wide, device=arena.device)  # share of the current weights at the next update
        self.reset()

    def reset(self) -> None:
        """Sets the average to the current weights and statistics."""
        self.set_share(1.0)
        self._take_in()

    def set_share(self, new_share: float) -> None:
        """Sets the share for the next update. Does not wait for the device."""
        self.share.fill_(new_share)

    @torch.no_grad()
    def update(self) -> None:
        """Adds the current weights to the average; lookahead then also copies the average into the weights."""
        self._take_in()
        if self.config.averaging == "lookahead":
            self._give_out()

    @torch.no_grad()
    def _take_in(self) -> None:
        for dtype, old in self._weights.items():
            old.lerp_(self._full(dtype), self.share)
        if self._sizes:
            torch.cat([buffer.reshape(-1) for buffer in self._buffers()], out=self._now)
            self._statistics.lerp_(self._now, self.share)

    def _give_out(self) -> None:
        arena = self._arena
        for dtype, value in self._weights.items():
            self._full(dtype).copy_(value)
            if dtype in HALF_DTYPES:
                arena.weights[dtype].copy_(value)
        if self._sizes:
            torch._foreach_copy_(self._buffers(), list(self._views(self._statistics).values()))
        self._optimizer.refresh()  # it has to compute its norms of the weights again

    def _full(self, dtype: torch.dtype) -> Tensor:
        """The flat weights of a dtype in full precision."""
        masters = self._arena.masters
        return masters if dtype in HALF_DTYPES and masters is not None else self._arena.weights[dtype]

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        parts = flat.split(self._sizes)
        pairs = zip(self._places, self._buffers(), parts, strict=True)
        return {name: part.view(buffer.shape) for name, buffer, part in pairs}

    def _buffers(self) -> list[Tensor]:
        return [module._buffers[name] for module, name in self._places.values()]  # type: ignore[misc]

    # --- reading ------------------------------------------------------------------------------------------------

    def weights(self) -> dict[str, Tensor]:
        """The average of each trainable parameter, by name, as views in full precision."""
        return self._arena.views(self._weights)

    def statistics(self) -> dict[str, Tensor]:
        """The average of each floating-point buffer of this rank, by name, as views."""
        return self._views(self._statistics)

    def tensors(self) -> list[Tensor]:
        """All tensors that an update changes."""
        return [*self._weights.values(), self._statistics, self.share]

    @torch.no_grad()
    def load(self, weights: Mapping[str, Tensor], statistics: Mapping[str, Tensor]) -> None:
        """Copies in what `weights` and `statistics` return."""
        for name, view in self.weights().items():
            view.copy_(weights[name])
        for name, view in self.statistics().items():
            view.copy_(statistics[name])
