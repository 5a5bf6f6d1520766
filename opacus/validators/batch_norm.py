"""Validates ``nn.BatchNorm*d``, and replaces it by a norm of each sample by itself."""

from __future__ import annotations

import math
import warnings
from typing import Any, Union

from torch import nn

from opacus.validators.errors import ShouldReplaceModuleError, UnsupportableModuleError
from opacus.validators.instance_norm import INSTANCENORM
from opacus.validators.utils import register_module_fixer, register_module_validator

BATCHNORM = Union[  # noqa: UP007
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm
]

# Default number of groups, or the largest divisor that it shares with the channels.
MAX_GROUPS = 32
# Of these the input may be [B, C], in which a group of one channel is one value: it would be
# normalised to zero.
_FLAT = (nn.BatchNorm1d, nn.SyncBatchNorm)

_INSTANCE_NORMS: dict[type[nn.Module], type[INSTANCENORM]] = {
    nn.BatchNorm1d: nn.InstanceNorm1d,
    nn.BatchNorm2d: nn.InstanceNorm2d,
    nn.BatchNorm3d: nn.InstanceNorm3d,
}


@register_module_validator([nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def validate(module: BATCHNORM) -> list[ShouldReplaceModuleError]:
    """An error: the module has to be replaced, or put in eval mode if it is frozen."""
    cure = "ModuleValidator.fix() replaces it by GroupNorm"
    parameters = list(module.parameters())
    if parameters and not any(p.requires_grad for p in parameters):
        cure = "as it is frozen, put it in eval mode (again after each model.train()); " + cure
        cure += " if it is trainable"
    return [
        ShouldReplaceModuleError(
            "BatchNorm normalises each sample by the others in its batch, so there is no "
            "gradient of one sample by itself, and it keeps averages of private data without "
            f"noise; {cure}"
        )
    ]


@register_module_fixer([nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm])
def fix(
    module: BATCHNORM,
    *,
    replace_bn_with_in: bool = False,
    num_groups: int | None = None,
    **kwargs: Any,
) -> nn.GroupNorm | INSTANCENORM:
    """A newly initialised GroupNorm or InstanceNorm of as many channels.

    Args:
        module: The BatchNorm.
        replace_bn_with_in: Whether to use InstanceNorm, without parameters.
        num_groups: Number of groups of a GroupNorm; if not given, the greatest common divisor
            of 32 and the number of channels, for a BatchNorm1d or SyncBatchNorm half of it where
            a group would be one channel.
        kwargs: None are known.

    Raises:
        TypeError: There is an unknown option.
        ValueError: ``num_groups`` does not divide the number of channels, or is given
            for an InstanceNorm.
        UnsupportableModuleError: There is no InstanceNorm like this SyncBatchNorm.
    """
    if kwargs:
        raise TypeError(f"fix() got unknown options {sorted(kwargs)}")
    if replace_bn_with_in:
        if num_groups is not None:
            raise ValueError(f"num_groups={num_groups} has no meaning with replace_bn_with_in=True")
        return _instance_norm(module)
    return _group_norm(module, num_groups)


def _instance_norm(module: BATCHNORM) -> INSTANCENORM:
    kind = next((k for k in _INSTANCE_NORMS if isinstance(module, k)), None)
    if kind is None:
        raise UnsupportableModuleError(
            f"there is no InstanceNorm in place of a {type(module).__name__}, whose number of "
            "dimensions is not known; leave out replace_bn_with_in=True to get a GroupNorm"
        )
    return _INSTANCE_NORMS[kind](module.num_features, eps=module.eps)


def _group_norm(module: BATCHNORM, num_groups: int | None) -> nn.GroupNorm:
    channels = module.num_features
    groups = _default_groups(module) if num_groups is None else num_groups
    if groups <= 0 or channels % groups:
        raise ValueError(
            f"num_groups={groups} must divide the {channels} channels of the BatchNorm"
        )
    new = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
    for name, parameter in module.named_parameters(recurse=False):
        getattr(new, name).requires_grad_(parameter.requires_grad)
    example = next(module.parameters(), module.running_mean)
    return new if example is None else new.to(device=example.device, dtype=example.dtype)


def _default_groups(module: BATCHNORM) -> int:
    channels = module.num_features
    groups = math.gcd(MAX_GROUPS, channels)
    if groups < channels or not isinstance(module, _FLAT):
        return groups
    if channels == 1:
        warnings.warn(
            f"{module} is replaced by a GroupNorm of one channel, which turns an input [B, 1] into "
            "zeros: remove it if that is its input ([B, 1, length] is fine)",
            stacklevel=2,
        )
        return 1
    return groups // 2  # a power of two, as all divisors of 32 are
