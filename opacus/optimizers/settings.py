"""The privacy parameters of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.layout import Single


class PrivacySettings:
    """Reads and writes parameters that have one home, shared with the model's hooks."""

    _privacy: PrivacyParams
    _layout: Single
    # What make_private was asked for, an opacus.planning.Plan; None without an engine.
    plan: Any = None

    @property
    def noise_multiplier(self) -> float:
        return self._privacy.noise_multiplier

    @noise_multiplier.setter
    def noise_multiplier(self, value: float) -> None:
        self._privacy.noise_multiplier = value

    @property
    def max_grad_norm(self) -> Any:
        return self._privacy.max_grad_norm

    @max_grad_norm.setter
    def max_grad_norm(self, value: Any) -> None:
        self._privacy.max_grad_norm = value

    @property
    def expected_batch_size(self) -> Any:
        return self._privacy.expected_batch_size

    @expected_batch_size.setter
    def expected_batch_size(self, value: Any) -> None:
        self._privacy.expected_batch_size = value

    @property
    def loss_reduction(self) -> str:
        return self._privacy.loss_reduction

    @loss_reduction.setter
    def loss_reduction(self, value: str) -> None:
        self._privacy.loss_reduction = value

    @property
    def generator(self) -> torch.Generator | None:
        return self._layout.generator

    @generator.setter
    def generator(self, value: torch.Generator | None) -> None:
        self._layout.generator = value

    @property
    def secure_mode(self) -> bool:
        return self._layout.secure_mode

    @secure_mode.setter
    def secure_mode(self, value: bool) -> None:
        self._layout.secure_mode = value
