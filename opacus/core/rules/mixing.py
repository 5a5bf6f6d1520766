"""Layers that let samples into each other's outputs, or keep statistics of them."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from opacus.core.rules.float8 import coupled_by_scales


def mixes_samples(module: nn.Module) -> bool:
    """Whether a forward pass now would normalise over the batch, or store averages of it.

    No gradient need be involved: what the samples of a batch are normalised by is in the
    gradients of the layers before and after, and in the model's buffers, without noise.
    """
    if coupled_by_scales(module) is not None:
        return True
    if isinstance(module, _BatchNorm):
        unknown = module.running_mean is None and module.running_var is None
        return module.training or unknown
    return isinstance(module, _InstanceNorm) and module.training and module.track_running_stats


class MixingCheck:
    """Refuses layers that have begun to mix samples since they were looked at.

    A frozen BatchNorm in eval mode is fine, but after ``model.train()`` it is in train mode.

    Args:
        model: The model; its norms are looked up once.

    Attributes:
        norms: Layers that may mix samples, with their names.
    """

    def __init__(self, model: nn.Module) -> None:
        norms = (_BatchNorm, _InstanceNorm)
        self.norms = [(n, m) for n, m in model.named_modules() if isinstance(m, norms)]

    def check(self) -> None:
        """A private forward pass is about to start.

        Raises:
            NotImplementedError: Names the layers.
        """
        mixing = [f"'{name}' ({type(m).__name__})" for name, m in self.norms if mixes_samples(m)]
        if mixing:
            raise NotImplementedError(
                f"layers {', '.join(mixing)} are in train mode: they would normalise samples by "
                "their batch or store averages of them, without noise. Put them in eval mode "
                "after each model.train(), or replace them before make_private "
                "(ModuleValidator.fix)"
            )
