"""Which parameters are recorded: those that are trainable now and that the optimizer holds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.record.recorder import Recorder
from opacus.core.sums.strategy import Ghost
from opacus.grad_sample._guards import Guards
from opacus.grad_sample.gsm_base import AbstractGradSampleHooks, say_what_is_unheld


class HeldParameters(AbstractGradSampleHooks):
    """The hooks' view of the optimizer: the parameters that it holds, the passes that it allows."""

    # Names of the parameters that the optimizer holds; ``None``: all that are trainable.
    _held: frozenset[str] | None = None
    _recorder: Recorder
    _guards: Guards
    _strategy: Any
    hooks_enabled: bool
    grad_accumulation_allowed: bool
    _every: list[nn.Parameter]  # that the model has had since hooks were added
    force_functorch: bool

    @abstractmethod
    def add_hooks(self, *, loss_reduction: str, batch_first: bool, force_functorch: bool) -> None:
        """Tap every layer that owns a trainable parameter."""

    def hold_only(self, parameters: Iterable[Tensor]) -> None:
        """Record these parameters alone; the others count as frozen.

        They are in no norm, are not clipped, and (in ghost modes) get no gradient.

        Args:
            parameters: Those that the optimizer holds, frozen ones too.
        """
        held = {id(p) for p in parameters}
        self._held = frozenset(n for n, p in self._module.named_parameters() if id(p) in held)
        say_what_is_unheld(self._mark_unheld())

    def _mark_unheld(self) -> list[str]:
        """Layers leave out what the optimizer does not hold; returns its names."""
        self._guards.hold(self._held)
        if self._held is None:
            return []
        left: list[str] = []
        for layer in self._recorder.layers:
            own = {local: name for local, name in layer.owners.items() if name not in self._held}
            layer.unheld = frozenset(own)
            left += own.values()
        return left

    def _follow_unfreezing(self) -> None:
        """Tap layers whose parameters were made trainable since hooks were added.

        Raises:
            RuntimeError: The optimizer does not hold them, or it cannot be done; names them.
        """
        new = self._unfrozen()
        if not new:
            return
        if self._held is not None and not self._held.issuperset(name for name, _ in new):
            self._refuse_unfrozen("the optimizer does not hold them: build it with them")
        if self._guards.sharded():
            self._refuse_unfrozen("FSDP2 has set up its gradients without them")
        accumulation, strategy = self.grad_accumulation_allowed, self._strategy
        self.remove_hooks()
        self.add_hooks(
            loss_reduction=self.loss_reduction,
            batch_first=self.batch_first,
            force_functorch=self.force_functorch,
        )
        self._strategy.go_on_from(strategy)
        if isinstance(self._strategy, Ghost):
            self._strategy.limit_memory(self._module)
        if not accumulation:
            self.forbid_grad_accumulation()
        for _, parameter in new:
            parameter.grad_sample = None  # type: ignore[attr-defined]

    def _look_for_new(self) -> None:
        """Refuse parameters of modules that were added since.

        Raises:
            RuntimeError: They are trainable, and nothing clips them; names them.
        """
        if self._guards.sharded():
            return
        known = {id(p) for p in self._every}
        here = {id(p) for p in self._recorder.whose.flags.parameters} - known
        new = [(n, p) for n, p in self._module.named_parameters() if id(p) in here]
        self._untapped = [*self._untapped, *new]
        self._every += [p for _, p in new]
        if self._unfrozen():
            self._refuse_unfrozen("their modules were added since")

    def _unfrozen(self) -> list[tuple[str, nn.Parameter]]:
        """Parameters that were made trainable, while hooks are on, since layers were tapped."""
        if not self.hooks_enabled or torch.compiler.is_compiling():
            return []
        return [(name, p) for name, p in self._untapped if p.requires_grad]

    def _refuse_unfrozen(self, why: str) -> None:
        names = [name for name, _ in self._unfrozen()]
        raise RuntimeError(
            f"parameters {names[:5]} were made trainable after make_private, and nothing would "
            f"clip them: {why}. Make them trainable before make_private, or freeze them"
        )

    # --- policy ---

    def forbid_grad_accumulation(self) -> None:
        """Make a second backward pass without ``zero_grad`` in between a ValueError."""
        self.grad_accumulation_allowed = False
        self._strategy.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        """Let several backward passes accumulate (not sound with Poisson sampling)."""
        self.grad_accumulation_allowed = True
        self._strategy.accumulation_allowed = True
