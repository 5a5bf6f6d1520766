"""The privacy parameters of an optimizer."""

from __future__ import annotations

from typing import Any

import torch

from opacus.core.platform.delegated import Delegated
from opacus.core.privacy.params import PrivacyParams
from opacus.core.ranks.parallelism import Single


class PrivacySettings:
    """Reads and writes parameters that have one home, shared with the model's hooks."""

    _privacy: PrivacyParams
    _parallelism: Single
    # What make_private was asked for, an opacus.planning.Plan; None without an engine.
    plan: Any = None

    noise_multiplier = Delegated[float]("_privacy")
    max_grad_norm = Delegated[Any]("_privacy")
    expected_batch_size = Delegated[Any]("_privacy")
    loss_reduction = Delegated[str]("_privacy")
    generator = Delegated[torch.Generator | None]("_parallelism")
    secure_mode = Delegated[bool]("_parallelism")
