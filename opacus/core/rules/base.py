"""The interface of a layer rule, and what every rule gets for free."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core.kernels.norms.reference import sum_of_squares, wide_dtype
from opacus.core.kernels.norms.suite import REFERENCE, NormKernels
from opacus.core.kernels.norms.tied import Heads
from opacus.core.rules.grouping import regroup_tokens
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units

# Activations and backprops of one use of a layer.
Use = tuple[Any, Any]
# See LayerRule.carried.
Carried = tuple[Callable[..., tuple[Tensor, ...]], tuple[Any, ...]]


class LayerRule:
    """How a layer's parameter gradients follow from its activations and backprops.

    A rule is a pure function of ``(spec, activations, backprops)``; it never sees a
    parameter, unless ``needs_parameters``. Activations are the tuple of the layer's
    tensor inputs, backprops the gradient of the sum of the samples' losses with respect
    to its output, both batch first. Results are keyed by local parameter name and have
    the parameters in ``spec.params`` only.

    Only :meth:`per_sample_grad` must be written; the others are derived from it and
    overridden where algebra gives a shortcut.
    """

    # Whether the rule runs the layer again, so that it needs its parameters (unsharded)
    # and may draw other random numbers.
    needs_parameters: bool = False
    # Whether such a rule's norms are measured by themselves, without per-sample gradients.
    measures: bool = False
    # How norms are computed; see with_kernels.
    kernels: NormKernels = REFERENCE
    # Whether norms follow from this rank's per-sample gradients alone.
    norm_is_local: bool = True
    # Parameters whose per-sample gradients are small beside activations and backprops: formed
    # once where the layer's record is kept for the sum of the others.
    light: tuple[str, ...] = ()
    # Parameters whose sum is the same if row i of the one input is scaled, not that of backprops.
    bilinear: tuple[str, ...] = ()
    # Whether inputs are used unchanged: some have no rows, or another dtype than the output.
    as_given: bool = False
    # Whether row i of the output comes from row i of the input in ways that the trail cannot see.
    hides_rows: bool = False
    # Whether :meth:`norm_sq_of_several` may cost less than a layer at a time.
    takes_several: bool = False
    # Whether :meth:`beside_table` is there.
    beside_tables: bool = False
    # Whether such layers have the batch in dimension 0 in time-major models too.
    batch_leads: bool | None = None

    def features(self, spec: LayerSpec) -> int | None:
        """Number of last dimensions of the output that are neither batch nor time."""
        return None

    def with_kernels(self, kernels: NormKernels) -> LayerRule:
        """The same rule with other norm computations."""
        rule = copy.copy(self)
        rule.kernels = kernels
        inner = getattr(rule, "rule", None)
        if isinstance(inner, LayerRule):
            rule.rule = inner.with_kernels(kernels)  # type: ignore[attr-defined]
        return rule

    def norm_sq_of_many(
        self, uses: Sequence[tuple[LayerSpec, Any, Any]]
    ) -> list[dict[str, Tensor]] | None:
        """:meth:`norm_sq` of many layers in one launch, ``None`` where there is no such kernel."""
        return None

    def norm_sq_of_several(
        self, uses: Sequence[tuple[LayerSpec, Any, Any]]
    ) -> list[dict[str, Tensor]]:
        """:meth:`norm_sq` of layers, some of which may have the same memory as activations."""
        return [self.norm_sq(*use) for use in uses]

    def stacked_bytes(self, spec: LayerSpec, activations: Any, backprops: Any) -> int:
        """What :meth:`norm_sq_of_several` needs for a while for this one of several layers."""
        return 0

    def carried(self, spec: LayerSpec) -> Carried | None:
        """How the layer's own backward can form its per-sample gradients, if it can.

        Returns:
            A function of the input ``[B, ..., d]`` and the gradient of the output, and what else it
            is called with, equal in equal layers. It gives ``[B, *shape]`` for each of
            ``spec.params``.
        """
        return None

    def options(self, module: nn.Module) -> dict[str, Any]:
        """Static attributes of ``module`` that the rule reads from ``spec.options``.

        Raises:
            ValueError: The layer has a setting that the rule cannot handle.
        """
        return {}

    def per_sample_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any
    ) -> dict[str, Tensor]:
        """Per-sample gradients ``[B, *shape]``."""
        raise NotImplementedError(f"{type(self).__name__} has no per-sample gradient")

    def norm_sq(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        """Squared norms ``[B]`` of the per-sample gradients, in fp32 (fp64 for fp64)."""
        grads = self.per_sample_grad(spec, activations, backprops)
        return {name: sum_of_squares(grad) for name, grad in grads.items()}

    def beside_table(
        self, spec: LayerSpec, activations: Any, backprops: Any, ids: Tensor
    ) -> tuple[Heads, dict[str, Tensor]]:
        """What the norm needs of a layer whose weight is a lookup table's, too.

        Args:
            ids: ``[B, S]``, the rows of the table that were looked up.

        Returns:
            That, and the squared norms of other parameters by local name.
        """
        raise NotImplementedError(f"{type(self).__name__} shares its weight with no table")

    def norm_cost(self, spec: LayerSpec, activations: Any, backprops: Any) -> float | None:
        """Multiply-adds of :meth:`norm_sq`; ``None`` if it forms the per-sample gradients."""
        return None

    def forms_grads(self, spec: LayerSpec, activations: Any, backprops: Any) -> bool:
        """Whether :meth:`norm_sq` forms the per-sample gradients on its way."""
        return self.norm_cost(spec, activations, backprops) is None

    def weighted_grad(
        self, spec: LayerSpec, activations: Any, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        """``sum_i factors[i] * g_i``, of the parameter's shape; ``None`` means all ones."""
        grads = self.per_sample_grad(spec, activations, scale_rows(backprops, factors))
        return {name: grad.sum(0) for name, grad in grads.items()}

    def wide_sum(self, spec: LayerSpec, activations: Any, backprops: Any) -> dict[str, Tensor]:
        """:meth:`weighted_grad` without factors, not rounded to half precision where possible."""
        return self.weighted_grad(spec, activations, backprops, None)

    def can_write(self, spec: LayerSpec, activations: Any, backprops: Any, out: Tensor) -> bool:
        """Whether the layer has one parameter, and :meth:`write_sum` writes its sum to ``out``.

        Args:
            spec: The layer.
            out: ``[W, n]``: the parts of W ranks one after another.
        """
        return False

    def write_sum(self, spec: LayerSpec, activations: Any, backprops: Any, out: Tensor) -> None:
        """Write :meth:`wide_sum` of the one parameter, so that it takes no memory of its own."""
        raise NotImplementedError(f"{type(self).__name__} has no sum that is written")

    def by_rows(self, activations: Any, batch: int) -> bool:
        """Whether row i of each activation belongs to sample i.

        Then activations and backprops of some samples can be cut out, and those of several
        layers concatenated.
        """
        return isinstance(activations, tuple) and all(
            a.dim() > 0 and a.shape[0] == batch for a in activations
        )

    def cut(self, activations: Any, backprops: Any, start: int, stop: int) -> Use | None:
        """The use on samples ``start`` to ``stop``; ``None`` where they cannot be cut out."""
        if not isinstance(backprops, Tensor) or not self.by_rows(activations, len(backprops)):
            return None
        return tuple(a[start:stop] for a in activations), backprops[start:stop]

    def grad_dtype(self, activations: Any, backprops: Any) -> torch.dtype:
        """The dtype of :meth:`per_sample_grad`."""
        first = backprops[0] if isinstance(backprops, tuple) else backprops
        dtype: torch.dtype = first.dtype
        return dtype

    def regroup(
        self, spec: LayerSpec, activations: Any, backprops: Any, units: Units
    ) -> Use | None:
        """The same use with all rows of unit u in row u.

        Returns:
            Activations and backprops ``[n, ...]``, or ``None`` where the layer has no dimension
            that they could be put in: then gradients of rows are formed and summed.

        Raises:
            ValueError: Rows of nobody have a gradient, or there are several units in a row.
        """
        features = self.token_features(spec)
        if features is None:
            return None
        try:
            x, g = regroup_tokens(activations[0], backprops, units, features)
        except ValueError as error:
            raise unsupported(spec, activations, backprops, str(error)) from None
        return (x,), g

    def of_units(
        self, spec: LayerSpec, activations: Any, backprops: Any, units: Units
    ) -> dict[str, Tensor] | None:
        """Gradients ``[n, *shape]`` of units whose rows the inputs do not have one by one.

        Returns:
            ``None`` where gradients of rows are formed and summed.
        """
        return None

    def token_features(self, spec: LayerSpec) -> tuple[int, int] | None:
        """The feature dimensions of a layer whose gradient is a sum over all other dimensions.

        Returns:
            The numbers of those last dimensions, or ``None`` for a layer of another kind.
        """
        return None

    def join(self, spec: LayerSpec, uses: Sequence[Use]) -> Use | None:
        """Several uses of the layer as one whose gradient is the sum of theirs.

        Returns:
            Activations and backprops, or ``None`` where that is not possible.
        """
        return None


