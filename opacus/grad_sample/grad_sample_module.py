"""Per-sample gradients by hooks: ``parameter.grad_sample`` after every backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from opacus.core.isolation.check import Isolation
from opacus.core.norms.kept import add_rows
from opacus.core.platform.replicas import WithoutReduction
from opacus.core.record.layers import Layer, layers_of
from opacus.core.record.record import Record, trains
from opacus.core.record.recorder import Recorder
from opacus.core.rules.base import pad_rows
from opacus.core.rules.generic import GenericRule
from opacus.core.sums.materialise import Materialise
from opacus.grad_sample._guards import Guards
from opacus.grad_sample._samplers import Sampler, choose_rule
from opacus.grad_sample._units import NamedByUser
from opacus.grad_sample.functorch import SampleGradient
from opacus.grad_sample.gsm_base import AbstractGradSampleModule


def create_or_accumulate_grad_sample(
    *, param: Tensor, grad_sample: Tensor, max_batch_len: int
) -> None:
    """Add ``grad_sample`` ``[n, *shape]`` to the rows ``0..n-1`` of the running batch.

    Args:
        param: Parameter that gets the attribute ``_current_grad_sample``.
        grad_sample: Per-sample gradients of one use of the parameter.
        max_batch_len: Number of rows B of the batch, n <= B.
    """
    if not param.requires_grad:
        return
    known = getattr(param, "_current_grad_sample", None)
    rows = pad_rows(grad_sample, max_batch_len)
    param._current_grad_sample = rows if known is None else add_rows(known, rows)  # type: ignore[attr-defined]


def promote_current_grad_sample(p: nn.Parameter) -> None:
    """Move ``_current_grad_sample`` to ``grad_sample``, as a list from the second batch on."""
    if not p.requires_grad:
        return
    current = p._current_grad_sample  # type: ignore[attr-defined]
    known: Any = getattr(p, "grad_sample", None)
    if known is None:
        p.grad_sample = current  # type: ignore[attr-defined]
    else:
        earlier = known if isinstance(known, list) else [known]
        p.grad_sample = [*earlier, current]  # type: ignore[attr-defined]
    del p._current_grad_sample  # type: ignore[attr-defined]


class GradSampleHooks(NamedByUser):
    """Hooks that give each parameter ``grad_sample`` ``[B, *shape]`` in the backward pass.

    The module is not wrapped. Each layer that owns a trainable parameter is tapped;
    its rule is the sampler registered for its class, else the core's, else the
    generic one (vmap), so that any module works.

    Args:
        m: The module.
        batch_first: Whether activations have the batch in dimension 0 (else in 1).
        loss_reduction: ``"mean"`` or ``"sum"``, how the loss is reduced over samples.
        strict: Refuse modules that cannot be private (see :meth:`validate`).
        force_functorch: Use the generic rule for every layer.

    Raises:
        NotImplementedError: ``strict`` and the module updates statistics over samples.
        ValueError: The module has hooks already.
    """

    GRAD_SAMPLERS: ClassVar[dict[type[nn.Module], Sampler]] = {}
    _sees_loss: ClassVar[bool] = False  # whether the criterion is ours
    isolation: Isolation

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ) -> None:
        if hasattr(m, "autograd_grad_sample_hooks"):
            raise ValueError(
                "Trying to add hooks twice to the same model. Call cleanup() on the earlier "
                "GradSampleHooks (or to_standard_module() on the wrapper) first; in place of a "
                "copy of a model with hooks, build another and load its state_dict()"
            )
        self.validate(module=m, strict=strict)
        self._strict = strict
        super().__init__(m, batch_first=batch_first, loss_reduction=loss_reduction)
        self.force_functorch = force_functorch
        self.grad_accumulation_allowed = True
        self.hooks_enabled = False
        self.add_hooks(
            loss_reduction=loss_reduction, batch_first=batch_first, force_functorch=force_functorch
        )

    # --- hooks ---

    def add_hooks(
        self,
        *,
        loss_reduction: str = "mean",
        batch_first: bool = True,
        force_functorch: bool = False,
    ) -> None:
        """Tap every layer that owns a trainable parameter.

        Raises:
            ValueError: The module has hooks already.
        """
        if hasattr(self._module, "autograd_grad_sample_hooks"):
            raise ValueError("Trying to add hooks twice to the same model")
        self.loss_reduction = loss_reduction
        self.batch_first = batch_first
        self._recorder = Recorder(
            self._module,
            self._layers(force_functorch),
            self._receive,
            batch_first=batch_first,
        )
        for layer in self._recorder.layers:
            if isinstance(layer.rule, GenericRule):
                module: Any = layer.module
                module.ft_compute_sample_grad = SampleGradient(
                    module, batch_first, self._recorder.paused
                )
        self._guards = Guards(
            self._module, self._recorder, strict=self._strict, sees_loss=self._sees_loss
        )
        self._strategy = self._make_strategy()
        self._recorder.send_to(self._sink())
        # Before FSDP2's own, which puts whole parameters in the places of shards.
        first = self._module.register_forward_pre_hook(self._before_forward, prepend=True)
        self._recorder.handles += [first, WithoutReduction(self._module)]
        known = self.__dict__.get("isolation")  # of the optimizer, too
        if known is None:
            self.isolation = self._make_isolation()
        else:
            known.attach(self._recorder)
        covered = {owner for layer in self._recorder.layers for owner in layer.owners.values()}
        named = self._module.named_parameters()
        self._untapped = [(name, p) for name, p in named if name not in covered]
        self._every = list(self._module.parameters())
        self._recorder.whose.flags.on_change = self._look_for_new
        self._mark_unheld()
        self._module.autograd_grad_sample_hooks = self._recorder.handles  # type: ignore[assignment]
        self.autograd_grad_sample_hooks = self._recorder.handles
        self.enable_hooks()
        self._start_watching()

    def _start_watching(self) -> None:
        """What a subclass adds to the hooks."""

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        unfinished = self._recorder.unfinished
        if unfinished.running and unfinished.failed:
            self._drop_unfinished()
        self._guards.check(self.hooks_enabled)
        if self._untapped and self._unfrozen():
            self._refuse_unfrozen(
                "call the wrapper that make_private returned, not the model in it"
            )

    def _drop_unfinished(self) -> None:
        """Drop what a backward pass that failed has left, and what it was added to."""
        self._recorder.unfinished.drop()
        self.isolation.drop()
        for parameter in self._module.parameters():
            if getattr(parameter, "grad_sample", None) is not None:
                parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]

    def _layers(self, force_functorch: bool) -> list[Layer]:
        def choose(module: nn.Module) -> Any:
            norm_samplers = getattr(self, "NORM_SAMPLERS", {})
            return choose_rule(module, self.GRAD_SAMPLERS, norm_samplers, force_functorch)

        return layers_of(self._module, choose)

    def _make_strategy(self) -> Any:
        return Materialise(self.loss_reduction)

    def _make_isolation(self, **how: Any) -> Isolation:
        """What checks that samples do not depend on each other."""
        return Isolation(
            self._module,
            self._recorder,
            batch_first=self.batch_first,
            shared=self._sees_loss or self.loss_reduction == "mean",
            mean=self.loss_reduction == "mean",
            sees_loss=self._sees_loss,
            replicated=any(isinstance(m, DistributedDataParallel) for m in self._module.modules()),
            **how,
        )

    def remove_hooks(self) -> None:
        """Take all hooks off the module; nothing of them is left on it."""
        self.disable_hooks()
        self._recorder.remove()
        self._guards.remove()
        for layer in self._recorder.layers:
            layer.module.__dict__.pop("ft_compute_sample_grad", None)
        for owner in (self, self._module):
            owner.__dict__.pop("autograd_grad_sample_hooks", None)

    def disable_hooks(self) -> None:
        """Let forward and backward passes go unrecorded until :meth:`enable_hooks`."""
        self.hooks_enabled = False
        self._recorder.enabled = False

    def enable_hooks(self) -> None:
        """Record forward and backward passes (again)."""
        self.hooks_enabled = True
        self._recorder.enabled = True

    def _explain(self, error: RuntimeError) -> None:
        repeated = sorted(self._recorder.whose.repeats.open)
        if repeated and "size of tensor" in str(error):
            raise ValueError(
                f"layers {repeated[:5]} ran once for all samples, so each sample was given its own "
                f"copy of what they returned, which the model could not use: {error}. Give them "
                "one row for each of the rows that they are combined with (expand), or freeze them"
            ) from error

    def capture_backprops_hook(
        self,
        module: nn.Module,
        _forward_input: Record,
        forward_output: Any,
        loss_reduction: str,
        batch_first: bool,
    ) -> None:
        """Turn the record of one layer's backward into per-sample gradients.

        Args:
            module: The layer.
            _forward_input: The record: activations, backprops, rule.
            forward_output: Tuple with the gradient of the layer's output.
            loss_reduction: ``"mean"`` or ``"sum"``.
            batch_first: Where activations have the batch; records are batch first.
        """
        self._receive(_forward_input)

    def _receive(self, record: Record) -> None:
        """A layer's backward has run: what the recorder calls."""
        if not self.hooks_enabled:
            return
        if not record.layer.rule.needs_parameters:
            self._strategy.receive(record)
            return
        with self._recorder.paused():  # such a rule may run the layer again
            self._strategy.receive(record)

    def _sink(self) -> Callable[[Record], None]:
        """Where records go: by a subclass's :meth:`capture_backprops_hook`, if it has its own."""
        return self._by_hook if self._watched() else self._receive

    def _watched(self) -> bool:
        """Whether a subclass looks at records."""
        return type(self).capture_backprops_hook is not GradSampleHooks.capture_backprops_hook

    def _by_hook(self, record: Record) -> None:
        if self._sees_loss or trains():
            self.capture_backprops_hook(
                record.layer.module,
                record,
                (record.backprops,),
                loss_reduction=self.loss_reduction,
                batch_first=self.batch_first,
            )


class GradSampleModule(GradSampleHooks, AbstractGradSampleModule):
    """Wrapper module with :class:`GradSampleHooks`; arguments are the same.

    Attributes of the wrapped module are reachable through the wrapper; names in
    ``state_dict`` have the prefix ``_module.``.
    """
