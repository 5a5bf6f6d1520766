"""What a run shows: a progress bar, a line an epoch, TensorBoard curves, a closing table."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from runtime import Runtime


class Reporter:
    """Prints and writes on the main process, and does nothing on the others.

    Args:
        runtime: This process.
        logdir: Folder of TensorBoard files; none are written if it is None.

    Raises:
        ValueError: TensorBoard is not installed.
    """

    def __init__(self, runtime: Runtime, logdir: str | None = None) -> None:
        self._main = runtime.is_main
        self._processes = runtime.world_size
        self._writer: Any = None
        self._bar: Any = None
        self._next = 0.0  # when the bar's text may change again
        if logdir is not None and self._main:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ValueError("--logdir needs TensorBoard: pip install tensorboard") from error
            self._writer = SummaryWriter(logdir)

    def say(self, text: str) -> None:
        """Print a line."""
        if self._main:
            print(text, flush=True)

    def progress(self, batches: Iterable[Any], total: int, title: str) -> Iterator[Any]:
        """The batches, with a bar that shows how far they are (on a terminal)."""
        from tqdm import tqdm

        off = not (self._main and sys.stderr.isatty())
        self._bar = tqdm(batches, total=total, desc=title, leave=False, disable=off)
        yield from self._bar

    def on_bar(self, meter: Meter, epsilon: Callable[[], float]) -> None:
        """Show loss, speed and epsilon beside the bar; at most once a second."""
        if self._bar is None or self._bar.disable or time.monotonic() < self._next:
            return
        self._next = time.monotonic() + 1
        loss, speed = meter.here
        speed *= self._processes  # the others have shares of the same size
        self._bar.set_postfix_str(f"loss {loss:.3f}, {speed:,.0f} tokens/s, ε {epsilon():.2f}")

    @property
    def draws(self) -> bool:
        """Whether curves go anywhere."""
        return self._writer is not None

    def curves(self, step: int, **values: float) -> None:
        """Add a point to each of these curves."""
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Write what has not been written yet."""
        if self._writer is not None:
            self._writer.close()


class Meter:
    """Loss and speed of an epoch, over all processes."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._loss = self._samples = self._tokens = 0.0

    def add(self, loss: float, samples: int, tokens: int) -> None:
        """Count a physical batch of this process; it may be empty."""
        if samples:
            self._loss += loss * samples
            self._samples += samples
            self._tokens += tokens

    @property
    def here(self) -> tuple[float, float]:
        """Mean loss and tokens a second of this process so far."""
        seconds = time.perf_counter() - self._start
        return self._loss / max(self._samples, 1), self._tokens / seconds

    def totals(self, runtime: Runtime) -> tuple[float, float]:
        """Mean loss and tokens a second of all processes (a collective call)."""
        loss, samples, tokens = runtime.sum(self._loss, self._samples, self._tokens)
        return loss / max(samples, 1), tokens / (time.perf_counter() - self._start)


def table(header: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table with the first column to the left and the others to the right."""
    widths = [max(len(row[i]) for row in (header, *rows)) for i in range(len(header))]
    lines = []
    for row in (header, *rows):
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
