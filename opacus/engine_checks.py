"""What PrivacyEngine refuses, before anything has been changed."""

from __future__ import annotations

import warnings

from torch import nn
from torch.optim import Optimizer

from opacus.core.modes import Mode, mode_of
from opacus.core.state import PrivacyParams
from opacus.grad_sample.gsm_base import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer, get_optimizer_class


def check_arguments(
    *,
    module: nn.Module,
    optimizer: Optimizer,
    noise_multiplier: float,
    max_grad_norm: float | list[float],
    loss_reduction: str,
    clipping: str,
    grad_sample_mode: str,
) -> Mode:
    """Check the arguments of ``make_private`` that need no loader.

    Returns:
        The mode that ``grad_sample_mode`` names.

    Raises:
        ValueError: It names the argument and says what to do.
    """
    mode = mode_of(grad_sample_mode)
    get_optimizer_class(clipping, distributed=False, grad_sample_mode=grad_sample_mode)
    PrivacyParams(
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        loss_reduction=loss_reduction,
    )
    if isinstance(max_grad_norm, (list, tuple)) != (clipping == "per_layer"):
        raise ValueError(
            "max_grad_norm must be one number, or a list with one number for each trainable "
            f"parameter if clipping='per_layer'; got {max_grad_norm!r} with clipping={clipping!r}"
        )
    if isinstance(optimizer, DPOptimizer):
        raise ValueError(
            "the optimizer is private already: pass the plain one, optimizer.original_optimizer"
        )
    if isinstance(module, AbstractGradSampleModule):
        raise ValueError(
            "the module is wrapped already: pass module.to_standard_module(), which takes the "
            "hooks off"
        )
    _check_parameters(module, optimizer)
    return mode


def _check_parameters(module: nn.Module, optimizer: Optimizer) -> None:
    if not any(p.requires_grad for p in module.parameters()):
        raise ValueError("module has no trainable parameters: nothing would be trained")
    known = {id(p) for p in module.parameters()}
    groups = optimizer.param_groups
    foreign = [tuple(p.shape) for g in groups for p in g["params"] if id(p) not in known]
    if foreign:
        raise ValueError(
            "Module parameters are different than optimizer Parameters: the optimizer holds "
            f"{len(foreign)} parameters that are not the module's (shapes {foreign[:5]}). Build "
            "the optimizer from module.parameters(), after the module has been fixed, moved and "
            "sharded"
        )
    held = {id(p) for group in groups for p in group["params"]}
    left = [n for n, p in module.named_parameters() if p.requires_grad and id(p) not in held]
    if left:
        warnings.warn(
            f"the optimizer does not hold {len(left)} trainable parameters ({left[:5]} ...): "
            "they count in the clipping norm but are not trained. Freeze them, and let no other "
            "optimizer use their gradients, which get no noise",
            stacklevel=4,
        )
