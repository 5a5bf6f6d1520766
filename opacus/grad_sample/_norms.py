"""Norms that can be read: of the criterion's norm pass, and of ordinary backward passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.norms.ledger import NormLedger, stacked, total_norms
from opacus.core.platform.sharded import compute_device
from opacus.core.record.passes import ForwardPass, Generation
from opacus.core.record.record import Record, trains
from opacus.core.record.recorder import Recorder
from opacus.core.rules.base import scale_rows
from opacus.core.sums.summed import Summed
from opacus.grad_sample._samplers import total_norm

logger = logging.getLogger(__name__)


class Norms:
    """Per-sample norms of the latest pass, whole and (as ``p._norm_sample``) by parameter.

    Args:
        module: The model.

    Attributes:
        by_name: Squared norms ``[B]`` of the latest norm pass, by parameter name.
        whole: ``[B]`` norms of the whole gradients; ``None`` before there are any.
        order: Names of the trainable parameters, in the order of per-layer clipping norms.
        held: Names of all that the optimizer holds, in the order of its groups.
    """

    def __init__(self, module: nn.Module) -> None:
        self.by_name: dict[str, Tensor] = {}
        self.whole: Tensor | None = None
        self._parameters = dict(module.named_parameters())
        self.held = list(self._parameters)
        self.order = self._trained()

    def put_in_order(self, parameters: Iterable[nn.Parameter]) -> None:
        """Take the order from an optimizer's parameters, frozen ones too."""
        names = {id(p): name for name, p in self._parameters.items()}
        self.held = [names[id(p)] for p in parameters if id(p) in names]
        self.order = self._trained()

    def _trained(self) -> list[str]:
        return [name for name in self.held if self._parameters[name].requires_grad]

    def take(
        self, norm_sq: dict[str, Tensor], batch: int, device: torch.device | None = None
    ) -> Tensor:
        """The norms of a whole pass: keep and publish them; returns those of all together."""
        # In one order, so that the sum over parameters is rounded in one way.
        ordered = {name: norm_sq[name] for name in self._parameters if name in norm_sq}
        self.by_name = norm_sq = {**ordered, **norm_sq}
        if device is None:
            device = compute_device(next(iter(self._parameters.values())))
        if not norm_sq:
            self.whole = total_norms(norm_sq, batch, device)
            self._publish({})
            return self.whole
        squares = stacked(norm_sq, device)
        self.whole = squares.sum(0).sqrt()
        self._publish(dict(zip(norm_sq, squares.sqrt().unbind(), strict=True)))
        return self.whole

    def scaled(self, scales: Sequence[float]) -> Tensor:
        """``[B]`` norms of whole gradients, those of parameters multiplied by their scales.

        Args:
            scales: Of those that are trainable now, in the order of :attr:`held`.
        """
        assert self.whole is not None
        scale_of = dict(zip(self._trained(), scales, strict=True))
        norm_sq = {name: value * scale_of[name] ** 2 for name, value in self.by_name.items()}
        return total_norms(norm_sq, len(self.whole), self.whole.device)

    def publish(self, norm_sq: Mapping[str, Tensor]) -> None:
        """Set ``p._norm_sample`` to roots; no norm of a layer that was not used stays."""
        roots = torch._foreach_sqrt(list(norm_sq.values())) if norm_sq else []
        self._publish(dict(zip(norm_sq, roots, strict=True)))

    def _publish(self, norms: Mapping[str, Tensor]) -> None:
        """:meth:`publish` of the roots."""
        for name, parameter in self._parameters.items():
            if name in norms:
                parameter._norm_sample = norms[name]  # type: ignore[attr-defined]
            elif "_norm_sample" in parameter.__dict__:
                del parameter._norm_sample

    def forget(self) -> None:
        """A pass begins whose norms are not known yet."""
        self.whole = None
        self.publish({})

    def published(self, parameters: Sequence[Any]) -> Tensor | None:
        """``[B]`` norms from ``p._norm_sample``, ``None`` if no parameter has it."""
        named = [p._norm_sample for p in parameters if hasattr(p, "_norm_sample")]
        if named:
            self.whole = total_norm(named)
        return self.whole


