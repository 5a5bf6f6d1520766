"""New-token canaries: what a trained language model itself gives away.

Each canary is a sequence that ends in a token of its own, which occurs nowhere else. A model that
has learnt to expect this token has seen the canary. Only the finished model is needed, so this is
what an attacker does who downloads it. Since the tokens are new, canaries do not depend on each
other or on the rest of the data, and the loss on the new token is the whole of a canary's loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from opacus.accountants import IAccountant
from opacus.auditing.claim import claimed_curve, compare_with_claim
from opacus.auditing.report import AuditReport

IGNORED = -100
FEWEST = 16


class TokenCanaries:
    """Canaries for a language model, and the audit of the model trained with them.

    Use: make the vocabulary larger, train on the sequences of `items` with your own, then ask the
    finished model::

        canaries = TokenCanaries(torch.randint(vocabulary, (200, 8)), vocabulary)
        inputs, labels = canaries.items()
        before = canaries.losses(model)
        ...
        canaries.report(model, epsilon=3.0, delta=1e-5, before=before).raise_if_failed()

    Args:
        contexts: `[m, T]` token numbers, what canaries begin with: random ones, or public text.
        vocabulary: number of tokens without canaries. The model needs ``vocabulary + m`` rows of
            embeddings and outputs (``resize_token_embeddings``); the new ones are canaries'.
        seed: of the coin tosses. Not the seed of the run.

    Attributes:
        included: `[m]`, the coin tosses.

    Raises:
        ValueError: if there are too few canaries, or a context has a token out of range.
    """

    def __init__(self, contexts: Tensor, vocabulary: int, *, seed: int | None = None) -> None:
        if contexts.dim() != 2 or len(contexts) < FEWEST or contexts.shape[1] < 1:
            raise ValueError(
                f"contexts must be [m, T] with m >= {FEWEST}, got {tuple(contexts.shape)}"
            )
        if int(contexts.min()) < 0 or int(contexts.max()) >= vocabulary:
            raise ValueError(f"contexts must hold tokens below vocabulary = {vocabulary}")
        number = len(contexts)
        self.vocabulary = vocabulary
        self.included = np.random.default_rng(seed).random(number) < 0.5
        new = torch.arange(vocabulary, vocabulary + number).unsqueeze(1)
        self.inputs = torch.cat([contexts.cpu(), new], dim=1)  # [m, T + 1]
        self.labels = torch.full_like(self.inputs, IGNORED)
        self.labels[:, -1] = self.inputs[:, -1]  # only the new token is learnt

    def __len__(self) -> int:
        """Number of canaries, in the data or not."""
        return len(self.inputs)

    def items(self) -> tuple[Tensor, Tensor]:
        """Inputs and labels `[k, T + 1]` of the canaries that belong into the data.

        Labels are -100 except for the last token, as transformers and `cross_entropy` expect; shift
        them as those of the other sequences.
        """
        inside = torch.from_numpy(self.included)
        return self.inputs[inside], self.labels[inside]

    @torch.no_grad()
    def losses(self, logits: Callable[[Tensor], Tensor], *, batch: int = 64) -> Tensor:
        """`[m]` loss of each canary's new token, in or not.

        Args:
            logits: the model in eval mode: `[B, T]` tokens to `[B, T, vocabulary + m]`.
            batch: number of canaries at a time.

        Raises:
            ValueError: if the logits do not cover the new tokens.
        """
        found = []
        for tokens in self.inputs.split(batch):
            last = logits(tokens[:, :-1])[:, -1].float().cpu()  # [B, V]
            if last.shape[-1] < self.vocabulary + len(self):
                raise ValueError(
                    f"the model has {last.shape[-1]} tokens, the canaries need "
                    f"{self.vocabulary + len(self)}: make its vocabulary larger before training"
                )
            # Each against the old tokens, so that other canaries' tokens do not matter.
            own = last.gather(1, tokens[:, -1:])  # [B, 1]
            candidates = torch.cat([own, last[:, : self.vocabulary]], dim=1)
            target = torch.zeros(len(tokens), dtype=torch.long)
            found.append(nn.functional.cross_entropy(candidates, target, reduction="none"))
        return torch.cat(found)

    def report(
        self,
        logits: Callable[[Tensor], Tensor],
        *,
        epsilon: float,
        delta: float,
        confidence: float = 0.95,
        before: Tensor | None = None,
        false_alarm: float = 1e-3,
        accountant: IAccountant | None = None,
    ) -> AuditReport:
        """Compare what the model gives away with what is claimed.

        Args:
            logits: as in :meth:`losses`.
            epsilon: what the accountant claims at `delta`.
            delta: far below 1 / m.
            confidence: of the lower bound that is reported.
            before: `losses` of the untrained model: scores are then how much each loss fell, which
                tells more.
            false_alarm: chance of a failure in a run that keeps its promise.
            accountant: of the run; its whole trade-off curve is compared, too.
        """
        after = self.losses(logits)
        scores: Any = (-after if before is None else before - after).double().numpy()
        return compare_with_claim(
            scores,
            self.included,
            epsilon=epsilon,
            delta=delta,
            confidence=confidence,
            false_alarm=false_alarm,
            curve=None if accountant is None else claimed_curve(accountant),
        )
