"""The private step, from per-sample losses to the gradient that is released: read it from the top.

    clip_batch    losses -> records -> norms -> factors -> the records again -> clipped sum
    release       clipped sums -> sum over ranks -> noise -> count -> mean -> penalties

``clip_batch`` is the ``backward()`` of the criterion in ghost modes, once for each physical batch.
In ``hooks`` and its like ``backward()`` leaves per-sample gradients, and
:meth:`Optimizer.take_checked` does the rest of that line. ``release`` is everything in
``optimizer.step()`` before the wrapped optimizer's own step, for each logical batch.

=====================  =========================================================================
what                   where
=====================  =========================================================================
records                ``record/``: taps on the layers; ``rules/``: what a layer's gradient is
norms                  ``norms/ledger.py``; ``ranks/replicated.py`` where ranks share the work
factors                ``privacy/clipping.py``, with C from ``privacy/params.py``
the records again      ``sums/one_pass.py`` keeps or stores them, ``sums/two_pass.py`` replays
clipped sum            ``sums/weighting.py``; ``ranks/reduction.py`` for shards
what a step is made of ``privacy/draws.py``, ``privacy/unit_names.py``, ``sums/sum_watch.py``,
                       ``isolation/``
noise                  ``privacy/noise.py``, with keys and counters from ``privacy/key.py``
=====================  =========================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from opacus.core.privacy.clipping import Factors
from opacus.core.sums.unreduced import Unreduced


class Model(Protocol):
    """A private model's hooks: what measures and sums."""

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """``[B]`` norms of the latest norm pass."""

    @property
    def doubt(self) -> Tensor | None:
        """On a GPU: whether the latest sum is not of what was measured."""

    @property
    def unreduced(self) -> Unreduced | None:
        """Clipped sums that wait for the last physical batch, if they can."""

    def start_sum(self) -> None:
        """No sample is in the parameters' gradients yet."""

    def norm_pass(self, losses: Tensor, retain_graph: bool, loss_scale: float | None) -> None:
        """Backward pass of the losses; then the norms of all samples are known."""

    def clip(self) -> Factors:
        """Clipping factors and excluded samples."""

    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool) -> None:
        """Add the clipped sum to the parameters' gradients."""


class Optimizer(Protocol):
    """A private optimizer: what counts, adds noise and releases."""

    @property
    def params(self) -> list[Any]:
        """The parameters that are trained."""

    @property
    def clipped_batches(self) -> int:
        """Physical batches whose clipped sums are in the parameters' gradients."""

    def check_unchanged(self) -> None:
        """Refuse gradients that are not the clipped sums which were left."""

    def more_follow(self) -> bool:
        """Whether the batch is a physical one that others follow, and whose sum may wait."""

    def note_clipped_batch(
        self,
        loss_scale: float | None,
        excluded: bool,
        samples: int,
        doubt: Tensor | None,
        unreduced: Unreduced | None,
    ) -> None:
        """One more clipped batch is in the parameters' gradients, or waits unreduced."""

    def check_world(self) -> None:
        """Refuse one process's optimizer where several ranks train."""

    def drop_frozen(self) -> None:
        """What is frozen now gets no noise, so nothing of it is released."""

    def take_checked(self) -> None:
        """Put the batch's clipped sum to those of the step; in ``hooks`` clip it first.

        Before that refuse a batch of other samples than the loader drew, or in which a sample's
        gradient is not its own. All ranks go on after it, or none does.
        """

    def is_physical(self) -> bool:
        """Whether more batches of the same logical one follow."""

    def overflowed_anywhere(self) -> bool:
        """Whether a loss scale was too large for a batch of the step, on any rank."""

    def skip_overflowed_step(self) -> None:
        """Count the step and drop its sums."""

    def noise_and_count(self) -> None:
        """Add the noise to the sum over ranks, and count the step with the accountants."""

    def scale_grad(self) -> None:
        """Divide by the expected batch size."""

    def add_penalties(self) -> None:
        """Add the gradients of penalties, which see parameters alone."""

    def call_step_hooks(self) -> None:
        """Tell whoever asked for it."""


def clip_batch(
    model: Model,
    optimizer: Optimizer,
    losses: Tensor,
    *,
    loss_scale: float | None = None,
    retain_graph: bool = False,
    norms_are_known: Callable[[Tensor], None] = lambda norms: None,
) -> Factors:
    """Add the clipped sum of one physical batch to the parameters' gradients.

    Guarantee: without noise, removing one unit changes the sum by at most C in L2 norm. A unit
    whose gradient is not finite contributes nothing.

    Args:
        model: The private model's hooks.
        optimizer: The private optimizer.
        losses: ``[B]`` per-sample losses with their graph.
        loss_scale: Factor that a ``GradScaler`` put on the losses; C is for gradients without it.
        retain_graph: Keep the graph for another backward pass.
        norms_are_known: Called with the norms ``[B]`` before clipping (adaptive clipping).

    Returns:
        Factors and excluded samples.
    """
    optimizer.check_unchanged()
    if not optimizer.clipped_batches:
        model.start_sum()
    unreduced = model.unreduced
    if unreduced is not None:
        unreduced.wanted = loss_scale is None and optimizer.more_follow()
    with torch.autocast(losses.device.type, enabled=False):  # it would round sums to half precision
        model.norm_pass(losses, retain_graph, loss_scale)
        norms_are_known(model.per_sample_gradient_norms)
        clipped = model.clip()
        model.sum_pass(losses, clipped, retain_graph)
    excluded = loss_scale is not None and bool(clipped.excluded.any())
    optimizer.note_clipped_batch(loss_scale, excluded, len(losses), model.doubt, unreduced)
    return clipped


def release(optimizer: Optimizer) -> bool:
    """Turn the clipped sums of a logical batch into the private gradient.

    Guarantee: noise of standard deviation ``noise_multiplier * C`` is added, for the largest C that
    anything in the sum was clipped with, and the accountants have counted the step before anything
    of it is released. After an error nothing is left to release.

    Returns:
        Whether the wrapped optimizer is to step: not for a physical batch that others follow,
        nor if a loss scale overflowed.
    """
    optimizer.check_world()
    optimizer.drop_frozen()
    if not optimizer.params:
        return True
    optimizer.take_checked()
    if optimizer.is_physical():
        return False
    if optimizer.overflowed_anywhere():
        optimizer.skip_overflowed_step()
        return False
    optimizer.noise_and_count()
    optimizer.scale_grad()
    optimizer.add_penalties()
    optimizer.call_step_hooks()
    return True
