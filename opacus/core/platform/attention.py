"""cuDNN's attention, for sizes that come again.

It makes a plan for each new size of its inputs, which takes a process 0.1 s and more (H200) and
is paid back by later steps of that size. Poisson batches have other sizes each time: there the
other kernels are faster, which need no plan. In a compiled graph the choice is made once, when it
is traced, for all sizes that it will get.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

# So many sizes get a plan at once; others when they have come so often.
AT_ONCE, OFTEN = 8, 16
# The same of models with compiled parts: the second size is traced as any size.
AT_ONCE_IN_GRAPHS = 1
# Sizes without a plan that are counted.
MOST_SIZES = 4096


class _Choice:
    """What holds for the whole process, until no model waits for the backward pass of it."""

    def __init__(self) -> None:
        self.waiting: set[int] = set()
        self._switched_off = False

    def switch_off(self) -> None:
        """Take cuDNN out, unless the user has made a choice of kernels."""
        flags = torch.backends.cuda
        others = flags.flash_sdp_enabled() and flags.mem_efficient_sdp_enabled()
        if others and flags.math_sdp_enabled() and flags.cudnn_sdp_enabled():
            flags.enable_cudnn_sdp(False)
            self._switched_off = True

    def leave(self, number: int) -> None:
        """A model does not wait any more; after the last one all is as it was."""
        self.waiting.discard(number)
        if self._switched_off and not self.waiting:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self._switched_off = False


_CHOICE = _Choice()
_NUMBERS = itertools.count()


class AttentionPlans:
    """Takes cuDNN out of the choice of `scaled_dot_product_attention` where sizes are new.

    What is set for a forward pass stays until the optimizer's step, the next forward pass or the
    end of the model: a checkpoint that computes a part of it again has to meet the same choice, and
    so have those of models that begin meanwhile. What the user has chosen stays chosen.

    Attributes:
        waits: Whether a choice holds for a forward pass.
        in_graphs: Whether layers of the model have run in compiled graphs.
    """

    def __init__(self) -> None:
        self.waits = self.in_graphs = False
        self._planned: set[Hashable] = set()
        self._seen: Counter[Hashable] = Counter()  # others
        self._number = next(_NUMBERS)
        weakref.finalize(self, _CHOICE.leave, self._number)

    def choose(self, args: Iterable[Any] | None) -> None:
        """A forward pass on these inputs begins, and none waits for its backward pass.

        Args:
            args: The inputs; ``None`` if no backward pass follows.
        """
        self.give_back()
        if args is None:
            return
        size = tuple([value.shape for value in args if isinstance(value, Tensor)])
        if not (self._has_plan(size) or _CHOICE.waiting):
            _CHOICE.switch_off()
        _CHOICE.waiting.add(self._number)
        self.waits = True

    def _has_plan(self, size: Hashable) -> bool:
        """Whether there is one, or is to be one now."""
        if size in self._planned:
            return True
        if len(self._seen) >= MOST_SIZES:
            self._seen.clear()
        self._seen[size] += 1
        at_once = AT_ONCE_IN_GRAPHS if self.in_graphs else AT_ONCE
        if len(self._planned) >= at_once and self._seen[size] < OFTEN:
            return False
        del self._seen[size]
        self._planned.add(size)
        return True

    def give_back(self) -> None:
        """Set what was set before, as soon as no other model waits."""
        self.waits = False
        _CHOICE.leave(self._number)

    def __reduce__(self) -> tuple[type[AttentionPlans], tuple[()]]:
        return AttentionPlans, ()  # copies and pickles of a model start afresh
