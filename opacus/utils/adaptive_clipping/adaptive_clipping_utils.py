"""Ghost clipping whose C follows a private quantile of the norms (arXiv:1905.03871).

Between the two backward passes the number of samples within C is released with noise,
C moves, and the new C clips the same batch. The count shares the budget of the noise
multiplier, which the accountant keeps counting; a batch without a step counts, too.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from opacus.core.step.adaptive import Quantile, centred_count, private_fraction
from opacus.privacy_engine import PrivacyEngine
from opacus.utils.fast_gradient_clipping_utils import (
    DPLossFastGradientClipping,
    DPTensorFastGradientClipping,
)

# Noise on the count: this fraction of the expected batch, as the paper suggests.
COUNT_STD = 1 / 20


class DPTensorFastGradientAdaptiveClipping(DPTensorFastGradientClipping):
    """A loss whose ``backward()`` also moves the clipping norm.

    Args:
        module: The private module, or its hooks object.
        optimizer: The private optimizer.
        loss_per_sample: ``[B]`` losses.
        loss_reduction: ``"mean"`` or ``"sum"``.
        target_unclipped_quantile: Fraction of samples that should stay unclipped.
        min_clipbound: Smallest C.
        max_clipbound: Largest C.
        clipbound_learning_rate: Step of the geometric update of C.
        initial_noise_multiplier: Noise multiplier that the accountant counts.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        loss_per_sample: Tensor,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        super().__init__(module, optimizer, loss_per_sample, loss_reduction)
        self.target_unclipped_quantile = target_unclipped_quantile
        self.min_clipbound = min_clipbound
        self.max_clipbound = max_clipbound
        self.clipbound_learning_rate = clipbound_learning_rate
        self.initial_clipping_norm = optimizer.max_grad_norm
        self.initial_noise_multiplier = initial_noise_multiplier

    def _with(self, loss_per_sample: Tensor) -> DPTensorFastGradientAdaptiveClipping:
        return type(self)(
            self.module,
            self.optimizer,
            loss_per_sample,
            self.loss_reduction,
            self.target_unclipped_quantile,
            self.min_clipbound,
            self.max_clipbound,
            self.clipbound_learning_rate,
            self.initial_noise_multiplier,
        )

    def backward(self, retain_graph: bool = False) -> None:  # type: ignore[override]
        """See the base class; after an error the next batch counts anew.

        Raises:
            ValueError: The accountant cannot count one more batch in this step.
        """
        self.optimizer.begin_batch()
        with self.optimizer.refusing():
            self.optimizer.check_early(self.optimizer.clipped_batches + 1)
        try:
            super().backward(retain_graph)
        except BaseException:
            self.optimizer.give_up_step()
            raise

    def _norms_are_known(self, norms: Tensor) -> None:
        """Move C; the same batch is then clipped with the new C.

        Raises:
            ValueError: The expected batch is too small for a private count.
        """
        self._move_clipping_norm(norms)

    def _move_clipping_norm(self, norms: Tensor) -> None:
        privacy, parallelism = self.optimizer._privacy, self.optimizer._parallelism
        quantile = Quantile(
            self.target_unclipped_quantile,
            self.clipbound_learning_rate,
            self.min_clipbound,
            self.max_clipbound,
        )
        batch = (privacy.expected_batch_size or len(norms)) * parallelism.world_size
        std = batch * COUNT_STD
        privacy.count_noise_std = std
        within = torch.isfinite(norms) & (norms <= privacy.max_grad_norm)
        count = centred_count(within) / self.module.copies_of_samples
        self.optimizer.agree()
        fraction = private_fraction(count, std, batch, parallelism, norms.device)
        self.optimizer.pay_early(self.optimizer.clipped_batches + 1)
        privacy.max_grad_norm = quantile.update(privacy.max_grad_norm, fraction)


class DPLossFastGradientAdaptiveClipping(DPLossFastGradientClipping):
    """The criterion of adaptive ghost clipping.

    Arguments are those of :class:`DPLossFastGradientClipping` and, behind them, of
    :class:`DPTensorFastGradientAdaptiveClipping`.
    """

    def __init__(
        self,
        module: Any,
        optimizer: Any,
        criterion: Any,
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        initial_noise_multiplier: float = 1.0,
    ) -> None:
        Quantile(target_unclipped_quantile, clipbound_learning_rate, min_clipbound, max_clipbound)
        super().__init__(module, optimizer, criterion, loss_reduction)
        self.target_unclipped_quantile = target_unclipped_quantile
        self.min_clipbound = min_clipbound
        self.max_clipbound = max_clipbound
        self.clipbound_learning_rate = clipbound_learning_rate
        self.initial_noise_multiplier = initial_noise_multiplier

    def __call__(self, *args: Any, **kwargs: Any) -> DPTensorFastGradientAdaptiveClipping:
        """Per-sample losses of a batch, see :meth:`DPLossFastGradientClipping.__call__`."""
        loss = super().__call__(*args, **kwargs)
        return DPTensorFastGradientAdaptiveClipping(
            self.module,
            self.optimizer,
            loss.loss_per_sample,
            self.loss_reduction,
            self.target_unclipped_quantile,
            self.min_clipbound,
            self.max_clipbound,
            self.clipbound_learning_rate,
            self.initial_noise_multiplier,
        )


class PrivacyEngineAdaptiveClipping(PrivacyEngine):
    """:class:`opacus.PrivacyEngine` for adaptive clipping in ghost modes.

    ``make_private`` takes ``target_unclipped_quantile`` (0.5), ``min_clipbound`` (1),
    ``max_clipbound`` (1e8) and ``clipbound_learning_rate`` (0.2) in addition; ``max_grad_norm`` is
    the first C. Epsilon covers the noisy counts: they share the noise multiplier's budget.

    Args:
        accountant: See :class:`opacus.PrivacyEngine`.
        secure_mode: See :class:`opacus.PrivacyEngine`.
    """

    _criterion_keywords: ClassVar[frozenset[str]] = frozenset(
        {
            "target_unclipped_quantile",
            "min_clipbound",
            "max_clipbound",
            "clipbound_learning_rate",
        }
    )

    def __init__(self, *, accountant: str = "prv", secure_mode: bool = False) -> None:
        super().__init__(accountant=accountant, secure_mode=secure_mode)

    def _prepare_criterion(
        self,
        *,
        module: Any,
        optimizer: Any,
        criterion: Any = torch.nn.CrossEntropyLoss(),  # noqa: B008 (Opacus' signature)
        loss_reduction: str = "mean",
        target_unclipped_quantile: float = 0.5,
        min_clipbound: float = 1,
        max_clipbound: float = 1e8,
        clipbound_learning_rate: float = 0.2,
        **kwargs: Any,
    ) -> DPLossFastGradientAdaptiveClipping:
        if kwargs:
            raise TypeError(f"make_private got unexpected arguments {sorted(kwargs)}")
        return DPLossFastGradientAdaptiveClipping(
            module,
            optimizer,
            criterion,
            loss_reduction=loss_reduction,
            target_unclipped_quantile=target_unclipped_quantile,
            min_clipbound=min_clipbound,
            max_clipbound=max_clipbound,
            clipbound_learning_rate=clipbound_learning_rate,
            initial_noise_multiplier=optimizer.noise_multiplier,
        )
