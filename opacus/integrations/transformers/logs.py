"""What a private Trainer logs: losses of the steps that drew examples, epsilon, norms."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_QUANTILES = (0.1, 0.5, 0.9)


@dataclass
class Steps:
    """Steps whose losses Trainer has added up, and how many of them drew examples."""

    taken: int = 0
    drew: int = 0

    def note(self, examples: float) -> None:
        """One more step, of so many examples."""
        self.taken += 1
        self.drew += examples > 0

    def correct(self, logs: dict[str, float], name: str) -> None:
        """Make a mean over all steps one over those with examples; without any there is none.

        Trainer divides by the number of steps, to whose sum an empty draw has added 0.
        """
        if self.drew:
            logs[name] *= self.taken / self.drew
        elif self.taken:
            del logs[name]


class PrivateLogs:
    """Overrides of a Trainer's own; the base of ``PrivateStep``."""

    _norms: list[Tensor]
    _since_log: Steps
    _in_run: Steps

    def get_epsilon(self) -> float:
        """See ``DPTrainerMixin``."""
        raise NotImplementedError

    def _start_logs(self) -> None:
        self._since_log, self._in_run = Steps(), Steps()

    def _note_step(self, examples: float) -> None:
        self._since_log.note(examples)
        self._in_run.note(examples)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """As the Trainer's, with epsilon beside training losses; empty draws have no loss."""
        if "loss" in logs or "train_loss" in logs:
            logs["epsilon"] = self.get_epsilon()
            if self._norms:
                norms = torch.cat(self._norms)
                self._norms.clear()
                for q in _QUANTILES:
                    logs[f"private/grad_norm_p{q * 100:.0f}"] = float(norms.quantile(q))
        if {"loss", "learning_rate"} <= logs.keys():  # Trainer's own, not a user's
            self._since_log.correct(logs, "loss")
            self._since_log = Steps()
        if {"train_loss", "total_flos"} <= logs.keys():
            self._in_run.correct(logs, "train_loss")
        super().log(logs, *args, **kwargs)  # type: ignore[misc]


def with_mean(output: Any) -> Any:
    """What ``train()`` returns, with the mean loss that was logged."""
    return output._replace(training_loss=output.metrics.get("train_loss", math.nan))
