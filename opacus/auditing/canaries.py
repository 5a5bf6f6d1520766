"""Gradient canaries: items whose gradient is known, in the real training loop.

A canary is an ordinary item with a parameter element of its own, to which it adds a gradient so
large that it is all that clipping leaves. It goes through the same loader, layers, clipping, noise,
ranks and accountant as the others. Half of the canaries are put into the data by coin tosses; what
is released about each element then tells what the run does for privacy, and what an attacker
proves who sees every step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from opacus.auditing.checks import Observed, check_all
from opacus.auditing.claim import claimed_curve, compare_with_claim
from opacus.auditing.report import AuditReport

KEY = "canary"
NO_CANARY = -1
FEWEST = 64


class GradientCanaries:
    """An audit of one run by gradient canaries.

    Use, around `make_private`: wrap the data set and the model, pass the canary numbers of a batch
    to the model, call `watch` before and `report` after training::

        audit = GradientCanaries(200, seed=0)
        loader = DataLoader(audit.data(dataset), batch_size=64)
        model = audit.model(model)            # then the optimizer, then make_private
        audit.watch(optimizer, engine)
        ... model(inputs, canary=numbers) ...
        audit.report(delta=1e-5).raise_if_failed()

    Canaries are copies of items, so the audited model is not the one to release: audit the same
    program, with fewer steps if need be. Clipping must be flat, with uncorrelated noise. Under
    FSDP2 call `model` before `FSDP2Wrapper`, and everything on all ranks. In fp16 lower `scale`.

    Args:
        canaries: number of them, m; about half get into the data.
        seed: of the coin tosses and of the items that are copied. Not the seed of the run.
        scale: how much larger a canary's own gradient is than that of the model's outputs.

    Attributes:
        included: `[m]`, the coin tosses.

    Raises:
        ValueError: if there are too few canaries to see anything, or ranks have no common seed.
    """

    def __init__(self, canaries: int, *, seed: int | None = None, scale: float = 1e4) -> None:
        if canaries < FEWEST:
            raise ValueError(f"canaries must be at least {FEWEST}, got {canaries!r}")
        several = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if several and seed is None:
            raise ValueError("with several ranks give a seed, so that all toss the same coins")
        if not scale > 0.0:
            raise ValueError(f"scale must be positive, got {scale!r}")
        self._random = np.random.default_rng(seed)
        self.canaries, self.scale = canaries, scale
        self.included = self._random.random(canaries) < 0.5
        self._model: CanaryModel | None = None
        self._steps: list[Tensor] = []
        self._sigmas: list[float] = []
        self._engine: Any = None
        self._counted_before = 0
        self._rate = 0.0

    def data(self, dataset: Any) -> CanaryDataset:
        """The data set with the canaries that are in, each item with its canary's number.

        Args:
            dataset: with a length; of mappings, which get the key ``"canary"``, or of tuples, which
                get one entry more. A number of -1 means no canary.
        """
        numbers = np.flatnonzero(self.included)
        places = self._random.integers(len(dataset), size=len(numbers))
        return CanaryDataset(dataset, places.tolist(), numbers.tolist())

    def model(self, module: nn.Module) -> CanaryModel:
        """The model with the canaries' elements; call it with ``canary=`` numbers `[B]`.

        Args:
            module: returns tensors (alone, or in containers) whose first dimension is the batch.
        """
        self._model = CanaryModel(module, self.canaries, self.scale)
        return self._model

    def watch(self, optimizer: Any, engine: Any) -> None:
        """Record what each step of the private optimizer releases from now on.

        Args:
            optimizer: as `make_private` returned it.
            engine: that made it; its accountant is compared with what happens.

        Raises:
            ValueError: if the audit has no model, or the run has no noise or flat clipping.
        """
        if self._model is None:
            raise ValueError("call model() before make_private, so that canaries have elements")
        if optimizer._privacy.max_grad_norms is not None:
            raise ValueError("gradient canaries need clipping='flat', got per-layer norms")
        if optimizer._privacy.gradient_scales is not None:
            raise ValueError("gradient canaries need an optimizer that scales no gradients")
        if optimizer._parallelism.correlation is not None:
            raise ValueError("gradient canaries need noise that is not correlated between steps")
        if not optimizer.noise_multiplier > 0.0:
            raise ValueError("noise_multiplier is 0: a run without noise promises nothing")
        self._engine, self._counted_before = engine, len(engine.accountant)
        self._rate = max(counter.sample_rate for counter in optimizer._counters)
        optimizer.attach_step_hook(self._note)

    def _note(self, optimizer: Any) -> None:
        assert self._model is not None
        gradient = self._model.canaries.weight.grad
        if gradient is None:
            raise ValueError(
                "the canaries' parameter got no gradient in a step: build the optimizer over the "
                "parameters of the model that model() returned"
            )
        whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
        divisor = 1.0
        if optimizer.loss_reduction == "mean":
            divisor = optimizer.expected_batch_size * optimizer.accumulated_iterations
            divisor *= optimizer._parallelism.world_size
        in_stds = whole.detach().double().view(-1) * (divisor / optimizer._privacy.noise_std)
        self._steps.append(in_stds.cpu())
        self._sigmas.append(optimizer._privacy.noise_std / optimizer.max_grad_norm)

    def scores(self) -> np.ndarray:
        """`[m]` score of each canary, high for those that look like members of the data."""
        return torch.stack(self._steps).sum(0).numpy() if self._steps else np.zeros(self.canaries)

    def report(
        self, *, delta: float, confidence: float = 0.95, false_alarm: float = 1e-3
    ) -> AuditReport:
        """Everything that the audit found so far.

        Args:
            delta: at which epsilon is compared; far below 1 / canaries.
            confidence: of the lower bound of epsilon that is reported.
            false_alarm: chance of any failure in a run that keeps its promise, apart from "power":
                too few steps or canaries to see bugs always fail.

        Raises:
            ValueError: if no step was watched.
        """
        if not self._steps:
            raise ValueError("no step was taken since watch(): nothing can be said")
        observed = Observed(
            torch.stack(self._steps).numpy(),
            np.array(self._sigmas),
            self.included,
            self._rate,
            len(self._engine.accountant) - self._counted_before,
        )
        half = 0.5  # share of the false alarms for the checks; the rest is for what is claimed
        return compare_with_claim(
            self.scores(),
            self.included,
            epsilon=float(self._engine.get_epsilon(delta)),
            delta=delta,
            confidence=confidence,
            false_alarm=false_alarm,
            others=check_all(observed, half * false_alarm),
            share=half,
            curve=claimed_curve(self._engine.accountant),
        )


class CanaryDataset(Dataset[Any]):
    """A data set and copies of some of its items, each with the number of its canary.

    Args:
        dataset: the items.
        places: of the copied items.
        numbers: of the canaries that they are.
    """

    def __init__(self, dataset: Any, places: list[int], numbers: list[int]) -> None:
        self.dataset, self.places, self.numbers = dataset, places, numbers

    def __len__(self) -> int:
        return len(self.dataset) + len(self.places)

    def __getitem__(self, index: int) -> Any:
        copied = index - len(self.dataset)
        item = self.dataset[index if copied < 0 else self.places[copied]]
        number = NO_CANARY if copied < 0 else self.numbers[copied]
        if isinstance(item, Mapping):
            return {**item, KEY: number}
        return (*item, number) if isinstance(item, (tuple, list)) else (item, number)


class CanaryModel(nn.Module):
    """A model whose outputs do not change, with one parameter element for each canary.

    Args:
        module: the model.
        canaries: number of elements.
        scale: norm of a canary's gradient relative to that of its rows of the outputs.
    """

    def __init__(self, module: nn.Module, canaries: int, scale: float) -> None:
        super().__init__()
        some = next(module.parameters())
        self.module = module
        self.canaries = nn.Embedding(canaries, 1, device=some.device, dtype=some.dtype)
        nn.init.zeros_(self.canaries.weight)
        self.scale = scale

    def forward(self, *args: Any, canary: Tensor, **kwargs: Any) -> Any:
        """What the model returns.

        Args:
            *args: of the model.
            canary: `[B]` numbers of canaries, -1 for none.
            **kwargs: of the model.

        Raises:
            ValueError: if an output has another first dimension than the batch.
        """
        outputs = self.module(*args, **kwargs)
        if not self.training:
            return outputs
        found = [x for x in tree_leaves(outputs) if isinstance(x, Tensor) and x.requires_grad]
        if not found or any(x.dim() == 0 or len(x) != len(canary) for x in found):
            raise ValueError(
                f"the model must return tensors with the batch of {len(canary)} first, got "
                f"{[tuple(x.shape) for x in found]}; a loss that the model computes itself cannot "
                "be audited: return logits"
            )
        numbers = canary.to(self.canaries.weight.device)
        element = self.canaries(numbers.clamp(min=0)).squeeze(-1)  # [B]
        strength = torch.where(numbers >= 0, self.scale, 0.0)  # [B]

        def attached(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.requires_grad:
                return value
            return _Attach.apply(value, element, strength)

        return tree_map(attached, outputs)


class _Attach(torch.autograd.Function):
    """The outputs as they are; each row's element gets a gradient as large as the row's.

    It is positive, so scores do not depend on the loss, and scales with the loss.
    """

    @staticmethod
    def forward(ctx: Any, output: Tensor, element: Tensor, strength: Tensor) -> Tensor:
        ctx.save_for_backward(strength)
        ctx.dtype = element.dtype
        return output.clone()  # no view: FSDP2 warns of those

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (strength,) = ctx.saved_tensors
        gradient = gradients[0]
        norms = gradient.flatten(1).float().norm(dim=1) if gradient.dim() > 1 else gradient.abs()
        return gradient, (norms * strength).to(ctx.dtype), None
