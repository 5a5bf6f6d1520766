"""Per-layer clipping: each parameter has a clipping norm of its own."""

from __future__ import annotations

from torch import Tensor, nn

from opacus.core.clipping import Clipped, clip_each
from opacus.optimizers.optimizer import DPOptimizer, _norms


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
        norms = self._privacy.max_grad_norms
        if norms is None or len(norms) != len(self.params):
            raise ValueError(
                "per-layer clipping needs max_grad_norm as a list with one number for each of the "
                f"{len(self.params)} trainable parameters, got "
                f"{self.max_grad_norm if norms is None else len(norms)}"
            )

    @property
    def max_grad_norms(self) -> list[float]:
        """Clipping norm of each parameter, in the order of ``params``."""
        return self._privacy.max_grad_norms or []

    @max_grad_norms.setter
    def max_grad_norms(self, value: list[float]) -> None:
        self._privacy.max_grad_norm = value

    def _clip(self, used: list[nn.Parameter], samples: list[Tensor]) -> list[Clipped]:
        if not samples:
            return []
        limit_of = {id(p): c for p, c in zip(self.params, self.max_grad_norms, strict=True)}
        limits = {str(i): limit_of[id(p)] for i, p in enumerate(used)}
        norms = {str(i): norm for i, norm in enumerate(_norms(samples))}
        factors, excluded = clip_each(norms, limits)
        return [Clipped(factor, excluded) for factor in factors.values()]
