"""Whether samples depend on each other, asked for a model, a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from opacus.core.isolation.check import Isolation, IsolationError
from opacus.core.isolation.own_loss import check_loss
from opacus.grad_sample import GradSampleHooks

__all__ = ["IsolationError", "check_isolation"]


def check_isolation(model: nn.Module, batch: Any, loss: Callable[[Any, Any], Any]) -> None:
    """Check that the gradient of each sample is its own, for a model and data at hand.

    Runs the model on a few samples of the batch together and on some of them alone, and
    compares their squared gradient norms, parameter by parameter. While training,
    ``make_private`` does so by itself for what model and criterion compute; here the whole loss
    is included, which in ``hooks`` mode nobody else sees. Nothing is changed: gradients,
    buffers and random states are as before. Dropout does nothing in these runs.

    Args:
        model: A private model, or an ordinary one in training mode. Under FSDP2 all ranks call
            this together.
        batch: Tensors ``[B, ...]`` in a tuple, list or dictionary, or one tensor; B >= 2.
        loss: ``loss(model, batch)`` gives the loss of a batch as in training: the mean or sum over
            its samples (as in ``make_private``; of an ordinary model either), or one loss a sample
            ``[B]``.

    Raises:
        IsolationError: A sample is another alone. Names the first layer that differs, by how
            much, and the likely causes.
        ValueError: It cannot be checked: there are no samples in the first dimension, the
            model does not run on single ones, or draws random numbers of its own.

    Example::

        check_isolation(model, (x, y), lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    """
    isolation = getattr(model, "isolation", None)
    if isinstance(isolation, Isolation):
        check_loss(isolation, model, batch, loss)
        return
    hooks = GradSampleHooks(model, strict=False)
    try:
        check_loss(hooks.isolation, model, batch, loss, either=True)
    finally:
        hooks.cleanup()