class OrdinaryNorms:
    """Norms of an ordinary ``backward()``: they can be read, nothing is clipped.

    Args:
        norms: Where norms go.
        recorder: Of the model.
        summed: Refuses what the criterion and an ordinary loss share.
        mean: Whether losses are means over samples.
    """

    def __init__(self, norms: Norms, recorder: Recorder, summed: Summed, *, mean: bool) -> None:
        self._mean = mean
        self._norms = norms
        self._recorder = recorder
        self._summed = summed
        self._ledger: NormLedger | None = None
        self._generation: Generation | None = None
        self._passes: set[ForwardPass] = set()  # on one sample, among them
        self._warned = False

    def forget(self) -> None:
        """The criterion's pass begins, or the norms were read."""
        self._ledger = self._generation = None

    def settle(self) -> None:
        """Publish what has been seen since; its norms are about to be read."""
        if self._ledger is not None:
            with self._recorder.paused(), torch.no_grad():
                self._norms.publish(self._ledger.finish())
            self.forget()

    def receive(self, record: Record) -> None:
        """A layer's record."""
        self._note(record.forward_pass, list(record.layer.owners.values()))
        ledger = self._ledger
        if (
            ledger is None
            or self._generation is not record.generation
            or (not record.reused and ledger.has_measured(record.spec.name))  # retain_graph=True
        ):
            ledger = self._ledger = NormLedger(record.rows)
            self._generation = record.generation
            self._norms.forget()
        if self._mean:
            backprops = record.backprops
            first = backprops[0] if isinstance(backprops, tuple) else backprops
            rows = torch.full(
                (len(first),), float(record.mean_of), dtype=torch.float32, device=first.device
            )
            record = replace(record, backprops=scale_rows(backprops, rows))
        with self._recorder.paused():
            ledger.add(record)
        known = ledger.known(record.layer.owners.values())
        for local, owner in record.layer.owners.items():
            if owner in known:
                parameter: Any = record.layer.parameter(local)
                parameter._norm_sample = known[owner].sqrt()

    def receive_lone(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """The gradients of a batch of one sample; see :meth:`receive`."""
        if self._recorder.enabled:
            ledger = self._ledger_of(forward_pass, list(grads), 1)
            ledger.kept.add_lone(grads)
            self._norms.publish(ledger.known())

    def receive_formed(self, forward_pass: ForwardPass, grads: Mapping[str, Tensor]) -> None:
        """Per-sample gradients ``[B, *shape]`` that had no records; see :meth:`receive`."""
        rows = forward_pass.batch
        if not self._recorder.enabled or not rows:
            return
        ledger = self._ledger_of(forward_pass, list(grads), rows)
        scaled = {owner: grad * rows if self._mean else grad for owner, grad in grads.items()}
        ledger.take_formed(scaled, {owner: owner for owner in grads})
        self._norms.publish(ledger.known())

    def _ledger_of(self, forward_pass: ForwardPass, parameters: list[str], rows: int) -> NormLedger:
        """Where norms of a pass on so many rows go; a new one for a new pass of the model."""
        self._note(forward_pass, parameters)
        generation = forward_pass.generation
        if self._generation is not generation or forward_pass in self._passes:
            self._ledger, self._generation = NormLedger(rows), generation
            self._passes.clear()
            self._norms.forget()
        assert self._ledger is not None
        self._passes.add(forward_pass)
        return self._ledger

    def _note(self, forward_pass: ForwardPass | None, parameters: list[str]) -> None:
        if forward_pass is None or not parameters or not trains():
            return  # autograd.grad asks for other gradients than the parameters'
        self._summed.note_ordinary(forward_pass, parameters)
        if not self._warned:
            self._warned = True
            logger.warning(
                "backward() of an ordinary loss ran through the private model in train mode. In "
                "ghost modes it leaves no gradient in the model's parameters: losses come from "
                "the criterion of make_private. For other losses (public data, inputs, another "
                "network) call eval() or disable_hooks() before the forward pass, or ignore this."
            )
