"""A linear head with the cross-entropy of its logits, which are never all in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from opacus.core.kernels.loss.head import Head, LossOptions, Wanted, live, sweep
from opacus.core.kernels.norms.reference import sums_and_sizes, wide_bmm, wide_dtype
from opacus.core.kernels.norms.tied import Heads
from opacus.core.kernels.norms.trusted import TRUSTED, in_tf32
from opacus.core.rules.base import LayerRule, Use, scale_rows, unsupported
from opacus.core.rules.grouping import check_rows_of_units, grouped_tokens
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units


class HiddenGradient:
    """Gradient of the hidden states, formed by whoever sweeps over the vocabulary first.

    A norm and this gradient need the same logits again; computed together they are formed once.
    """

    def __init__(self) -> None:
        self._open = True
        self._of: tuple[Tensor, int] | None = None
        self._value: Tensor | None = None

    def room(self, head: Head, grads: Tensor) -> Tensor | None:
        """``[B, T, d]`` zeros for the gradient, ``None`` if it is not needed (any more)."""
        if not self._open or self._of is not None:
            return None
        self._of = grads, grads._version
        self._value = torch.zeros_like(head.hidden, dtype=wide_dtype(head.hidden))
        return self._value

    def take(self, grads: Tensor) -> Tensor | None:
        """The gradient that belongs to these of the losses, if it was formed; asked for once."""
        of, value = self._of, self._value
        self._open, self._of, self._value = False, None, None
        if of is None:
            return None
        known, version = of
        same = known.data_ptr() == grads.data_ptr() and known._version == grads._version == version
        return value if same and known.shape == grads.shape else None


class HeadLossRule(LayerRule):
    """Activations are hidden states ``[B, T, d]``, weight, targets, log-sum-exps (and bias).

    Backprops are ``[B, T]``, the gradient with respect to the tokens' losses.

    Args:
        loss: What is computed of the logits.
        hidden: Where the backward pass of the loss looks for the hidden states' gradient.
    """

    as_given = True
    beside_tables = True

    def __init__(self, loss: LossOptions, hidden: HiddenGradient) -> None:
        self.loss = loss
        self.hidden = hidden

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        head, grads = _head(activations), {}
        vocabulary = next(iter(spec.shapes.values()))[0]  # a record of nobody has no weight
        rows = (len(backprops), vocabulary)
        wanted = Wanted(hidden=self.hidden.room(head, backprops))
        if "weight" in spec.params:
            grads["weight"] = head.hidden.new_zeros(*rows, head.hidden.shape[-1])
            wanted.units = grads["weight"]
        if "bias" in spec.params:
            grads["bias"] = wanted.units_bias = head.hidden.new_zeros(rows)
        sweep(head, backprops, self.loss, wanted)
        return grads

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        head = live(_head(activations), backprops, self.loss)
        wanted = Wanted(hidden=self.hidden.room(head, backprops))
        sums, norms = self._norms(spec, head, backprops, wanted)
        if "weight" in spec.params:  # only what Gram matrices give may be wrong
            direct = wanted.gram is None
            norms["weight"] = sums[0] if direct else self._settled(head, backprops, sums)
        return norms

    def beside_table(
        self, spec: LayerSpec, activations: Any, backprops: Any, ids: Tensor
    ) -> tuple[Heads, dict[str, Tensor]]:
        head = live(_head(activations), backprops, self.loss)
        looked_up = backprops.new_zeros(*backprops.shape, ids.shape[1], dtype=wide_dtype(backprops))
        wanted = Wanted(ids=ids, looked_up=looked_up)
        sums, norms = self._norms(spec, head, backprops, wanted)
        return Heads(head.hidden, looked_up, sums), norms

    def _norms(
        self, spec: LayerSpec, head: Head, backprops: Tensor, wanted: Wanted
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """``[2, B]``: squared norms of the weight, and of what absolute values each is the sum.

        And those of the bias; what else is wanted is filled in. Tokens that do not count are zero
        in ``head``, see :func:`live`.
        """
        batch, tokens, d = head.hidden.shape
        weight, bias = backprops.new_zeros(2, batch, dtype=wide_dtype(backprops))
        if "bias" in spec.params:
            wanted.norm_sq_bias = bias
        if "weight" in spec.params and tokens < d and not in_tf32(head.hidden):
            wanted.gram = weight.new_zeros(batch, tokens, tokens)
        elif "weight" in spec.params:
            wanted.norm_sq = weight
        sweep(head, backprops, self.loss, wanted)
        norms = {} if wanted.norm_sq_bias is None else {"bias": bias}
        if wanted.gram is None:
            return torch.stack([weight, weight]), norms
        hidden = head.hidden
        return sums_and_sizes(wanted.gram.mul_(wide_bmm(hidden, hidden.transpose(1, 2)))), norms

    def _settled(self, head: Head, backprops: Tensor, sums: Tensor) -> Tensor:
        """``[B]``: those of which terms have cancelled are computed without Gram matrices."""
        total, size = sums
        rows = (~(total > TRUSTED * size) & (size != 0)).nonzero().squeeze(1)
        if not len(rows):
            return total
        some, mended = _samples(head, rows), total.new_zeros(len(rows))
        sweep(some, backprops[rows], self.loss, Wanted(norm_sq=mended))
        return total.index_copy(0, rows, mended)

    def norm_cost(self, spec: LayerSpec, activations: Any, backprops: Any) -> float:
        return 2.0 * backprops.numel() * spec.elements  # the logits again, and the sum

    def grad_dtype(self, activations: Any, backprops: Any) -> torch.dtype:
        return _head(activations).hidden.dtype

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        sums = self.wide_sum(spec, activations, scale_rows(backprops, factors))
        dtype = _head(activations).hidden.dtype
        return {name: total.to(dtype) for name, total in sums.items()}

    def wide_sum(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        head, wanted, sums = _head(activations), Wanted(), {}
        wide = wide_dtype(head.hidden)
        if "weight" in spec.params:
            sums["weight"] = wanted.total = head.hidden.new_zeros(spec.shapes["weight"], dtype=wide)
        if "bias" in spec.params:
            sums["bias"] = wanted.total_bias = head.hidden.new_zeros(
                spec.shapes["bias"], dtype=wide
            )
        sweep(head, backprops, self.loss, wanted)
        return sums

    def by_rows(self, activations: Any, batch: int) -> bool:
        return False  # the weight is all rows'

    def cut(self, activations: Any, backprops: Any, start: int, stop: int) -> Use:
        own = slice(start, stop)
        return as_activations(_samples(_head(activations), own)), backprops[own]

    def regroup(self, spec: LayerSpec, activations: Any, backprops: Any, units: Units) -> Use:
        head = _head(activations)
        try:
            check_rows_of_units(backprops, backprops.shape, units)
        except ValueError as error:
            raise unsupported(spec, activations, backprops, str(error)) from None
        some = head._replace(
            hidden=grouped_tokens(head.hidden, 1, units),
            targets=grouped_tokens(head.targets, 0, units),
            lse=grouped_tokens(head.lse, 0, units),
        )
        return as_activations(some), grouped_tokens(backprops, 0, units)


def as_activations(head: Head) -> tuple[Tensor, ...]:
    """A use of a head as a record holds it."""
    hidden, weight, bias, targets, lse = head
    return (hidden, weight, targets, lse) if bias is None else (hidden, weight, targets, lse, bias)


def _samples(head: Head, rows: slice | Tensor) -> Head:
    hidden, targets, lse = head.hidden[rows], head.targets[rows], head.lse[rows]
    return head._replace(hidden=hidden, targets=targets, lse=lse)


def _head(activations: Any) -> Head:
    hidden, weight, targets, lse, *bias = activations
    return Head(hidden, weight, bias[0] if bias else None, targets, lse)
