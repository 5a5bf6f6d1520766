"""Three ways to train the same model: without privacy, with ``hooks``, with ``ghost``.

Shapes: B samples, T tokens, V tokens in the vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from memory_test.torch_profile.phases import Ranges, watch_private_step
from opacus import GradSampleModule
from opacus.grad_sample import wrap_model
from opacus.optimizers import DPOptimizer, DPOptimizerFastGradientClipping
from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping


@dataclass(frozen=True)
class Settings:
    """What a step is made of.

    Attributes:
        batch_size: Number of samples B.
        seq_length: Number of tokens T.
        noise_multiplier: Standard deviation of the noise, in clipping norms.
        max_grad_norm: Clipping norm.
        learning_rate: Of SGD.
        seed: Of the data.
    """

    batch_size: int
    seq_length: int
    noise_multiplier: float = 1.0
    max_grad_norm: float = 1.0
    learning_rate: float = 1e-5
    seed: int = 0


class Trainer(ABC):
    """Trains on random tokens, one batch a step; parts of a step are ranges of the profiler.

    Args:
        model: Gives logits ``[B, T, V]`` from tokens ``[B, T]``; is on its device already.
        vocab: Number of tokens V in the vocabulary.
        settings: What a step is made of.
    """

    description: ClassVar[str]

    def __init__(self, model: nn.Module, vocab: int, settings: Settings) -> None:
        self.settings = settings
        self.vocab = vocab
        self.device = next(model.parameters()).device
        self.generator = torch.Generator(self.device).manual_seed(settings.seed)
        self.ranges = Ranges(self.device)
        self.criterion: Any = nn.CrossEntropyLoss()
        self.model: Any = model
        self.optimizer: Any = torch.optim.SGD(model.parameters(), lr=settings.learning_rate)
        self.ranges.wrap(self.optimizer, "step", "step")
        self.set_up()

    @abstractmethod
    def set_up(self) -> None:
        """Put what is private around model, optimizer and criterion."""

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        """The loss of logits ``[B, T - 1, V]`` and targets ``[B, T - 1]``."""
        # reshape, not view: what was sliced off the last token is not contiguous.
        return self.criterion(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))

    def batch(self) -> Tensor:
        """New random tokens ``[B, T]``."""
        size = (self.settings.batch_size, self.settings.seq_length)
        return torch.randint(self.vocab, size, generator=self.generator, device=self.device)

    def step(self, tokens: Tensor | None = None) -> Tensor:
        """One whole step; returns the loss, without its graph.

        Args:
            tokens: ``[B, T]``; new random ones if not given.
        """
        self.optimizer.zero_grad(set_to_none=True)
        tokens = self.batch() if tokens is None else tokens
        with self.ranges.phase("forward"):
            loss = self.loss(self.model(tokens)[:, :-1], tokens[:, 1:])
        with self.ranges.phase("backward"):
            loss.backward()
        with self.ranges.phase("optimizer"):
            self.optimizer.step()
        return loss.detach()


class StandardTrainer(Trainer):
    """SGD without privacy."""

    description = "SGD, no privacy"

    def set_up(self) -> None:
        """Nothing to do."""


class DPSGDTrainer(Trainer):
    """DP-SGD (arXiv:1607.00133) that keeps all per-sample gradients."""

    description = "DP-SGD, per-sample gradients kept (hooks)"

    def set_up(self) -> None:
        """``GradSampleModule`` around the model, ``DPOptimizer`` around the optimizer."""
        self.model = GradSampleModule(self.model)
        self.optimizer = DPOptimizer(
            self.optimizer,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=self.settings.max_grad_norm,
            expected_batch_size=self.settings.batch_size,
        )
        watch_private_step(self.ranges, self.model, self.optimizer)


class DPGhostClippingTrainer(Trainer):
    """DP-SGD by ghost clipping (arXiv:2110.05679): norms first, then the clipped sum."""

    description = "DP-SGD, ghost clipping (ghost)"

    def set_up(self) -> None:
        """``wrap_model`` in the mode ``ghost``, with its optimizer and its criterion."""
        limit = self.settings.max_grad_norm
        # GradSampleModule itself takes no grad_sample_mode; wrap_model picks the class.
        self.model = wrap_model(self.model, grad_sample_mode="ghost", max_grad_norm=limit)
        self.optimizer = DPOptimizerFastGradientClipping(
            self.optimizer,
            noise_multiplier=self.settings.noise_multiplier,
            max_grad_norm=limit,
            expected_batch_size=self.settings.batch_size,
        )
        self.criterion = DPLossFastGradientClipping(self.model, self.optimizer, self.criterion)
        watch_private_step(self.ranges, self.model, self.optimizer)

    def loss(self, logits: Tensor, targets: Tensor) -> Any:
        """One loss a sample, in a tensor whose ``backward`` clips."""
        flat = logits.reshape(-1, logits.shape[-1])
        return self.criterion(flat, targets.reshape(-1), shape=logits.shape)


TRAINERS: dict[str, type[Trainer]] = {
    cls.__name__: cls for cls in (StandardTrainer, DPSGDTrainer, DPGhostClippingTrainer)
}
