"""cuDNN's attention, for sizes that come again.

It makes a plan for each new size of its inputs, which takes a process 0.1 s and more (H200) and
is paid back by later steps of that size. Poisson batches have other sizes each time: there the
other kernels are faster, which need no plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable
from typing import Any

import torch
from torch import Tensor

# So many sizes get a plan at once; others when they have come so often.
AT_ONCE, OFTEN = 8, 16
# Sizes without a plan that are counted.
MOST_SIZES = 4096


class AttentionPlans:
    """Takes cuDNN out of the choice of `scaled_dot_product_attention` where sizes are new.

    What is set for a forward pass stays until the next one: a checkpoint that computes a part of it
    again has to meet the same choice. What the user has switched off stays off.
    """

    def __init__(self) -> None:
        self._planned: set[Hashable] = set()
        self._seen: Counter[Hashable] = Counter()  # others
        self._switched_off = False

    def choose(self, args: Iterable[Any] | None) -> None:
        """A forward pass on these inputs begins, and none waits for its backward pass.

        Args:
            args: The inputs; ``None`` if no backward pass follows.
        """
        self.give_back()
        if args is None:
            return
        size = tuple([value.shape for value in args if isinstance(value, Tensor)])
        if self._has_plan(size) or not torch.backends.cuda.cudnn_sdp_enabled():
            return
        torch.backends.cuda.enable_cudnn_sdp(False)
        self._switched_off = True

    def _has_plan(self, size: Hashable) -> bool:
        """Whether there is one, or is to be one now."""
        if size in self._planned:
            return True
        if len(self._seen) >= MOST_SIZES:
            self._seen.clear()
        self._seen[size] += 1
        if len(self._planned) >= AT_ONCE and self._seen[size] < OFTEN:
            return False
        del self._seen[size]
        self._planned.add(size)
        return True

    def give_back(self) -> None:
        """Set what was set before."""
        if self._switched_off:
            torch.backends.cuda.enable_cudnn_sdp(True)
            self._switched_off = False

    def __getstate__(self) -> dict[str, object]:
        return vars(AttentionPlans())
