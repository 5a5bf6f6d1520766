"""The privacy parameters of an optimizer."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from opacus.core.platform.delegated import Delegated
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.parallelism import Single


class PrivacySettings:
    """Reads and writes parameters that have one home, shared with the model's hooks."""

    _privacy: PrivacyParams
    _parallelism: Single
    _plan: Any = None  # what make_private was asked for
    _counters: list[Any]

    noise_multiplier = Delegated[float]("_privacy")
    max_grad_norm = Delegated[Any]("_privacy")
    expected_batch_size = Delegated[Any]("_privacy")
    loss_reduction = Delegated[str]("_privacy")
    generator = Delegated[torch.Generator | None]("_parallelism")
    secure_mode = Delegated[bool]("_parallelism")

    @property
    def plan(self) -> Any:
        """A Plan, with noise, C and accountant of the next step; None without an engine."""
        if self._plan is None:
            return None
        privacy = self._privacy
        norms, norm = privacy.max_grad_norms, privacy.max_grad_norm
        return dataclasses.replace(
            self._plan,
            noise_multiplier=privacy.noise_multiplier,
            max_grad_norm=norm if norms is None else tuple(norms),
            accountant=self._counters[0].accountant.mechanism(),
        )

    @plan.setter
    def plan(self, value: Any) -> None:
        self._plan = value
