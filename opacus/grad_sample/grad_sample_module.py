"""Per-sample gradients by hooks: ``parameter.grad_sample`` after every backward pass."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves

from opacus.core.isolation.check import Isolation
from opacus.core.norms.ledger import add_rows
from opacus.core.platform.sharded import is_dtensor, is_fsdp
from opacus.core.privacy.parameter_hooks import ForeignGradients, foreign_gradients, refuse_hooks
from opacus.core.record.layers import Layer, layers_of
from opacus.core.record.named import DOCUMENTS, gives_units, named_units, take_units
from opacus.core.record.record import Record
from opacus.core.record.recorder import Recorder
from opacus.core.record.tap import trains
from opacus.core.rules.base import pad_rows
from opacus.core.rules.generic import GenericRule
from opacus.core.rules.mixing import MixingCheck, mixes_samples
from opacus.core.step.auto import Choice
from opacus.core.sums.materialise import Materialise
from opacus.grad_sample._held import HeldParameters
from opacus.grad_sample._samplers import Sampler, choose_rule
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


class GradSampleHooks(HeldParameters):
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
    # What grad_sample_mode="auto" stood for, if that is what was asked for.
    auto_choice: Choice | None = None
    # Argument of the model that says whose each row is; ``None``: row i is sample i.
    privacy_unit: str | None = None

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
                "GradSampleHooks (or to_standard_module() on the wrapper) first"
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
            self._on_record,
            batch_first=batch_first,
        )
        for layer in self._recorder.layers:
            if isinstance(layer.rule, GenericRule):
                module: Any = layer.module
                module.ft_compute_sample_grad = SampleGradient(
                    module, batch_first, self._recorder.paused
                )
        self._strategy = self._make_strategy()
        self._sharding_is_known = self._is_sharded()
        self._foreign = self._watch_parameters()
        self._mixing = MixingCheck(self._module if self._strict else nn.Identity())
        self._recorder.handles.append(self._module.register_forward_pre_hook(self._before_forward))
        known = self.__dict__.get("isolation")  # of the optimizer, too
        if known is None:
            self.isolation = self._make_isolation()
        else:
            known.attach(self._recorder)
        covered = {owner for layer in self._recorder.layers for owner in layer.owners.values()}
        named = self._module.named_parameters()
        self._untapped = [(name, p) for name, p in named if name not in covered]
        self._mark_unheld()
        self._module.autograd_grad_sample_hooks = self._recorder.handles  # type: ignore[assignment]
        self.autograd_grad_sample_hooks = self._recorder.handles
        self.enable_hooks()

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        if self.hooks_enabled:
            self._mixing.check()
        self._refuse_late_sharding()
        if self._unfrozen():
            self._refuse_unfrozen(
                "call the wrapper that make_private returned, not the model in it"
            )

    # --- late changes ---

    def _refuse_late_sharding(self) -> None:
        """In the first forward: raise if the parameters have been replaced by sharded ones."""
        if self._sharding_is_known:
            return
        if self._is_sharded():
            raise RuntimeError(
                "the model was sharded after make_private, which gave it parameters that the "
                "optimizer does not hold and that get no noise: shard it first, build the "
                "optimizer from its parameters, then call make_private"
            )
        self._sharding_is_known = True

    def _is_sharded(self) -> bool:
        layers = self._recorder.layers
        held = (layer.parameter(name) for layer in layers for name in layer.spec.params)
        return is_fsdp(self._module) or any(is_dtensor(p) for p in held)

    def _layers(self, force_functorch: bool) -> list[Layer]:
        def choose(module: nn.Module) -> Any:
            norm_samplers = getattr(self, "NORM_SAMPLERS", {})
            return choose_rule(module, self.GRAD_SAMPLERS, norm_samplers, force_functorch)

        return layers_of(self._module, choose)

    def _make_strategy(self) -> Any:
        return Materialise(self.loss_reduction)

    def _watch_parameters(self) -> ForeignGradients | None:
        """What notices gradients that came past the layers, where the strategy does not."""
        if self._sees_loss:  # it knows when a step's backward pass begins and ends
            return None
        named = self._module.named_parameters()
        return ForeignGradients([(n, p) for n, p in named if p.requires_grad], self._refuse)

    def _refuse(self, names: list[str]) -> None:
        """Parameters have received gradients from autograd: fine if none of them is private now.

        Raises:
            RuntimeError: They are; all gradients are dropped.
        """
        recorder, held = self._recorder, self._held
        names = [name for name in names if held is None or name in held]
        private = bool(names) and recorder.enabled and not recorder.probed
        if not private or not any(layer.module.training for layer in recorder.layers):
            return
        self.set_grad_sample_to_none()
        for parameter in self._module.parameters():
            parameter.grad = None
        raise foreign_gradients(names)

    def _make_isolation(self, **how: Any) -> Isolation:
        """What checks that samples do not depend on each other."""
        return Isolation(
            self._module,
            self._recorder,
            batch_first=self.batch_first,
            shared=self._sees_loss or self.loss_reduction == "mean",
            sees_loss=self._sees_loss,
            replicated=any(isinstance(m, DistributedDataParallel) for m in self._module.modules()),
            **how,
        )

    def remove_hooks(self) -> None:
        """Take all hooks off the module; nothing of them is left on it."""
        self.disable_hooks()
        self._recorder.remove()
        if self._foreign is not None:
            self._foreign.remove()
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

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        """Modules below ``module`` (itself included) that own trainable parameters."""
        for submodule in module.modules():
            if any(p.requires_grad for p in submodule.parameters(recurse=False)):
                yield submodule

    def capture_activations_hook(
        self, module: nn.Module, forward_input: Any, _forward_output: Any
    ) -> Any:
        """Tap the output of one layer; returns the output to go on with."""
        for layer in self._recorder.layers:
            if layer.module is module and self._recorder.active(module):
                return self._recorder.tap(layer, tuple(forward_input), {}, _forward_output)
        return _forward_output

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
        if not self.hooks_enabled:
            return
        if not _forward_input.layer.rule.needs_parameters:
            self._strategy.receive(_forward_input)
            return
        with self._recorder.paused():  # such a rule may run the layer again
            self._strategy.receive(_forward_input)

    def _on_record(self, record: Record) -> None:
        if not self._sees_loss:
            if not trains():
                return  # other gradients than the parameters', by torch.autograd.grad
            layer = record.layer
            held = [(layer.owners[name], layer.parameter(name)) for name in record.spec.params]
            own = [(name, p) for name, p in held if p is not None]
            refuse_hooks(own)
        self.capture_backprops_hook(
            record.layer.module,
            record,
            (record.backprops,),
            loss_reduction=self.loss_reduction,
            batch_first=self.batch_first,
        )

    def rearrange_grad_samples(
        self, *, module: nn.Module, backprops: Tensor, loss_reduction: str, batch_first: bool
    ) -> Tensor:
        """Backprops with the batch first and without the factor 1/B of a mean loss."""
        if not batch_first and backprops.dim() > 1:
            backprops = backprops.transpose(0, 1)
        if loss_reduction == "mean":
            backprops = backprops * backprops.shape[0]
        elif loss_reduction != "sum":
            raise ValueError(
                f"loss_reduction = {loss_reduction!r}. Only 'sum' and 'mean' losses are supported"
            )
        return backprops

    def explain(self) -> str:
        """Which mode ``grad_sample_mode="auto"`` has chosen, and why.

        Raises:
            RuntimeError: Another mode was asked for: there is nothing to explain.
        """
        if self.auto_choice is None:
            raise RuntimeError(
                "there is a plan in the *_bk modes only, for each step that was run, and a choice "
                "to explain with grad_sample_mode='auto'"
            )
        return str(self.auto_choice)

    def _name_units(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Take the names of units from the model's arguments, if there are any."""
        key, recorder = self.privacy_unit, self._recorder
        trains = key is not None and recorder.active(self._module)
        if key is None or not (trains or gives_units(key, args, kwargs)):
            return args, kwargs  # in evaluation nobody's units matter
        args, kwargs, names = take_units(key, args, kwargs)
        recorder.named = None
        if trains:
            recorder.named = named_units(key, names, tree_leaves((args, kwargs)))
            self._check_unit_ranks(key, recorder.named.names)
        return args, kwargs

    def _check_unit_ranks(self, key: str, names: Tensor) -> None:
        """Refuse a unit of which several ranks have rows: each would clip its own part.

        Raises:
            ValueError: On all ranks.
        """
        if key in DOCUMENTS or not (dist.is_available() and dist.is_initialized()):
            return
        if getattr(self, "data_layout", "sharded") == "replicated":
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, names.tolist())
        seen = Counter(name for own in everyone for name in own)
        twice = sorted(name for name, count in seen.items() if count > 1)
        if twice:
            raise ValueError(
                f"{key}: several ranks have rows of the units {twice[:5]}, of which each would "
                "clip its own part only: let all rows of a unit be on one rank"
            )

    @property
    def latest_batch(self) -> int | None:
        """Number of samples of the latest forward pass, where its inputs tell."""
        return self._recorder.latest_batch

    # --- policy ---

    def forbid_grad_accumulation(self) -> None:
        """Make a second backward pass without ``zero_grad`` in between a ValueError."""
        self.grad_accumulation_allowed = False
        self._strategy.accumulation_allowed = False

    def allow_grad_accumulation(self) -> None:
        """Let several backward passes accumulate (not sound with Poisson sampling)."""
        self.grad_accumulation_allowed = True
        self._strategy.accumulation_allowed = True

    @classmethod
    def is_supported(cls, module: nn.Module) -> bool:
        """Deprecated: every layer is supported, by the generic rule if by no other."""
        warnings.warn(
            "GradSampleModule.is_supported is deprecated: every layer is supported.",
            DeprecationWarning,
            stacklevel=2,
        )
        return True

    @classmethod
    def validate(cls, module: nn.Module, *, strict: bool = False) -> list[NotImplementedError]:
        """Modules that share statistics between samples, which no clipping can undo.

        A frozen BatchNorm in eval mode, with running statistics, does not.

        Args:
            module: The module to check.
            strict: Raise instead of returning the errors.

        Raises:
            NotImplementedError: ``strict`` and there are errors; it names the modules.
        """
        errors = [
            NotImplementedError(
                f"Model contains a layer that mixes samples or keeps statistics of them "
                f"({name}: {submodule}); use ModuleValidator.fix(model) to replace it, or, if it "
                "is frozen, put it in eval mode"
            )
            for name, submodule in module.named_modules()
            if _mixes_samples(submodule)
        ]
        if strict and errors:
            raise NotImplementedError(errors)
        return errors


class GradSampleModule(GradSampleHooks, AbstractGradSampleModule):
    """Wrapper module with :class:`GradSampleHooks`; arguments are the same.

    Attributes of the wrapped module are reachable through the wrapper; names in
    ``state_dict`` have the prefix ``_module.``.
    """

    def __init__(
        self,
        m: nn.Module,
        *,
        batch_first: bool = True,
        loss_reduction: str = "mean",
        strict: bool = True,
        force_functorch: bool = False,
    ) -> None:
        nn.Module.__init__(self)
        GradSampleHooks.__init__(
            self,
            m,
            batch_first=batch_first,
            loss_reduction=loss_reduction,
            strict=strict,
            force_functorch=force_functorch,
        )
        self.grad_accumulation_hook = None


def _mixes_samples(module: nn.Module) -> bool:
    """Whether a layer does so, or, as it is trained, would in the train mode that is to come."""
    if mixes_samples(module):
        return True
    batch_norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
    tracking = isinstance(module, torch.nn.modules.instancenorm._InstanceNorm)
    trainable = any(p.requires_grad for p in module.parameters(recurse=False))
    return trainable and (batch_norm or (tracking and bool(module.track_running_stats)))
