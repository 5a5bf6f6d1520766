"""The arguments of ``make_private`` as one value."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from opacus.accountants.sampling import Sampling
from opacus.core.privacy.correlated import CorrelatedNoise
from opacus.core.privacy.params import check_switches
from opacus.core.step.auto import ChosenMode
from opacus.core.step.modes import Mode, mode_of
from opacus.planning import Plan

OF_THE_MODEL = frozenset({"deferred_norm", "use_ghost_clipping", "strict", "force_functorch"})

_SWITCHES = ("batch_first", "poisson_sampling", "wrap_model", "rand_on_empty")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The arguments of :meth:`opacus.PrivacyEngine.make_private`, which says what each means.

    Attributes:
        further: Arguments of the model's wrapper, of the criterion and of the optimizer.
        choice: What ``"auto"`` has chosen and why; ``grad_sample_mode`` is that mode then.
    """

    module: nn.Module
    optimizer: Optimizer
    criterion: Any
    data_loader: DataLoader[Any]
    noise_multiplier: float
    max_grad_norm: float | list[float]
    batch_first: bool
    loss_reduction: str
    poisson_sampling: bool
    clipping: str
    noise_generator: torch.Generator | None
    grad_sample_mode: str
    wrap_model: bool
    rand_on_empty: bool
    data_layout: str
    privacy_unit: str | None
    expected_batch_size: float | None
    sample_rate: float | None
    correlated_noise: CorrelatedNoise | None = None
    sampling: Sampling | None = None
    max_batch_size: int | None = None
    release_grid: float | None = None
    further: Mapping[str, Any] = field(default_factory=dict)
    choice: ChosenMode | None = None

    @property
    def mode(self) -> Mode:
        """The mode that ``grad_sample_mode`` names."""
        return mode_of(self.grad_sample_mode)

    @property
    def deferred_norm(self) -> bool | None:
        """Whether norms are deferred; ``None``: as the environment says."""
        return self.further.get("deferred_norm")

    def check_switches(self) -> None:
        """Check the arguments that are on or off: every text is true, also ``"false"``.

        Raises:
            TypeError: One is neither.
        """
        switches = {name: getattr(self, name) for name in _SWITCHES}
        if self.deferred_norm is not None:
            switches["deferred_norm"] = self.deferred_norm
        check_switches(**switches)

    def facts(self) -> dict[str, Any]:
        """What must be equal on all ranks, beside the model and the mode."""
        return {
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm,
            "loss_reduction": self.loss_reduction,
            "poisson_sampling": self.poisson_sampling,
            "clipping": self.clipping,
            "data_layout": self.data_layout,
            "deferred_norm": self.deferred_norm,
            "expected_batch_size": self.expected_batch_size,
            "sample_rate": self.sample_rate,
            "correlated_noise": self.correlated_noise,
            "sampling": self.sampling,
            "max_batch_size": self.max_batch_size,
            "release_grid": self.release_grid,
            "further_arguments": sorted(self.further),
        }

    def plan(self, sample_rate: float, sampling: Sampling | None, accountant: str) -> Plan:
        """What the run promises; see :class:`opacus.planning.Plan`."""
        norm, size = self.max_grad_norm, self.expected_batch_size
        if size is None:
            size = len(self.data_loader.dataset) * sample_rate  # type: ignore[arg-type]
        return Plan(
            sample_rate=sample_rate,
            noise_multiplier=self.noise_multiplier,
            max_grad_norm=tuple(norm) if isinstance(norm, list) else norm,
            expected_batch_size=size,
            poisson_sampling=self.poisson_sampling,
            sampling=sampling,
            max_batch_size=self.max_batch_size,
            privacy_unit=self.privacy_unit,
            clipping=self.clipping,
            correlated_noise=self.correlated_noise,
            release_grid=self.release_grid,
            accountant=accountant,
        )

    def of_the_model(self) -> dict[str, Any]:
        """Further arguments of the model's wrapper."""
        layout = {"data_layout": self.data_layout} if self.mode.parallelism == "fsdp" else {}
        return {**self._further(OF_THE_MODEL), **layout}

    def of_the_criterion(self, names: Set[str]) -> dict[str, Any]:
        """Further arguments with these names, which the criterion has."""
        return self._further(names - OF_THE_MODEL)

    def of_the_optimizer(self, of_the_criterion: Set[str]) -> dict[str, Any]:
        """All other further arguments."""
        return self._further(self.further.keys() - OF_THE_MODEL - of_the_criterion)

    def _further(self, names: Set[str]) -> dict[str, Any]:
        return {name: value for name, value in self.further.items() if name in names}
