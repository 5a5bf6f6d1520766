"""Which forward passes are in a clipped sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opacus.core.record.passes import ForwardPass


class Summed:
    """Which forward passes a clipped sum is of: each once, and no other loss asks of them.

    Attributes:
        running: Forward passes that the running norm pass has come to.
    """

    def __init__(self) -> None:
        self.running: set[ForwardPass] = set()
        self._known: set[ForwardPass] = set()

    def begin(self) -> None:
        """The parameters' ``grad`` are not in use: no sample has been summed yet."""
        self._known.clear()

    def finish(self) -> None:
        """The clipped sum of the latest norm pass is in the parameters' ``grad``."""
        self._known.update(self.running)

    def note_ordinary(self, forward_pass: ForwardPass, parameters: Sequence[str]) -> None:
        """A loss that is not the criterion's runs backward through a forward pass.

        Raises:
            RuntimeError: The clipped sum has samples of that pass already.
        """
        forward_pass.ordinary = parameters = tuple(parameters)
        if forward_pass in self._known:
            self._refuse_second_loss(parameters)

    def check(self) -> None:
        """The norm pass has run, and its samples are to be summed.

        Raises:
            RuntimeError: Some are in the sum already, or another loss asks something of them.
        """
        for forward_pass in self.running:
            if forward_pass.ordinary:
                self._refuse_second_loss(forward_pass.ordinary)
        if self.running & self._known:
            raise RuntimeError(
                "these samples have been clipped and summed already; a second backward() would let "
                "each of them count twice. Add the losses of one forward pass and call backward() "
                "once, or call optimizer.step() or zero_grad() in between. Nothing was added to "
                "the model"
            )

    def _refuse_second_loss(self, parameters: Sequence[str]) -> None:
        raise RuntimeError(
            f"a loss that the private criterion did not make ran backward through {parameters[0]} "
            "and other private parameters, on samples that are in the step: what it "
            "asks of them is not clipped and would be left out. Give the criterion all losses "
            "(one a sample), or make a second one by DPLossFastGradientClipping(module, optimizer, "
            "other_criterion, loss_reduction), and call backward() on their sum"
        )

    def __getstate__(self) -> dict[str, Any]:
        return {"running": set(), "_known": set()}
