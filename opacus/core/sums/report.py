"""What a step was expected to need, and what it needed: memory and time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from opacus.core.sums.choice import Choice

GIB = 2**30


@dataclass
class Report:
    """Of the latest step of a single backward pass.

    Attributes:
        limit: Bytes of the GPU that the peak must stay under, if any.
        units: Losses.
        predicted_peak: What was expected of it.
        moments: Beginning and end of the backward pass, and the end of the sum.
        choices: What was decided, by layer; in this step, or in an earlier one of other size.
        extra: Milliseconds beyond non-private training that blocks take, by way.
    """

    limit: int | None = None
    units: int = 0
    predicted_peak: int = 0
    moments: list[Any] = field(default_factory=list)
    choices: dict[str, Choice] = field(default_factory=dict)
    extra: dict[str, float] = field(default_factory=dict)

    def expect(self, in_use: int) -> None:
        """So many bytes may be in use at some time of the step."""
        self.predicted_peak = max(self.predicted_peak, in_use)

    def expect_time(self, way: str, seconds: float) -> None:
        """A block is expected to take so much more."""
        self.extra[way] = self.extra.get(way, 0.0) + 1e3 * seconds

    def change(self, layers: Iterable[str], what: str) -> None:
        """Decided anew for these layers."""
        for name in layers:
            self.choices[name] = replace(self.choices[name], what=what)

    @property
    def ways(self) -> dict[str, int]:
        """How many layers are held in each way, the most first."""
        return dict(Counter(choice.what for choice in self.choices.values()).most_common())

    def _now(self) -> dict[str, Choice]:
        """The choices for this step's number of losses."""
        units = self.units
        return {name: c.of(units) if units else c for name, c in self.choices.items()}

    def table(self, order: Sequence[str] = ()) -> str:
        """A line for each layer.

        Args:
            order: Names of layers, which come first and in this order.
        """
        head = ("layer", "kind", "B", "activations, backprops", "choice", "extra ms", "held MB")
        rows = [head]
        choices = self._now()
        names = dict.fromkeys([*(n for n in order if n in choices), *choices])
        for c in [choices[name] for name in names]:
            cells = ("-", "-")  # of a replay: its block as a whole
            if c.what in c.bytes:
                cells = (f"{c.milliseconds[c.what]:.3f}", f"{c.bytes[c.what] / 2**20:.2f}")
            shapes = ", ".join(str(list(shape)) for shape in c.shapes)
            rows.append((c.layer, c.kind, str(c.batch), shapes, c.what, *cells))
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)

    def milliseconds(self) -> list[float]:
        """Of the backward pass with its norms, and of the sum; waits for the device."""
        pairs = zip(self.moments, self.moments[1:], strict=False)
        if self.moments and not isinstance(self.moments[0], float):
            self.moments[-1].synchronize()
            return [before.elapsed_time(after) for before, after in pairs]
        return [(after - before) * 1e3 for before, after in pairs]

    def text(self, held: int, host: int) -> str:
        """Some lines for people.

        Args:
            held: Bytes that are held until the sum.
            host: Bytes of host memory.
        """
        extra = dict(self.extra)
        for choice in self._now().values():
            if choice.what in choice.bytes:
                extra[choice.what] = extra.get(choice.what, 0) + choice.milliseconds[choice.what]
        lines = [f"Layers: {', '.join(f'{n} {way}' for way, n in self.ways.items())}."]
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
