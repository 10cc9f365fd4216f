"""Forward and backward in 16 bit; masters, norms and trust ratio in fp32 (Tencent's mixed-precision LARS).

    scaler = LossScaler("fp16", optimizer, device=device)     # takes any precision; only fp16 is scaled
    arena.zero_grad()
    scaler.backward(loss)                                     # gradients are multiplied by the scale, in 16 bit
    ...                                                       # all-reduce them unchanged: an inf reaches every rank
    optimizer.step()                                          # unscales inside; an inf or nan skips the whole step
    scaler.update()                                           # halves the scale after a skip, doubles it now and then

Nothing here waits for the device. `scaler.skipped` counts skipped steps on the device; reading it synchronises.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from hyperbatch.errors import InputError, check_kind, check_number, check_whole, nearest
from hyperbatch.optim.base import LayerwiseOptimizer
from hyperbatch.vocabulary import PRECISION_DTYPE

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, dtype) for name, dtype in PRECISION_DTYPE.items()}


def working_dtype(precision: str) -> torch.dtype:
    """The dtype of weights, activations and gradients in a run of this precision."""
    if precision not in DTYPES:
        raise InputError(f"unknown precision {precision!r}{nearest(precision, list(DTYPES))}")
    return DTYPES[precision]


class _StartFrom(torch.autograd.Function):
    """loss.backward(start) without the imports (sympy) with which torch checks a given gradient: they take 1 to 2 s."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, start: Tensor) -> Tensor:
        ctx.start = start
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.start.clone(), None  # a hook on the loss may change its gradient in place


class LossScaler:
    """Dynamic loss scaling. The optimizer's norms reveal infs, so no additional pass over the gradients is needed.

        scaler = LossScaler("fp16", optimizer, device=device)
        scaler.backward(loss)                # or scaler.scale(loss).backward()
        scaler.clip_grad_norm_(1.0)          # to clip gradients; use this instead of torch's
        optimizer.step()                     # divides by the scale; an inf or nan skips the step
        scaler.update()

    Only fp16 is scaled. In other precisions the scaler counts skipped steps, so that the loop looks the same.
    """

    def __init__(
        self,
        precision: str,
        optimizer: LayerwiseOptimizer,
        *,
        device: torch.device | str = "cpu",
        initial_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval_steps: int = 2000,
    ) -> None:
        """precision: that of the gradients, "fp16", "bf16", "fp32" or "fp64".

        The scale is multiplied by `growth_factor` after `growth_interval_steps` good steps in a row, and by
        `backoff_factor` after each skipped step.
        """
        self.enabled = working_dtype(precision) == torch.float16
        advice = "give one of hyperbatch, whose steps divide by the loss scale, or use torch.amp.GradScaler"
        check_kind("optimizer", optimizer, LayerwiseOptimizer, advice)
        check_number("initial_scale", initial_scale, lambda x: 0 < x < math.inf, "a positive number")
        check_number("growth_factor", growth_factor, lambda x: 1 < x < math.inf, "a number above 1")
        check_number("backoff_factor", backoff_factor, lambda x: 0 < x < 1, "a number between 0 and 1")
        check_whole("growth_interval_steps", growth_interval_steps)
        self.optimizer = optimizer
        self.growth_factor, self.backoff_factor = growth_factor, backoff_factor
        self.growth_interval_steps = growth_interval_steps
        self.skipped = torch.zeros((), device=device)  # steps skipped because of an inf or nan, in any precision
        self.skipped_in_a_row = torch.zeros((), device=device)  # the skipped steps in a row that end with the last step
        self._scale = torch.full((), initial_scale if self.enabled else 1.0, device=device)
        self._good_steps = torch.zeros((), dtype=torch.int32, device=device)
        self._divisor: Tensor | None = None  # the scale, or a larger value if gradients are clipped
        if self.enabled:
            optimizer.grad_scale = self._scale

    def scale(self, loss: Tensor) -> Tensor:
        # The loss may be 16-bit, and multiplied by the scale it would overflow there.
        return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self._scale if self.enabled else loss

    def backward(self, loss: Tensor) -> None:
        """Like `scale(loss).backward()`, but backward starts from a copy of the scale if it can: one kernel less."""
        start = self._scale
        if (loss.dtype, loss.shape, loss.device) == (start.dtype, start.shape, start.device):
            _StartFrom.apply(loss, start).backward()
        else:
            self.scale(loss).backward()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        """Clips the gradients of the next step to this norm over all parameters. Returns their norm before clipping.

        Call it before `optimizer.step()`, with gradients as backward or the exchange left them. torch's
        `clip_grad_norm_` would include the loss scale in their norm. No gradient is rewritten: the step divides by a
        larger number than the scale. With `GradSync(sharded=True)` a rank does not have all gradients; clip without
        sharding.
        """
        check_number("max_norm", max_norm, lambda x: 0 < x < math.inf, "a positive number")
        norm = self.optimizer.grad_norm()
        if self._divisor is None:
            self._divisor = self._scale.clone()
        torch.maximum(self._scale, (norm / max_norm).to(self._scale), out=self._divisor)
        self.optimizer.grad_scale = self._divisor
        return norm / self._scale

    def update(self) -> None:
        """Adjusts the scale. Call it after each `optimizer.step()`."""
        found = self.optimizer.last_found_inf
        if found is None:
            return
        self.skipped.add_(found)
        torch.addcmul(found, found, self.skipped_in_a_row, out=self.skipped_in_a_row)  # one more, or 0
        if self.enabled:
            torch._amp_update_scale_(  # pyright: ignore[reportPrivateImportUsage]
                self._scale,
                self._good_steps,
                found,
                self.growth_factor,
                self.backoff_factor,
                self.growth_interval_steps,
            )
        if self._divisor is not None:  # the next step may not clip
            self._divisor.copy_(self._scale)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state as numbers, for a checkpoint. It waits for the device."""
        return {
            "scale": self._scale.item(),
            "good_steps": int(self._good_steps.item()),
            "skipped": int(self.skipped.item()),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.enabled:
            self._scale.fill_(state["scale"])
        if self._divisor is not None:
            self._divisor.copy_(self._scale)
        self._good_steps.fill_(state["good_steps"])
        self.skipped.fill_(state["skipped"])
        self.skipped_in_a_row.zero_()
