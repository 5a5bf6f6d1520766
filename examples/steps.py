"""What follows each step of private training: curves, checkpoints, and the end on Ctrl-C."""

from __future__ import annotations

import argparse
import time
from typing import Any

from reporting import Reporter
from runtime import Runtime
from stopping import Stopped, StopRequest


class AfterStep:
    """Called after each physical batch; acts when a step, a logical batch, is complete.

    Args:
        args: Options of the run.
        private: Model, optimizer, engine and checkpoints.
        runtime: This process.
        reporter: Draws the curves.
        stop: Whether the user wants the run to end.
        extra: What checkpoints keep beside the run.
    """

    def __init__(
        self,
        args: argparse.Namespace,
        private: Any,
        *,
        runtime: Runtime,
        reporter: Reporter,
        stop: StopRequest,
        extra: dict[str, Any],
    ) -> None:
        self._args, self._private, self._extra = args, private, extra
        self._runtime, self._reporter, self._stop = runtime, reporter, stop
        self._checkpoints = private.checkpoints if args.checkpoint else None
        self._taken = len(private.engine.accountant)
        self._loss = self._samples = self._clipped = 0.0
        self._next_epsilon = 0.0

    def __call__(self, loss: float, samples: int) -> None:
        """Count a physical batch.

        Args:
            loss: Its mean loss.
            samples: Its number of samples, of this process; it may be 0.

        Raises:
            Stopped: A step is complete, saved if there is a folder for it, and the run is to end.
        """
        if samples:
            self._loss += loss * samples
            self._samples += samples
            if self._args.log_clipped:
                norms = self._private.model.per_sample_gradient_norms
                self._clipped += float((norms > self._args.max_grad_norm).sum())
        taken = len(self._private.engine.accountant)
        if taken == self._taken:
            return
        self._taken = taken
        # One number for all processes: they stop after the same step.
        asked, *sums = self._runtime.sum(
            float(self._stop.asked), self._loss, self._samples, self._clipped
        )
        self._loss = self._samples = self._clipped = 0.0
        self._curves(taken, *sums)
        if self._checkpoints is not None and self._args.checkpoint_every is not None:
            self._checkpoints.save_every(self._args.checkpoint_every, self._extra)
        if asked:
            self._end(taken)

    def _curves(self, step: int, loss: float, samples: float, clipped: float) -> None:
        if not self._reporter.draws:
            return
        values = {"lr": self._private.optimizer.param_groups[0]["lr"]}
        if samples:
            values["loss"] = loss / samples
            if self._args.log_clipped:
                values["private/clipped"] = clipped / samples
        if time.monotonic() >= self._next_epsilon:  # counting it may take longer than a step
            values["epsilon"] = self._private.engine.get_epsilon(self._args.delta)
            self._next_epsilon = time.monotonic() + 1
        self._reporter.curves(step, **values)

    def _end(self, step: int) -> None:
        if self._checkpoints is None:
            raise Stopped(f"stopped after step {step}; without --checkpoint nothing is saved")
        self._checkpoints.save(extra=self._extra)
        raise Stopped(
            f"stopped after step {step} and saved; go on with:\n"
            f"{self._stop.command(resume=self._args.checkpoint)}"
        )
