"""What a private model refuses: mixed samples, late sharding, gradients from elsewhere."""

from __future__ import annotations

import operator

import torch
from torch import nn

from opacus.core.platform.sharded import is_dtensor, is_fsdp
from opacus.core.platform.torch_internals import under_functorch
from opacus.core.privacy.gradients import ForeignGradients, foreign_gradients
from opacus.core.record.recorder import Recorder
from opacus.core.rules.mixing import MixingCheck


class Guards:
    """Checks before a forward pass, and after a backward pass that is not ours.

    Args:
        module: The model.
        recorder: Of its layers.
        strict: Whether layers that mix samples are refused.
        sees_loss: Whether the criterion is ours: then the strategy knows when a step's backward
            pass begins and ends, and looks for foreign gradients itself.
    """

    def __init__(
        self, module: nn.Module, recorder: Recorder, *, strict: bool, sees_loss: bool
    ) -> None:
        self._module = module
        self._recorder = recorder
        self._mixing = MixingCheck(module if strict else nn.Identity())
        self._sharding_is_known = self.sharded()
        self._held: frozenset[str] | None = None
        # Where the parameters are that layers read, and which are there.
        places = [layer.place(name) for layer in recorder.layers for name in layer.spec.params]
        self._where = [own for own, _ in places]
        self._names = [name for _, name in places]
        self._known = self._parameters()
        self._foreign: ForeignGradients | None = None
        if not sees_loss:
            trainable = [(n, p) for n, p in module.named_parameters() if p.requires_grad]
            self._foreign = ForeignGradients(trainable, self._refuse)

    def hold(self, names: frozenset[str] | None) -> None:
        """The names of the parameters that the optimizer holds; ``None``: all."""
        self._held = names

    def sharded(self) -> bool:
        """Whether FSDP2 holds parameters, or any is a DTensor."""
        layers = self._recorder.layers
        held = (layer.parameter(name) for layer in layers for name in layer.spec.params)
        return is_fsdp(self._module) or any(is_dtensor(p) for p in held)

    def check(self, enabled: bool) -> None:
        """A forward pass is about to start, with hooks enabled or not.

        Raises:
            NotImplementedError: A layer mixes samples now.
            RuntimeError: Parameters were replaced by others, by sharded ones, say.
        """
        if enabled and self._mixing.norms:
            self._mixing.check()
        self._check_sharding()
        if not enabled or not self._module.training or torch.compiler.is_compiling():
            return
        if not all(map(operator.is_, self._parameters(), self._known)):
            self._look_at_parameters()

    def _parameters(self) -> list[nn.Parameter | None]:
        return list(map(dict.get, self._where, self._names))

    def _check_sharding(self) -> None:
        if self._sharding_is_known:
            return
        if self.sharded():
            raise RuntimeError(
                "the model was sharded after make_private, which gave it parameters that the "
                "optimizer does not hold and that get no noise: shard it first, build the "
                "optimizer from its parameters, then call make_private"
            )
        self._sharding_is_known = True

    def _look_at_parameters(self) -> None:
        """Refuse parameters that the optimizer does not know.

        Others may be in their places for a while: where the model runs aside, after a forward pass
        that failed, until it is tidied up after, and under FSDP2, which puts whole ones there.
        """
        recorder = self._recorder
        if recorder.in_backward or not (recorder.enabled and torch.is_grad_enabled()):
            return
        if under_functorch():  # which taps refuse
            return
        recorder.end_lone()
        recorder.put_back()
        owners = [n for layer in recorder.layers for n in layer.owners.values()]
        others = {
            owner
            for owner, new, known in zip(owners, self._parameters(), self._known, strict=True)
            if isinstance(new, nn.Parameter)  # others are lent for a call (functional_call)
            and new is not known
            and is_dtensor(new) == is_dtensor(known)
        }
        names = sorted(others if self._held is None else others & self._held)
        if names:
            raise RuntimeError(
                f"parameters {names[:5]} are not those that make_private was given, and "
                "the optimizer still holds the old ones: the new ones would never be trained. Load "
                "states without assign=True, which copies them into the parameters; or, after "
                "replacing parameters, build the optimizer anew and call make_private again, with "
                "the model's to_standard_module()"
            )

    def _refuse(self, names: list[str]) -> None:
        """Called when autograd gave gradients to parameters; fine unless one of them is private.

        Raises:
            RuntimeError: They are; all gradients are dropped.
        """
        recorder, held = self._recorder, self._held
        names = [name for name in names if held is None or name in held]
        private = bool(names) and recorder.enabled and not recorder.probed
        if not private or not any(layer.module.training for layer in recorder.layers):
            return
        for parameter in self._module.parameters():
            parameter.grad = parameter.grad_sample = None  # type: ignore[attr-defined]
        error = foreign_gradients(names)
        recorder.unfinished.fail(error)
        raise error

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        if self._foreign is not None:
            self._foreign.remove()
