"""The isolation check of a user's whole loss, on a batch at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from opacus.core.isolation import messages
from opacus.core.isolation.check import Isolation, IsolationError
from opacus.core.isolation.incomparable import IncomparableError
from opacus.core.isolation.unit_slices import UnitRows, number_of_units
from opacus.core.isolation.watch import LossRuns


def check_loss(
    isolation: Isolation,
    model: Any,
    batch: Any,
    loss: Callable[[Any, Any], Any],
    *,
    either: bool = False,
) -> None:
    """See :func:`opacus.check_isolation`.

    Args:
        model: What the loss is called with.
        batch: The same.
        loss: Gives the loss of a batch.
        either: Whether that may be a mean or a sum over units, as nobody has said which.
    """
    units = number_of_units(batch, None, isolation.batch_first)
    rows = UnitRows(units or 0, isolation.batch_first)
    if not units or units < 2 or not rows.divides(batch):
        raise ValueError(
            "batch must hold at least two samples, in the first dimension of tensors (with "
            "batch_first=False in the second), to compare them"
        )
    if not isolation.model.training:
        raise ValueError("model is in eval mode, in which nothing is recorded: call train()")
    said = ""
    for mean in (isolation.mean, not isolation.mean) if either else (isolation.mean,):
        runs = LossRuns(model, batch, rows, loss, mean)
        try:
            found = isolation.probe.run(runs)
        except IncomparableError as reason:
            raise ValueError(f"loss(model, batch) cannot be checked: {reason}") from None
        if not isolation.any_rank(bool(found)):
            if isolation.any_rank(not isolation.probe.finite):
                raise ValueError("loss(model, batch) cannot be checked: it is not finite")
            return
        if found:
            said = said or messages.explained(found[0], isolation.model, runs.count)
    raise IsolationError(said or messages.ELSEWHERE)
