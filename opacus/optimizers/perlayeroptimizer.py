"""Per-layer clipping: each parameter has a clipping norm of its own."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.core.privacy.clipping import Clipped, clip_each
from opacus.optimizers.optimizer import DPOptimizer
from opacus.optimizers.utils import check_norm_count


class DPPerLayerOptimizer(DPOptimizer):
    """:class:`DPOptimizer` with ``max_grad_norm`` a list, one norm for each parameter.

    The noise is scaled with the L2 norm of the list, which bounds what one sample can
    change (McMahan et al., arXiv:1710.06963). ``max_grad_norm`` then reads as that
    number, ``max_grad_norms`` as the list.

    Raises:
        ValueError: The list has not one norm for each trainable parameter.
    """

    def _set_up(self) -> None:
        super()._set_up()
        check_norm_count(self._privacy.max_grad_norms or self.max_grad_norm, len(self.params))
        self._limited = list(self.params)  # in the order of the norms; some may be frozen later

    @property
    def max_grad_norms(self) -> list[float]:
        """Clipping norm of each parameter, in the order ``params`` had in ``make_private``."""
        return self._privacy.max_grad_norms or []

    @max_grad_norms.setter
    def max_grad_norms(self, value: list[float]) -> None:
        self._privacy.max_grad_norm = value

    def _clip(self, used: list[nn.Parameter], samples: list[Tensor]) -> list[Clipped]:
        if not samples:
            return []
        limit_of = {id(p): c for p, c in zip(self._limited, self.max_grad_norms, strict=True)}
        names = [f"{i}, of shape {tuple(p.shape)}" for i, p in enumerate(used)]
        limits = {n: limit_of[id(p)] for n, p in zip(names, used, strict=True) if id(p) in limit_of}
        norms = dict(zip(names, self._norms(samples), strict=True))
        clipped = clip_each(norms, limits)
        return [Clipped(clipped.of(name), clipped.excluded) for name in norms]
