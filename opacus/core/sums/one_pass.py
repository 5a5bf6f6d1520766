"""One backward pass: what the clipped sum needs is kept, not computed again.

Book-keeping (arXiv:2210.00038) keeps activations and backprops; storing forms the
per-sample gradient once and weights it later. The :class:`~opacus.core.sums.planner.Planner`
chooses for each layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from opacus.core.platform.profiling import WEIGHTED_SUM, timed
from opacus.core.privacy.clipping import Factors
from opacus.core.record.recorder import Recorder
from opacus.core.sums.planner import Planner, free_memory
from opacus.core.sums.strategy import Ghost
from opacus.core.sums.terms import GradientSink, KeptSums, Terms
from opacus.core.sums.weighting import Weighting


class OnePass(Ghost):
    """Norms and everything that the clipped sum needs, in a single backward pass.

    Guarantee: that of :class:`~opacus.core.sums.strategy.TwoPass`. Where per-sample gradients
    are stored, the numbers that are summed are the very ones that were measured.

    Memory: what is kept, see :class:`~opacus.core.sums.planner.Planner`; nothing outlives
    :meth:`sum_pass`.
    """

    retains_graph: ClassVar[bool] = False

    def __init__(
        self,
        recorder: Recorder,
        parameters: Sequence[tuple[str, nn.Parameter]],
        *,
        deferred: bool = False,
        budget_bytes: int | None = None,
        sink: GradientSink,
    ) -> None:
        super().__init__(recorder, parameters, deferred=deferred, budget_bytes=budget_bytes)
        self.planner: Planner = Planner()
        self.sink = sink

    def norm_pass(self, losses: Tensor, retain_graph: bool = False) -> None:
        """See :meth:`Ghost.norm_pass`; the graph is freed unless ``retain_graph``."""
        budget = self.held_budget
        self.planner.start(free_memory(losses.device) if budget is None else budget)
        super().norm_pass(losses, retain_graph)

    def abandon(self) -> None:
        """See :meth:`Ghost.abandon`."""
        super().abandon()
        self.sink.abandon()

    @timed(WEIGHTED_SUM)
    def sum_pass(self, losses: Tensor, clipped: Factors, retain_graph: bool = False) -> None:
        """Weight and add what was kept; runs no backward pass."""
        with torch.no_grad():
            self._sum(clipped)

    def _sum(self, clipped: Factors) -> None:
        assert self.ledger is not None
        if self.ledger.kept.whole:
            self._sum_whole(clipped)
            return
        ledger, self.ledger = self.ledger, None
        sums = KeptSums(ledger.kept.take_held(), Weighting(clipped))
        formed = ledger.kept.formed
        names = [name for name, parameter in self.parameters if parameter.requires_grad]
        factors = [clipped.of(name) for name in names]
        for name, own in zip(names, factors, strict=True):
            stored, later = formed.pop(name, None), sums.terms_of(name)
            self.sink.put(name, Terms(stored, later, own, clipped.masked))
        self.sink.finish()
