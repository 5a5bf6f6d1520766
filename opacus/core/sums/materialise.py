"""The strategy of ``hooks``: every per-sample gradient, for the optimizer to clip."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from opacus.core.norms.kept import add_rows
from opacus.core.norms.ledger import check_sizes
from opacus.core.platform.profiling import each_layer
from opacus.core.platform.sizes import WAITING_SHARE
from opacus.core.platform.torch_internals import at_end_of_backward, number_of_backward
from opacus.core.privacy.gradients import is_processed, refuse_hooks
from opacus.core.record.passes import Generation
from opacus.core.record.record import Record, trains
from opacus.core.rules.base import pad_rows


class Materialise:
    """Writes ``[B, *shape]`` per-sample gradients to ``parameter.grad_sample``.

    Their sum, times 1/B for a mean loss, is added to ``parameter.grad``, as in ordinary training.

    Records of one generation describe the same rows and are added; those of a
    later one (gradient accumulation) turn ``grad_sample`` into a list. Uses of one layer
    (the steps of a recurrent one) are joined where its rule can, so that one product
    serves many; the last of them are joined when the backward pass ends.

    Args:
        loss_reduction: How the user's loss was reduced; with ``"mean"`` backprops
            carry a factor 1/B, which is taken out.
    """

    def __init__(self, loss_reduction: str) -> None:
        self.loss_reduction = loss_reduction
        self.accumulation_allowed = True
        self._last: dict[int, weakref.ref[Generation]] = {}
        self._waiting: dict[tuple[str, int, int], list[Record]] = {}
        self._elements: dict[tuple[str, int, int], int] = {}

    def go_on_from(self, other: Materialise) -> None:
        """Take the place of another one, of the same model with fewer layers."""
        self._last = other._last

    def receive(self, record: Record) -> None:
        """Sink of the recorder.

        Raises:
            ValueError: The layer's rows are not the samples, or a parameter has hooks; nothing
                of it has been kept.
        """
        if not trains():
            return None  # other gradients than the parameters', by torch.autograd.grad
        layer, names = record.layer, record.spec.params
        held = zip(names, layer.parameters(names), strict=True)
        refuse_hooks([(layer.owners[name], p) for name, p in held if p is not None])
        check_sizes(record)
        if not record.reused or record.layer.rule.needs_parameters:
            return self._form(record)
        key = (record.spec.name, id(record.generation), number_of_backward())
        if key not in self._waiting:
            self._drop_abandoned(key)
            at_end_of_backward(self._finish)
        record.keep()
        self._waiting.setdefault(key, []).append(record)
        self._elements[key] = self._elements.get(key, 0) + record.elements
        if self._elements[key] > WAITING_SHARE * record.rows * record.spec.elements:
            self._join(key)

    def _drop_abandoned(self, key: tuple[str, int, int]) -> None:
        """Drop leftovers of a backward pass that failed."""
        for old in list(self._waiting):
            if old[1] != key[1] and old[2] != key[2]:
                del self._waiting[old], self._elements[old]

    def _finish(self) -> None:
        with torch.no_grad():
            for key in list(self._waiting):
                self._join(key)

    def _join(self, key: tuple[str, int, int]) -> None:
        """Form the gradients of the uses that wait, as one use if that is possible."""
        records = self._waiting.pop(key)
        del self._elements[key]
        for record in records:
            record.check_unchanged()
        first = records[0]
        joined = None
        if len(records) > 1:
            uses = [(r.activations, r.backprops) for r in records]
            joined = first.layer.rule.join(first.spec, uses)
        if joined is None:
            for record in records:
                self._form(record)
        else:
            rows = max(record.rows for record in records)
            whole = dataclasses.replace(
                first, activations=joined[0], backprops=joined[1], rows=rows
            )
            self._form(whole)

    @each_layer
    def _form(self, record: Record) -> None:
        backprops = record.backprops
        mean = self.loss_reduction == "mean"
        # Times B, what a GradScaler has made just fit into fp16 may not fit any more.
        late = mean and any(g.dtype == torch.float16 for g in tree_leaves(backprops))
        if mean and not late:
            backprops = tree_map(lambda g: g * record.mean_of, backprops)
        grads = record.layer.rule.per_sample_grad(record.spec, record.activations, backprops)
        grads = record.owned(grads)
        totals = record.owned(_totals(record, grads, 1 if late or not mean else record.mean_of))
        parameters = record.layer.parameters(grads)
        for (name, grad), parameter in zip(grads.items(), parameters, strict=True):
            assert parameter is not None
            grad = grad.to(parameter.dtype)
            self._add(parameter, grad * record.mean_of if late else grad, record)
            _add_to_grad(parameter, totals[name])

    def _add(self, parameter: nn.Parameter, grad: Tensor, record: Record) -> None:
        last = self._last.get(id(parameter))
        same_rows = last is not None and last() is record.generation
        known: Any = getattr(parameter, "grad_sample", None)
        if known is not None and not same_rows and _was_cleared(parameter, known):
            known = None
        if known is None:
            parameter.grad_sample = pad_rows(grad, record.rows)  # type: ignore[attr-defined]
        elif same_rows and isinstance(known, list):
            known[-1] = add_rows(known[-1], grad)
        elif same_rows:
            parameter.grad_sample = add_rows(known, grad)  # type: ignore[attr-defined]
        else:
            self._accumulate(parameter, known, pad_rows(grad, record.rows), record)
        self._last[id(parameter)] = weakref.ref(record.generation)

    def _accumulate(
        self, parameter: nn.Parameter, known: Any, grad: Tensor, record: Record
    ) -> None:
        if not self.accumulation_allowed:
            raise ValueError(
                "Poisson sampling is not compatible with grad accumulation, nor is privacy_unit: "
                f"layer '{record.spec.name}' already holds the per-sample gradients of an earlier "
                "backward pass. Call optimizer.step() and optimizer.zero_grad() after every "
                "forward/backward pass (with accelerate, set gradient_accumulation_steps=1), "
                "or use BatchMemoryManager to simulate large batches"
            )
        earlier = known if isinstance(known, list) else [known]
        parameter.grad_sample = [*earlier, grad]  # type: ignore[attr-defined]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": {}, "_waiting": {}, "_elements": {}}


def _totals(record: Record, grads: Mapping[str, Tensor], times: int) -> dict[str, Tensor]:
    """The sums over samples that ordinary training leaves in ``p.grad``.

    From the record or from ``grads`` (which are that many ``times`` as large), whichever is less
    to read.
    """
    rule = record.layer.rule
    if rule.needs_parameters or record.elements >= sum(g.numel() for g in grads.values()):
        return {name: grad.sum(0) / max(times, 1) for name, grad in grads.items()}
    return rule.weighted_grad(record.spec, record.activations, record.backprops, None)


def _add_to_grad(parameter: nn.Parameter, total: Tensor) -> None:
    """As autograd does it: in place, if there is a gradient already."""
    total = total.to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = total
    else:
        parameter.grad += total


def _was_cleared(parameter: nn.Parameter, grad_sample: Any) -> bool:
    """Whether a step has used ``grad_sample`` and ``grad`` has been cleared since.

    ``model.zero_grad()`` of a model that is not wrapped cannot clear ``grad_sample``.
    """
    last = grad_sample[-1] if isinstance(grad_sample, list) else grad_sample
    grad = parameter.grad
    return is_processed(last) and not (grad is not None and is_processed(grad))
