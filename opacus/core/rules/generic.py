"""Any module at all: its per-sample gradients by running it again under vmap."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap
from torch.utils._pytree import (
    keystr,
    tree_flatten,
    tree_flatten_with_path,
    tree_leaves,
    tree_map,
    tree_unflatten,
)

from opacus.core.platform.attributes import Attributes, same_attributes
from opacus.core.platform.held import HeldModule
from opacus.core.platform.sharded import is_fsdp
from opacus.core.rules.base import LayerRule, check_batch, scale_rows, unsupported
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units

Tensors = tuple[Tensor, ...]
# A module as a function of its own trainable parameters; gives its tensor outputs.
Run = Callable[[dict[str, Tensor]], Tensors]
# Which argument of a layer a tensor is, in calls with as many, and its number of dimensions.
Place = tuple[str, int, int]
# Gradient of these parameters, given those of the outputs.
PullBack = Callable[[Run, dict[str, Tensor], Tensors], dict[str, Tensor]]


@dataclass(frozen=True)
class Call:
    """One call of a module: what it was given, and its own tensors at that time.

    Tensors among the arguments are batch first; ``batch_dim`` is where the module wants
    the batch.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    parameters: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    batch_dim: int = 0
    attributes: Attributes | None = None

    @classmethod
    def of(
        cls,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        batch_dim: int,
        names: Iterable[str] = (),
        started_from: Mapping[str, Tensor] | None = None,
        attributes: Attributes | None = None,
    ) -> Call:
        """A call with ``module``'s own tensors of now, and those of its parts so named.

        Buffers are those that the call has ``started_from``, where that is known, and so are
        ``attributes``.
        """
        parameters = {n: p.detach() for n, p in module._parameters.items() if p is not None}
        for path, _, name in (n.rpartition(".") for n in names if "." in n):
            held = module.get_submodule(path)._parameters[name]
            assert held is not None
            parameters[f"{path}.{name}"] = held.detach()
        buffers = {n: b for n, b in module._buffers.items() if b is not None}
        buffers |= started_from or {}
        return cls(args, kwargs, parameters, buffers, batch_dim, attributes)

    def split(self, batch: int, nobodys: Set[Place] = frozenset()) -> tuple[list[Any], list[int]]:
        """Find the samples in the arguments.

        Args:
            batch: Number of samples B.
            nobodys: Arguments that are not the samples', whatever their rows.

        Returns:
            The flattened arguments, and the places of the tensors with B rows. All
            others are the same for every sample, and as the module wants them.
        """
        leaves, _ = tree_flatten((self.args, dict(self.kwargs)))
        places = [i for i, leaf in enumerate(leaves) if _has_rows(leaf, batch)]
        if nobodys:
            known = self.places()
            places = [i for i in places if known[i] not in nobodys]
        whole = [self.restore(leaf) for leaf in leaves]
        return [leaf if i in places else whole[i] for i, leaf in enumerate(leaves)], places

    def places(self) -> list[Place]:
        """Of each of the flattened arguments."""
        leaves, _ = tree_flatten_with_path((self.args, dict(self.kwargs)))
        dims = [leaf.dim() if isinstance(leaf, Tensor) else 0 for _, leaf in leaves]
        return [(keystr(path), len(leaves), d) for (path, _), d in zip(leaves, dims, strict=True)]

    def restore(self, value: Any) -> Any:
        """A batch-first argument or backprop as the module wants it."""
        if self.batch_dim and isinstance(value, Tensor) and value.dim() > self.batch_dim:
            return value.movedim(0, self.batch_dim)
        return value

    def fill(self, leaves: list[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments with ``leaves`` in place of what was given."""
        _, tree = tree_flatten((self.args, dict(self.kwargs)))
        args, kwargs = tree_unflatten(leaves, tree)
        return args, kwargs


class GenericRule(LayerRule):
    """Runs ``module`` once more for each sample, as a batch of one.

    Only parameters that the module's own forward reads are differentiated; those of its
    other children belong to their own rules. Tensor arguments with B rows are split into
    samples, all others are given to every sample whole. A module that draws random
    numbers draws others than in the forward pass.

    Args:
        module: The module; its hooks must not record while the rule runs it.
    """

    needs_parameters = True

    def __init__(self, module: nn.Module) -> None:
        self.module = HeldModule(module)
        # Arguments that were split into samples, and those that had another number of rows once:
        # they are nobody's, also where a batch has as many samples by chance.
        self._samples: set[Place] = set()
        self._nobodys: set[Place] = set()

    def per_sample_grad(
        self, spec: LayerSpec, activations: Call, backprops: Any
    ) -> dict[str, Tensor]:
        call, grads = activations, _as_tuple(backprops)
        batch = grads[0].shape[0]
        check_batch(spec, call, backprops, batch)
        own = {name: call.parameters[name] for name in spec.params}
        if batch == 0:
            return {name: p.new_zeros(0, *p.shape) for name, p in own.items()}
        return self._of_pieces(spec, call, backprops, [slice(i, i + 1) for i in range(batch)])

    def _of_pieces(
        self, spec: LayerSpec, call: Call, backprops: Any, pieces: Sequence[slice | Tensor]
    ) -> dict[str, Tensor]:
        """Gradients ``[n, *shape]`` of n pieces of the rows, each run by itself.

        Pieces that are slices are of one length, and follow each other.
        """
        self._refuse_to_run_again(spec, call, backprops)
        grads, own = _as_tuple(backprops), {name: call.parameters[name] for name in spec.params}
        if self._learn(call, len(grads[0]), splits=len(pieces) > 1):
            raise unsupported(spec, call, backprops, _BY_CHANCE)
        leaves, places = call.split(len(grads[0]), self._nobodys)

        def one_piece(pull_back: PullBack, inputs: Tensors, rows: Tensors) -> dict[str, Tensor]:
            filled = list(leaves)
            for i, tensor in zip(places, inputs, strict=True):
                filled[i] = call.restore(tensor)
            run = self._runner(call, *call.fill(filled))
            return pull_back(run, own, tuple(call.restore(g) for g in rows))

        with _precision(call):
            try:
                return _map_pieces(one_piece, tuple(leaves[i] for i in places), grads, pieces, own)
            except Exception as error:  # whatever the module raises
                reason = f"it could not be run on one sample ({error})"
                raise unsupported(spec, call, backprops, reason) from error

    def _learn(self, call: Call, batch: int, *, splits: bool) -> bool:
        """Which arguments are nobody's; whether such a one was taken for the samples' before."""
        leaves = tree_leaves((call.args, dict(call.kwargs)))
        pairs = zip(call.places(), leaves, strict=True)
        tensors = [(place, x) for place, x in pairs if isinstance(x, Tensor)]
        self._nobodys |= {p for p, x in tensors if x.dim() and x.shape[0] not in (1, batch)}
        wrong = self._samples & self._nobodys
        if splits:
            self._samples |= {p for p, x in tensors if _has_rows(x, batch)}
        self._samples -= self._nobodys
        return bool(wrong)

    def of_units(
        self, spec: LayerSpec, activations: Call, backprops: Any, units: Units
    ) -> dict[str, Tensor] | None:
        """The module runs on the rows of one unit, all of them at once.

        Where inputs have a row for each unit, and outputs several, as a router of tokens, it runs
        on that row and gives the unit's rows of the outputs. If other inputs have a row for each
        row, it cannot be known whether those are the units'. Rows cannot be run by themselves
        then: nothing says that they have nothing to do with each other.

        Raises:
            ValueError: That is not known.
        """
        grads, count, block = _as_tuple(backprops), units.count, units.block
        rows = len(grads[0])
        if any(len(g) != rows for g in grads):
            return None
        if rows == 0:
            own = [(name, activations.parameters[name]) for name in spec.params]
            return {name: p.new_zeros(count, *p.shape) for name, p in own}
        of_units = activations.split(count, self._nobodys)[1]
        if activations.split(rows)[1]:
            if of_units and 1 < count != rows:
                raise unsupported(spec, activations, backprops, _BESIDE_ROWS)
            pieces = _rows_of_units(units, grads[0])
            return None if pieces is None else self._of_pieces(spec, activations, backprops, pieces)
        if block is None or rows != count * block or not of_units:
            return None
        by_unit = tuple(g.unflatten(0, (count, block)) for g in grads)
        return self.per_sample_grad(spec, activations, by_unit)

    def weighted_grad(
        self, spec: LayerSpec, activations: Call, backprops: Any, factors: Tensor | None
    ) -> dict[str, Tensor]:
        call, grads = activations, _as_tuple(scale_rows(backprops, factors))
        own = {name: call.parameters[name] for name in spec.params}
        if grads[0].shape[0] == 0:
            return {name: torch.zeros_like(p) for name, p in own.items()}
        self._refuse_to_run_again(spec, call, backprops)
        args, kwargs = tree_map(call.restore, (call.args, dict(call.kwargs)))
        with _precision(call):
            run = self._runner(call, args, kwargs)
            return _by_autograd(run, own, tuple(call.restore(g) for g in grads))

    def _runner(self, call: Call, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Run:
        module = self.module()
        constant = {n: p.detach() for n, p in module.named_parameters(remove_duplicate=False)}
        buffers = {**dict(module.named_buffers(remove_duplicate=False)), **call.buffers}

        def run(parameters: dict[str, Tensor]) -> tuple[Tensor, ...]:
            # Modules may change buffers in place; what they see are copies.
            copies = {name: buffer.clone() for name, buffer in buffers.items()}
            tensors = {**constant, **call.parameters, **copies, **parameters}
            # A child that shares one of the parameters has a record of its own.
            with same_attributes(module, call.attributes):
                output = functional_call(module, tensors, args, dict(kwargs), tie_weights=False)
            return tuple(t for t in tree_leaves(output) if _differentiable(t))

        return run

    def _refuse_to_run_again(self, spec: LayerSpec, call: Call, backprops: Any) -> None:
        given = tree_leaves((call.args, dict(call.kwargs)))
        cache = next((type(x).__name__ for x in given if type(x).__name__.endswith("Cache")), None)
        if cache is not None:
            reason = (
                f"it is given a {cache}, which would have its keys and values twice once the layer "
                "runs again for its gradients: call the model with use_cache=False"
            )
            raise unsupported(spec, call, backprops, reason)
        module = self.module()
        if any(is_fsdp(child) for child in module.modules() if child is not module):
            reason = (
                "it has parameters of its own beside modules that are sharded by themselves, "
                "which cannot run again in the backward pass; give its parameters a module of "
                "their own"
            )
            raise unsupported(spec, call, backprops, reason)


_BY_CHANCE = (
    "it is given a tensor that has no row for each sample, but had as many rows as an earlier "
    "batch had samples, so it was taken for theirs; from now on it is not: run the step again"
)

_BESIDE_ROWS = (
    "it is given a tensor with a row for each sample beside others with several rows for each, and "
    "it is not known whether that one is the samples' or has as many rows by chance: give it as "
    "many rows as the others (repeat_interleave), or start with a batch of another size if all "
    "samples share it"
)


def _rows_of_units(units: Units, like: Tensor) -> list[slice | Tensor] | None:
    """Which rows each unit has; ``None`` if one row is of several."""
    if units.block is not None:
        steps = range(0, units.count * units.block, units.block)
        return [slice(i, i + units.block) for i in steps]
    if units.ids is None or units.ids.numel() != len(like):
        return None
    ids = units.over(like.shape[:1], like.device)
    return [(ids == unit).nonzero().squeeze(1) for unit in range(units.count)]


def _map_pieces(
    one_piece: Callable[[PullBack, Tensors, Tensors], dict[str, Tensor]],
    inputs: Tensors,
    grads: Tensors,
    pieces: Sequence[slice | Tensor],
    own: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Stacked results of ``one_piece`` on pieces of the rows, all at once where possible."""
    if isinstance(pieces[0], slice):
        stacked = [tuple(t.unflatten(0, (len(pieces), -1)) for t in ts) for ts in (inputs, grads)]
        # Not every module can be mapped (control flow on values, NumPy, custom kernels). If
        # the module itself is at fault, it raises again below.
        with suppress(Exception):
            mapped = vmap(partial(one_piece, _by_vjp), randomness="different")
            return mapped(*stacked)  # type: ignore[no-any-return]
    nothing = {name: torch.zeros_like(parameter) for name, parameter in own.items()}
    found = [
        one_piece(_by_autograd, tuple(t[piece] for t in inputs), tuple(g[piece] for g in grads))
        if isinstance(piece, slice) or piece.numel()
        else nothing
        for piece in pieces
    ]
    return {name: torch.stack([of_piece[name] for of_piece in found]) for name in own}


def _by_vjp(run: Run, parameters: dict[str, Tensor], grads: Tensors) -> dict[str, Tensor]:
    outputs, pull_back = vjp(run, parameters)  # type: ignore[misc]
    fitting = tuple(_fit(g, output) for g, output in zip(grads, outputs, strict=True))
    return pull_back(fitting)[0]  # type: ignore[no-any-return]


def _by_autograd(run: Run, parameters: dict[str, Tensor], grads: Tensors) -> dict[str, Tensor]:
    """As :func:`_by_vjp`, for one sample at a time; any ``autograd.Function`` will do."""
    leaves = {name: p.detach().requires_grad_() for name, p in parameters.items()}
    with torch.enable_grad():
        outputs = run(leaves)
    pairs = [(o, _fit(g, o)) for g, o in zip(grads, outputs, strict=True) if o.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(p) for name, p in parameters.items()}
    results = torch.autograd.grad(
        [output for output, _ in pairs],
        list(leaves.values()),
        [grad for _, grad in pairs],
        allow_unused=True,
        materialize_grads=True,
    )
    return dict(zip(leaves, results, strict=True))


def _fit(grad: Tensor, output: Tensor) -> Tensor:
    """Backprop in the shape and dtype of the output that the module gave this time.

    Raises:
        ValueError: It is not the gradient of that output.
    """
    if output.shape == grad.shape[1:] and len(grad) == 1:  # it squeezes a batch of one
        grad = grad.squeeze(0)
    elif output.shape == (1, *grad.shape[1:]):  # computed once for all samples
        grad = grad.sum(0, keepdim=True)
    elif output.shape != grad.shape:
        raise ValueError(
            f"its output is then {list(output.shape)}, the backprop {list(grad.shape)}: the batch "
            "is not the first dimension of what goes in and comes out"
        )
    return grad.to(output.dtype)


def _precision(call: Call) -> AbstractContextManager[Any]:
    """Autocast again, if the module ran under it: inputs are half, its parameters not."""
    leaves = [t for t in tree_leaves((call.args, dict(call.kwargs))) if isinstance(t, Tensor)]
    half = {t.dtype: t for t in leaves if t.dtype in (torch.float16, torch.bfloat16)}
    wide = any(p.dtype == torch.float32 for p in call.parameters.values())
    if len(half) != 1 or not wide:
        return nullcontext()
    ((dtype, tensor),) = half.items()
    return torch.autocast(tensor.device.type, dtype=dtype)


def _as_tuple(backprops: Any) -> tuple[Tensor, ...]:
    return backprops if isinstance(backprops, tuple) else (backprops,)


def _has_rows(value: Any, rows: int) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0 and value.shape[0] == rows


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())
