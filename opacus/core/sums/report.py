"""What a step was expected to need, and what it needed: memory and time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

GIB = 2**30


@dataclass
class Report:
    """Of the latest step of a single backward pass.

    Attributes:
        limit: Bytes of the GPU that the peak must stay under, if any.
        predicted_peak: What was expected of it.
        moments: Beginning and end of the backward pass, and the end of the sum.
    """

    limit: int | None = None
    predicted_peak: int = 0
    moments: list[Any] = field(default_factory=list)

    def expect(self, in_use: int) -> None:
        """So many bytes may be in use at some time of the step."""
        self.predicted_peak = max(self.predicted_peak, in_use)

    def milliseconds(self) -> list[float]:
        """Of the backward pass with its norms, and of the sum; waits for the device."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        if self.moments and not isinstance(self.moments[0], float):
            self.moments[-1].synchronize()
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

    def __reduce__(self) -> tuple[type[Report], tuple[()]]:
        return Report, ()  # of no step yet
