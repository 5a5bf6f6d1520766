"""Names of weights in checkpoints, which wrappers of the model change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from opacus.core.privacy.noise import without_wrappers
from opacus.distributed import DifferentiallyPrivateDistributedDataParallel
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks

_PREFIX = "_module."
_DDP = (DistributedDataParallel, DifferentiallyPrivateDistributedDataParallel)


def inner_of(module: Any) -> nn.Module:
    """The model that was made private; any other as it is."""
    return module._module if isinstance(module, AbstractGradSampleHooks) else module


def unwrapped(module: Any) -> nn.Module:
    """The model itself, whose names are the same however many ranks have it."""
    inner = inner_of(module)
    return inner.module if isinstance(inner, _DDP) else inner  # type: ignore[return-value]


def named_as_here(state: Mapping[str, Any], inner: nn.Module) -> dict[str, Any]:
    """Saved weights by the names that they have in this model, however either is wrapped."""
    plain = {name.removeprefix(_PREFIX): value for name, value in state.items()}
    own = list(inner.state_dict())
    here = {without_wrappers(name): name for name in own}
    named = {here.get(without_wrappers(name), name): value for name, value in plain.items()}
    distinct = len(here) == len(own) and len(named) == len(plain)
    return named if distinct else plain