def check_batch(spec: LayerSpec, activations: Any, backprops: Any, batch: int) -> None:
    """Refuse backprops whose leading dimension is not the batch.

    Args:
        spec: The layer.
        activations: Its inputs; only named in the error.
        backprops: A tensor or a tuple of them.
        batch: Number of samples B.

    Raises:
        ValueError: Names the layer and the shapes. Mixing rows up would clip the wrong
            samples.
    """
    outputs = backprops if isinstance(backprops, tuple) else (backprops,)
    if any(g.dim() == 0 or g.shape[0] != batch for g in outputs):
        reason = f"the first dimension of its output is not the batch of {batch} samples"
        raise unsupported(spec, activations, backprops, reason)


def unsupported(spec: LayerSpec, activations: Any, backprops: Any, reason: str) -> ValueError:
    """The error for a case that a rule does not support."""
    if not isinstance(activations, tuple):  # a Call
        activations = (activations.args, activations.kwargs)
    return ValueError(
        f"{spec}: {reason}; activations {_shapes(activations)}, backprops {_shapes(backprops)}. "
        "Freeze the layer, or register a grad sampler for it"
    )


def _shapes(tensors: Any) -> str:
    shapes = [str(list(t.shape)) for t in tree_leaves(tensors) if isinstance(t, Tensor)]
    return ", ".join(shapes) or "none"


