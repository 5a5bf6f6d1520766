"""What a step was expected to need, and what it needed: memory and time."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch

GIB = 2**30


class Report:
    """Of the latest step of a single backward pass.

    Attributes:
        predicted_peak: Bytes of the GPU; 0 where nothing limits them.
        limit: What the peak must stay under, if anything.
    """

    def __init__(self) -> None:
        self.predicted_peak = 0
        self.limit: int | None = None
        self._marks: list[Any] = []

    def start(self, limit: int | None) -> None:
        """A backward pass begins."""
        self.predicted_peak, self.limit = 0, limit
        self._marks = []
        self.mark()

    def expect(self, in_use: int) -> None:
        """So many bytes may be in use at some time of the step."""
        self.predicted_peak = max(self.predicted_peak, in_use)

    def mark(self) -> None:
        """The backward pass begins, is over, or the sum is there; nothing waits for the device."""
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def milliseconds(self) -> list[float]:
        """Of the backward pass with its norms, and of the sum; waits for the device."""
        pairs = zip(self._marks, self._marks[1:], strict=False)
        if self._marks and not isinstance(self._marks[0], float):
            self._marks[-1].synchronize()
            return [before.elapsed_time(after) for before, after in pairs]
        return [(after - before) * 1e3 for before, after in pairs]

    def text(
        self, ways: Mapping[str, int], held: int, host: int, extra: Mapping[str, float]
    ) -> str:
        """Some lines for people.

        Args:
            ways: Number of layers by way.
            held: Bytes that are held until the sum.
            host: Bytes of host memory.
            extra: Milliseconds beyond non-private training that were expected, by way.
        """
        lines = [f"Layers: {', '.join(f'{n} {way}' for way, n in ways.items())}."]
        lines.append(
            f"Held until the sum: {held / GIB:.2f} GiB; host memory: {host / GIB:.2f} GiB."
        )
        if self.limit is not None:
            peak = torch.cuda.max_memory_allocated() / GIB
            lines.append(
                f"Peak: {self.predicted_peak / GIB:.2f} GiB predicted, {peak:.2f} measured since "
                f"torch.cuda.reset_peak_memory_stats(), {self.limit / GIB:.2f} allowed."
            )
        parts = ", ".join(f"{way} {ms:.2f}" for way, ms in extra.items())
        whole = sum(extra.values())
        lines.append(f"Time beyond non-private training: {whole:.2f} ms predicted ({parts}).")
        spent = self.milliseconds()
        if len(spent) == 2:
            lines.append(
                f"Measured: backward pass with norms {spent[0]:.2f} ms, sum {spent[1]:.2f} ms."
            )
        return "\n".join(lines)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_marks": []}


def counted(ways: list[str]) -> dict[str, int]:
    """How many layers there are of each way, the most first."""
    return dict(Counter(ways).most_common())
