"""Results and settings that a model in a ghost mode offers its users."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from opacus.core.platform.delegated import Delegated
from opacus.core.platform.sharded import compute_device
from opacus.core.privacy.clipping import clip_flat
from opacus.core.privacy.params import PrivacyParams
from opacus.core.record.record import Record
from opacus.core.sums.planner import Planner
from opacus.core.sums.rounding import Rounding
from opacus.core.sums.strategy import Ghost
from opacus.grad_sample._norms import Norms, OrdinaryNorms
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.gsm_base import ONLY_BK


class GhostSettings(GradSampleHooks):
    """Limits of memory and of the gradient, and how layers are handled."""

    _privacy: PrivacyParams
    _strategy: Ghost

    # Clipping norm C: the one that the optimizer's noise is scaled with.
    max_grad_norm = Delegated[Any]("_privacy")

    @property
    def deferred_norm_budget(self) -> int | None:
        """Bytes that deferred records may hold; beyond it the oldest are computed early.

        ``None`` (the default) means a twentieth of what a CUDA device holds when the backward
        pass starts, and no limit on the CPU. The numbers are the same whatever the budget.
        """
        return self._strategy.limits.waiting

    @deferred_norm_budget.setter
    def deferred_norm_budget(self, value: int | None) -> None:
        self._strategy.limits.waiting = _bytes("deferred_norm_budget", value)

    @property
    def held_budget(self) -> int | None:
        """Bytes that may be kept for the clipped sum in the ``_bk`` modes.

        Beyond it nothing is kept of a block but its input and the gradient of its output: it runs
        forward and backward once more for the sum. Of layers outside of blocks, of compiled
        blocks, and with deferred norms, the smaller of per-sample gradients and records is kept.
        Under FSDP2 the least number of all ranks counts, from the step after it was set. ``None``
        (the default): see :attr:`memory_budget`; no limit on the CPU.
        """
        return self._strategy.limits.held

    @held_budget.setter
    def held_budget(self, value: int | None) -> None:
        self._limit("held", "held_budget", value)

    @property
    def memory_budget(self) -> int | None:
        """Bytes of a GPU that the step may use at its peak, in the ``_bk`` modes.

        It may be set as a share of the card, a float such as 0.9; bytes are an int. What is held
        follows from it block by block, as for :attr:`held_budget`; a step without privacy needs
        what is left. ``None`` (the default): all that the process can get of the card, but a
        twentieth of it. After running out of memory a block more runs again from the next step on,
        or all wait in host memory where that is faster, with a warning.
        """
        return self._strategy.limits.peak

    @memory_budget.setter
    def memory_budget(self, value: float | None) -> None:
        if value is not None:
            _check_share(value)
        if value is not None and not torch.cuda.is_available():
            raise ValueError("memory_budget is a GPU's, and there is none: set held_budget")
        if value is not None and 0 < value <= 1:
            value = value * torch.cuda.get_device_properties("cuda").total_memory
        whole = None if value is None else int(value)
        self._limit("peak", "memory_budget", whole)

    @property
    def host_budget(self) -> int:
        """Bytes of host memory that records of blocks may be sent to, in the ``_bk`` modes.

        For blocks that do not fit into :attr:`memory_budget`, where copying is faster than running
        them again. The memory is pinned, and stays with the process. By default, or if set to
        ``None``, a quarter of what is free, shared by the GPUs of the host; 0 without a GPU.
        """
        planner = self._strategy.planner
        if planner is None:
            return 0
        first = next(self._module.parameters(), None)
        return planner.host_room(torch.device("cpu") if first is None else compute_device(first))

    @host_budget.setter
    def host_budget(self, value: int | None) -> None:
        self._planner("host_budget").host_budget = _bytes("host_budget", value)

    @property
    def stored_dtype(self) -> str | None:
        """``"float8"``: per-sample gradients that are stored for the sum, in the ``_bk`` modes, are
        rounded to 8 bits with a scale for each unit and parameter, up or down by chance.

        Half the memory of bf16. The norm is taken of what is stored, so the bound of the clipped
        sum is exact. ``None`` (the default): as they were formed.
        """
        planner = self._strategy.planner
        return None if planner is None or planner.rounding is None else "float8"

    @stored_dtype.setter
    def stored_dtype(self, value: str | None) -> None:
        if value not in (None, "float8"):
            raise ValueError(f"stored_dtype must be 'float8' or None, got {value!r}")
        planner = self._planner("stored_dtype")
        planner.rounding = None if value is None else Rounding(_process())

    def _limit(self, limit: str, name: str, value: int | None) -> None:
        if value is not None:
            self._planner(name)
        setattr(self._strategy.limits, limit, _bytes(name, value))
        self._limited()

    def _limited(self) -> None:
        self._strategy.limits.asked()
        self._strategy.limit_memory(self._module)

    def _planner(self, name: str) -> Planner:
        """What a setting of this name is for.

        Raises:
            ValueError: The mode keeps nothing.
        """
        planner = self._strategy.planner
        if planner is None:
            raise ValueError(f"{name}: {ONLY_BK}")
        return planner

    @property
    def _deferred_norm_cache(self) -> list[Record]:
        """Records of the running norm pass whose norm has not been computed yet."""
        ledger = self._strategy.ledger
        return ledger.waiting if ledger is not None else []

    def explain(self) -> str:
        """The plan of the latest step: what was kept of each layer, and what it costs.

        Below it memory and time as they were predicted and measured.

        Before it, which mode ``grad_sample_mode="auto"`` has chosen, and why.

        Raises:
            RuntimeError: The mode keeps nothing: it is none of the ``_bk`` modes.
        """
        planner = self._strategy.planner
        if planner is None:
            return super().explain()
        backward = [layer.spec.name for layer in reversed(self._recorder.layers)]
        table, choices = planner.report.table(backward), planner.report.choices
        lone = self._recorder.lone
        if not choices and lone is not None and lone.ready:
            table += "\nBatches of one sample: autograd's whole gradient, kept; no layer is tapped."
        elif not choices:
            table += "\nNothing has been planned yet: it is in the first backward() of the loss."
        if choices:
            table += f"\n\n{planner.report.text(planner.held_bytes, planner.host_bytes)}"
        return table if self.auto_choice is None else f"{self.auto_choice}\n\n{table}"

    def log_module_gradient_sample_mode(
        self, module: nn.Module, *, force_functorch: bool = False, use_ghost_clipping: bool = True
    ) -> str:
        """How the norms of ``module``'s own parameters are computed."""
        for layer in self._recorder.layers:
            if layer.module is module:
                return type(layer.rule).__name__
        return "no trainable parameters of its own"