def tokens_of(
    spec: LayerSpec, activations: Any, backprops: Tensor, feature_dims: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """First input and backprops as ``[B, T, *features]``, see :func:`as_tokens`.

    Args:
        spec: The layer.
        activations: Its inputs.
        backprops: Gradient with respect to its output.
        feature_dims: Number of feature dimensions of the input and of the output.

    Raises:
        ValueError: They do not have a batch dimension, or not the same one, or not the
            same tokens.
    """
    x = activations[0]
    own, other = x.shape, backprops.shape
    plain = len(own) - feature_dims[0] == len(other) - feature_dims[1] == 2
    if plain and own[0] == other[0] and own[1] == other[1]:
        return x, backprops  # nearly always, and asked several times for each layer
    leading = own[: x.dim() - feature_dims[0]]
    if not leading or leading != other[: backprops.dim() - feature_dims[1]]:
        reason = "its input and output do not have the same batch and token dimensions"
        raise unsupported(spec, activations, backprops, reason)
    return as_tokens(x, feature_dims[0]), as_tokens(backprops, feature_dims[1])


def scale_rows(backprops: Any, factors: Tensor | None) -> Any:
    """Multiply row i by ``factors[i]``.

    In at least fp32: a factor that was itself rounded to bf16 could be 0.4% too large, and
    so would be the clipped gradient.
    """
    if factors is None:
        return backprops
    if isinstance(backprops, tuple):
        return tuple(scale_rows(b, factors) for b in backprops)
    column = factors.to(wide_dtype(backprops))
    column = column.reshape(-1, *[1] * (backprops.dim() - 1))
    return (backprops * column).to(backprops.dtype)


def as_tokens(tensor: Tensor, feature_dims: int = 1) -> Tensor:
    """``[B, ..., *features] -> [B, T, *features]``; T is 1 where there is no such dimension."""
    split = tensor.dim() - feature_dims
    if split == 2:
        return tensor
    tokens = math.prod(tensor.shape[1:split])
    return tensor.reshape(tensor.shape[0], tokens, *tensor.shape[split:])


def join_tokens(uses: Sequence[tuple[Tensor, ...]], feature_dims: Sequence[int]) -> list[Tensor]:
    """Join corresponding tensors of several uses along their tokens.

    Uses with fewer rows (packed sequences) are padded with rows of zeros.
    """
    rows = max(use[0].shape[0] for use in uses)
    joined = []
    for index, dims in enumerate(feature_dims):
        parts = [pad_rows(as_tokens(use[index], dims), rows) for use in uses]
        joined.append(torch.cat(parts, dim=1))
    return joined


def pad_rows(tensor: Tensor, rows: int) -> Tensor:
    """``tensor`` with rows of zeros appended up to ``rows``."""
    missing = rows - tensor.shape[0]
    if missing <= 0:
        return tensor
    return torch.cat([tensor, tensor.new_zeros(missing, *tensor.shape[1:])])
