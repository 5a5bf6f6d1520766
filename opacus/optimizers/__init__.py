"""Private optimizers, and the choice among them."""

from __future__ import annotations

from opacus.core.privacy.clipping import FLAT_RULES
from opacus.core.step.modes import Mode, mode_of
from opacus.optimizers.adaclipoptimizer import AdaClipDPOptimizer
from opacus.optimizers.ddp_perlayeroptimizer import (
    DistributedPerLayerOptimizer,
    SimpleDistributedPerLayerOptimizer,
)
from opacus.optimizers.ddpoptimizer import DistributedDPOptimizer
from opacus.optimizers.ddpoptimizer_fast_gradient_clipping import (
    DistributedDPOptimizerFastGradientClipping,
)
from opacus.optimizers.fsdpoptimizer_fast_gradient_clipping import (
    FSDPOptimizerFastGradientClipping,
)
from opacus.optimizers.joint import JointOptimizer
from opacus.optimizers.optimizer import DPOptimizer
from opacus.optimizers.optimizer_fast_gradient_clipping import DPOptimizerFastGradientClipping
from opacus.optimizers.perlayeroptimizer import DPPerLayerOptimizer
from opacus.optimizers.tpoptimizer_fast_gradient_clipping import TPOptimizerFastGradientClipping

__all__ = [
    "AdaClipDPOptimizer",
    "DPOptimizer",
    "DPOptimizerFastGradientClipping",
    "DPPerLayerOptimizer",
    "DistributedDPOptimizer",
    "DistributedDPOptimizerFastGradientClipping",
    "DistributedPerLayerOptimizer",
    "FSDPOptimizerFastGradientClipping",
    "JointOptimizer",
    "SimpleDistributedPerLayerOptimizer",
    "TPOptimizerFastGradientClipping",
    "get_optimizer_class",
]


def get_optimizer_class(
    clipping: str, distributed: bool, grad_sample_mode: str | None = None
) -> type[DPOptimizer]:
    """The optimizer class for a way of clipping, a parallelism and a mode.

    Args:
        clipping: ``"flat"``, ``"normalised"``, ``"psac"``, ``"per_layer"`` (``max_grad_norm`` is a
            list) or ``"adaptive"`` (:class:`AdaClipDPOptimizer`).
        distributed: Whether ranks hold different samples (DDP or FSDP).
        grad_sample_mode: Grad sample mode; ``None`` means ``"hooks"``.

    Raises:
        ValueError: There is no such combination.
    """
    mode = mode_of(grad_sample_mode or "hooks")
    if clipping not in (*FLAT_RULES, "per_layer", "adaptive"):
        raise ValueError(
            f"Unexpected optimizer parameters. Clipping: {clipping!r}, distributed: {distributed}; "
            "clipping must be 'flat', 'normalised', 'psac', 'per_layer' or 'adaptive'"
        )
    if mode.needs_criterion:
        return _ghost_class(clipping, distributed, mode)
    if clipping in FLAT_RULES:
        return DistributedDPOptimizer if distributed else DPOptimizer
    if clipping == "per_layer":
        return DistributedPerLayerOptimizer if distributed else DPPerLayerOptimizer
    if distributed:
        raise ValueError(
            "Unexpected optimizer parameters. clipping='adaptive' works on one process; under DDP "
            "or FSDP use PrivacyEngineAdaptiveClipping with a ghost mode"
        )
    return AdaClipDPOptimizer


def _ghost_class(clipping: str, distributed: bool, mode: Mode) -> type[DPOptimizer]:
    # The criterion clips, flat or per layer, before gradients reach the optimizer.
    if clipping == "adaptive":
        raise ValueError(
            "Unexpected optimizer parameters. For adaptive clipping in ghost modes use "
            "opacus.utils.adaptive_clipping.PrivacyEngineAdaptiveClipping"
        )
    if mode.parallelism == "fsdp":
        return FSDPOptimizerFastGradientClipping
    if mode.parallelism == "tp":
        return TPOptimizerFastGradientClipping
    if distributed:
        return DistributedDPOptimizerFastGradientClipping
    return DPOptimizerFastGradientClipping
