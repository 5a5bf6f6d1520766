"""Scale-then-privatise: gradients are clipped, and get their noise, as AdamW will scale them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

# Scales are within these powers of two of each other.
_MOST = 30


class ScaledAdamW(torch.optim.AdamW):
    """AdamW whose second moments say how gradients are clipped (arXiv 2507.01129, algorithm 8).

    AdamW divides a parameter's gradient by the root of its second moments. Noise that is the same
    for all elements then drowns those with small gradients. ``make_private`` therefore multiplies
    each parameter's gradient by a scale before the norm is taken and noise is added, and divides by
    it afterwards: the noise is as large as a parameter's gradients are. Scales come from earlier
    private gradients, so they cost no privacy.

    The paper scales each element. Here a parameter has one scale, so that norms are those that
    every mode computes, and it is a power of two: multiplying by it is exact in any dtype. Scales
    are relative: the noise of all elements together has the energy that it would have unscaled.

    Args:
        params: Parameters or groups.
        every: Steps after which scales are computed anew.
        offset: Added to the root of a parameter's mean second moment: a larger one lets scales
            differ less.
        kwargs: Those of ``torch.optim.AdamW``.

    Raises:
        ValueError: A value is out of range.
    """

    def __init__(
        self, params: Iterable[Any], *, every: int = 10, offset: float = 1e-8, **kwargs: Any
    ) -> None:
        if every < 1 or not offset > 0:
            raise ValueError(
                f"every must be at least 1 and offset above 0, got {every!r} and {offset!r}"
            )
        super().__init__(params, **kwargs)
        self.every, self.offset = every, offset
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A state of AdamW has no scales: it begins with equal ones."""
        super().__setstate__(state)
        for group in self.param_groups:
            group.setdefault("taken", 0)
            group.setdefault("exponents", [0] * len(group["params"]))

    def gradient_scales(self) -> list[float]:
        """Of the parameters that are trained, in the order of the groups."""
        return [
            2.0**exponent
            for group in self.param_groups
            for parameter, exponent in zip(group["params"], group["exponents"], strict=True)
            if parameter.requires_grad
        ]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Take a step; see ``torch.optim.AdamW``."""
        loss = super().step(closure)
        for group in self.param_groups:
            group["taken"] += 1
        if self.param_groups[0]["taken"] % self.every == 0:
            self._scale()
        return loss

    @torch.no_grad()
    def _scale(self) -> None:
        places = [
            (group, place, parameter)
            for group in self.param_groups
            for place, parameter in enumerate(group["params"])
            if "exp_avg_sq" in self.state.get(parameter, {})
        ]
        roots = {}
        for group, place, parameter in places:
            state, decay = self.state[parameter], group["betas"][1]
            square = _mean(state["exp_avg_sq"]) / (1 - decay ** float(state["step"]))
            if math.isfinite(square):
                roots[id(group), place] = math.sqrt(max(square, 0.0)) + self.offset
        sizes = {(id(g), place): p.numel() for g, place, p in places}
        energy = sum(sizes[key] * root**2 for key, root in roots.items())
        if not roots or not 0 < energy < math.inf:
            return
        mean = math.sqrt(energy / sum(sizes[key] for key in roots))
        for group, place, _ in places:
            root = roots.get((id(group), place))
            if root is not None:
                exponent = round(math.log2(mean / root))
                group["exponents"][place] = max(-_MOST, min(_MOST, exponent))


def _mean(tensor: Tensor) -> float:
    """Of all ranks' shards."""
    mean: Any = tensor.float().mean()
    return float(mean.full_tensor() if hasattr(mean, "full_tensor") else mean)
