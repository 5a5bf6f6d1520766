"""Continues after an error in a backward pass under FSDP2, on all ranks or on none.

An error in the middle of a backward pass leaves FSDP2 with units that are still gathered and
reductions that nobody ended: the next step would find no gradient. They are put back at once.
Whether the others failed at the same place is asked before the next forward pass: a rank that
did not is waiting in a collective, which the next one of this rank must not be taken for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn

from opacus.core.platform.torch_internals import (
    communication_state,
    drop_pass,
    has_open_backward,
    number_of_backward,
)
from opacus.core.ranks.meeting import Meetings, Outcome, ranks_with

_RESUME = "End all ranks and resume from the last checkpoint"


class Recovery:
    """See the module.

    Args:
        model: The model, sharded by FSDP2.
        position: What ranks have communicated besides what FSDP2 has.
    """

    # Seconds that a rank which failed waits for the others to say that they did, too.
    WAIT: ClassVar[float] = 120.0

    def __init__(self, model: nn.Module, position: Callable[[], object] = lambda: "") -> None:
        self._model = model
        self._position = position
        self._meetings = Meetings(ranks_with(model), "failures")
        self._failures = 0
        self._error = ""  # of a backward pass since which no forward pass has been
        self._place = ""
        self._verdict = ""
        self.handle = model.register_forward_pre_hook(self._go_on, prepend=True)

    @contextmanager
    def watch(self, what: str) -> Iterator[None]:
        """Around a part of a step that communicates.

        Args:
            what: What it is, for messages.
        """
        try:
            yield
        except BaseException as error:
            self._note(what, f"{type(error).__name__}: {error}")
            raise

    def _note(self, what: str, error: str) -> None:
        self._failures += 1
        self._error = error
        self._place = f"{what}; {communication_state(self._model)}; {self._position()}"

    def put_back(self) -> None:
        """Let FSDP2 drop what is left of the failed pass; no other rank is asked."""
        try:
            if drop_pass(self._model):
                return
        except RuntimeError:  # the device has failed, say; the first error is the one to see
            pass
        self._verdict = (
            f"a backward pass failed ({self._error}), and FSDP2 of torch {torch.__version__} "
            f"cannot go on after that. {_RESUME}"
        )

    def _go_on(self, module: nn.Module, args: Any) -> None:
        if not self._error and not self._verdict:
            if number_of_backward() >= 0 or not has_open_backward(self._model):
                return
            # That of a loss which is not the criterion's has failed, and was not watched.
            self._note("backward", "of another loss")
            self.put_back()
        if not self._verdict:
            outcome = self._meetings.meet(str(self._failures), self._place, self.WAIT)
            if outcome.agreed:
                self._error = ""
                return
            self._verdict = self._message(outcome)
        raise RuntimeError(self._verdict)

    def _message(self, outcome: Outcome) -> str:
        absent = [rank for rank, place in outcome.said.items() if place is None]
        if absent:
            others = f"not on ranks {absent}, which wait for this one or have ended"
        else:
            others = "at other places on other ranks, so that some of them wait for this one"
        return (
            f"the backward pass before failed on rank {dist.get_rank()} ({self._error}), but "
            f"{others}: training cannot go on. {_RESUME}"
        )