class GhostNorms(GhostSettings):
    """Norms and clipping factors of the latest pass."""

    trainable_parameters: list[nn.Parameter]
    _norms: Norms
    _ordinary: OrdinaryNorms

    @property
    def per_sample_gradient_norms(self) -> Tensor:
        """``[B]`` norms of the per-sample gradients of the latest norm pass, before clipping."""
        if self._norms.whole is None:
            raise AttributeError(
                "per_sample_gradient_norms is not set: run the criterion's loss.backward() first"
            )
        return self._norms.whole

    @per_sample_gradient_norms.setter
    def per_sample_gradient_norms(self, value: Tensor) -> None:
        self._norms.whole = value

    def get_norm_sample(self) -> Tensor:
        """``[B]`` norms of the per-sample gradients, from the parameters' ``_norm_sample``."""
        self._ordinary.settle()
        found = self._norms.published(self.trainable_parameters)
        return self.per_sample_gradient_norms if found is None else found

    def get_clipping_coef(self) -> Tensor:
        """``[B]`` clipping factors; 0 where the norm is not finite."""
        norms, privacy = self.get_norm_sample(), self._privacy
        if privacy.gradient_scales is not None:
            norms = self._norms.scaled(privacy.gradient_scales())
        return clip_flat(norms, privacy.sensitivity, privacy.clip_rule).factors

    def order_parameters(self, parameters: Sequence[nn.Parameter]) -> None:
        """Say which parameters per-layer clipping norms and scales belong to: the optimizer's."""
        self._norms.put_in_order(parameters)


def _process() -> str:
    """This process among those that train together."""
    return str(dist.get_rank()) if dist.is_available() and dist.is_initialized() else "0"


def _check_share(value: Any) -> None:
    """Refuse fractions that are no share: as bytes they would be one or two."""
    if not isinstance(value, Integral) and not 0 < float(value) <= 1:
        raise ValueError(
            "memory_budget must be an int, of bytes, or a float in (0, 1], a share of the card: "
            f"got {value!r}; write memory_budget = 0.9, say, or memory_budget = int(40e9)"
        )


def _bytes(name: str, value: Any) -> int | None:
    if value is not None and not (isinstance(value, Real) and value >= 0):
        raise ValueError(f"{name} must be a number of bytes >= 0, got {value!r}")
    return value
