"""A forward pass that will be checked, and runs of the model on some of its units."""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from opacus.core.isolation.incomparable import IncomparableError
from opacus.core.isolation.losses import batch_mean
from opacus.core.isolation.probe import Start
from opacus.core.isolation.unit_slices import UnitRows, fitted
from opacus.core.platform.attributes import Attributes
from opacus.core.platform.memory import free_memory
from opacus.core.platform.sizes import COPIED_ELEMENTS, COPIED_SHARE, KEPT_ELEMENTS
from opacus.core.platform.torch_internals import at_end_of_backward
from opacus.core.platform.trees import flatten, leaves_of, tensors_of, unflatten
from opacus.core.record.changes import Start as Changed
from opacus.core.record.course import Taken
from opacus.core.record.named import NamedUnits

# Most units that are run together; no more than two of units with many outputs.
TOGETHER = 8
_NARROW = (torch.float16,)


class Watch:
    """A forward pass of the model that will be checked: its arguments, and what came back.

    Args:
        inputs: ``(args, kwargs)`` of the model.
        rows: Where these have their units.
        key: The structure of the batch.
        shared: Whether the gradient of a scalar output is that of a mean, over units.
        notice: A method, told of a loss that is a mean over more than samples; held weakly, as
            the output may outlive the model.
        tokens: ``[rows, T]``, the unit of each token, -1 for nobody's, where rows have several.
    """

    def __init__(
        self,
        inputs: Any,
        rows: UnitRows,
        key: Hashable,
        shared: bool,
        notice: Callable[[str], None] | None,
        tokens: Tensor | None = None,
    ) -> None:
        tensors = tensors_of(inputs)
        small = sum(t.numel() for t in tensors) <= COPIED_ELEMENTS
        self.inputs = _copied(inputs) if small else inputs
        self.rows = rows
        self.tokens = tokens
        self.key = key
        self.shared = shared
        self.started: Attributes | None = None  # what the model held when it began, if known
        self.changed: Changed | None = None  # what no pass before it did
        self.relies = False  # see Runs; the pass took another course than those before
        self.course: Taken | None = None  # that the pass took
        self.assumed = False  # whether rows were taken to be the units', though nothing showed it
        self.begun = False  # whether a backward pass of ours has begun since
        self.complete = False  # whether one that came here has ended
        self.finite = True  # whether there are finite numbers to compare
        self.refusal: str | None = None  # what is wrong with its losses
        self.received: set[int] = set()  # places of outputs that got a gradient
        self.chosen: list[int] = []
        self.cotangents: dict[int, Tensor] = {}  # [k, m, ...] by place among the outputs
        self.dims: dict[int, int] = {}  # that count units, of these outputs
        self.scalars: dict[int, Tensor] = {}
        self._sizes: list[Tensor] = []  # the largest element of each gradient that is kept
        self.divided = True  # whether all of these outputs are made of units
        self.contexts = _autocast_states()
        self._versions = [] if small else [(t, t._version) for t in tensors]
        self._notice = (lambda: None) if notice is None else weakref.WeakMethod(notice)

    def gate(self, output: Any) -> Any:
        """``output`` of the model, whose gradient will be noted."""
        leaves, tree = flatten(output)
        for place, leaf in enumerate(leaves):
            if _has_graph(leaf):
                leaves[place] = _Gate.apply(self, place, leaf)
        return unflatten(leaves, tree)

    def receive(self, place: int, grad: Tensor) -> None:
        """The gradient of an output has come; the first one counts."""
        if place in self.received:
            return
        if not self.received:
            at_end_of_backward(self._end)
        self.received.add(place)
        notice = self._notice()
        said = None if notice is None else batch_mean(grad, _GATES)
        if notice is not None and said is not None:
            notice(said)
        units = self.rows.units
        if grad.dim() == 0 or (grad.numel() == 1 and units != 1):
            self.scalars[place] = grad.detach().reshape(())
            self._sizes.append(self.scalars[place].abs())
            return
        dim = self.rows.output_dim(grad)
        if dim is None:
            self.divided = False
        elif units:
            front = grad.detach().movedim(dim, 0)
            self.dims[place] = dim
            self._keep(place, front.reshape(units, len(front) // units, *front.shape[1:]))

    def _end(self) -> None:
        self.complete = True

    def _keep(self, place: int, grad: Tensor) -> None:
        """Keep the rows ``[units, m, ...]`` of a few units."""
        if not self.chosen:
            wide = torch.promote_types(grad.dtype, torch.float32)
            norms = torch.linalg.vector_norm(grad.flatten(1), dim=1, dtype=wide)
            most = max(2, KEPT_ELEMENTS // max(1, grad[0].numel()))
            self.chosen = _choose(norms.tolist(), self._count(most))
        kept = grad if len(self.chosen) == len(grad) else grad[self.chosen]
        if kept.numel():
            self._sizes.append(torch.linalg.vector_norm(kept, math.inf))
        self.cotangents[place] = kept if _may_stay(kept) else kept.cpu()

    @property
    def dtypes(self) -> list[torch.dtype]:
        """Of the model's outputs, and of autocast where it is on."""
        also = [context["dtype"] for context in self.contexts if context["enabled"]]
        return [*also, *(grad.dtype for grad in self.cotangents.values())]

    def prepare(self) -> bool:
        """All gradients have come; whether there is anything to run."""
        if self.cotangents and not self.chosen:
            self.finite = False
            return False
        if not self.chosen and self.scalars:
            self.chosen = _choose([1.0] * self.rows.units, self._count(TOGETHER))
        sizes = [float(size) for size in self._sizes]
        largest = math.nan if any(map(math.isnan, sizes)) else max(sizes, default=0.0)
        every = [*self.cotangents.values(), *self.scalars.values()]
        unchanged = all(t._version == version for t, version in self._versions)
        self.finite &= math.isfinite(largest)
        if not (self.chosen and unchanged and self.finite and largest > 0):
            return False
        if any(t.dtype in _NARROW for t in every):  # to the size with most digits, all alike
            factor = 2.0 ** -math.frexp(largest)[1]
            self.cotangents = {p: t * factor for p, t in self.cotangents.items()}
            self.scalars = {p: t * factor for p, t in self.scalars.items()}
        return True

    def _count(self, most: int) -> int:
        """How many units are run together: no size of the inputs, so that it means units."""
        units = self.rows.units
        tensors = tensors_of(self.inputs)
        sizes = {s for t in tensors for d, s in enumerate(t.shape) if d != self.rows.dim(t)}
        most = min(units, TOGETHER, most)
        return next((n for n in range(most, 1, -1) if n not in sizes), most)


class _Gate(torch.autograd.Function):
    """Identity on an output of the model, which tells a watch the gradient that comes back.

    One for each output: a layer behind one that is not used must not get a gradient of zeros.
    """

    @staticmethod
    def forward(ctx: Any, watch: Watch, place: int, output: Tensor) -> Tensor:
        ctx.watch, ctx.place = watch, place
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        with torch.no_grad():
            ctx.watch.receive(ctx.place, grads[0])
        return None, None, grads[0]


# The nodes that it leaves in the graph.
_GATES: Any = _Gate._backward_cls  # type: ignore[attr-defined]


class WatchedRuns:
    """Runs the model on units of a watched batch: a :class:`~opacus.core.isolation.probe.Runs`."""

    def __init__(self, model: nn.Module, watch: Watch, made_up: int = 0) -> None:
        self.model = model
        self.watch = watch
        self.made_up = made_up
        self.rows = watch.rows
        self.relies = watch.relies
        self.changed = watch.changed

    @property
    def counts(self) -> bool:
        return not self.made_up

    @property
    def count(self) -> int:
        return self.made_up or len(self.watch.chosen)

    @property
    def most(self) -> int:
        return self.made_up or self.rows.units

    @property
    def stand_in(self) -> WatchedRuns | None:
        return WatchedRuns(self.model, self.watch, 1)

    def unit(self, place: int) -> int:
        return place if self.made_up else self.watch.chosen[place]

    def named(self, places: Sequence[int]) -> NamedUnits | None:
        return None

    def start(self, places: Sequence[int]) -> Start:
        watch = self.watch
        if self.made_up:
            args, kwargs = self.rows.made_up(watch.inputs, len(places))
        else:
            rows = [watch.chosen[place] for place in places]
            args, kwargs = self.rows.select(watch.inputs, rows)
        leaves = self._outputs(args, kwargs)
        if self.made_up:
            used = [leaf for leaf in leaves if _has_graph(leaf)]
            return used, [torch.ones_like(leaf) for leaf in used]
        tensors, grads = self._of_scalars(leaves, self._share(places))
        for place, cotangent in watch.cotangents.items():
            leaf = output_at(leaves, place, cotangent.dim() - 1)
            each = cotangent.shape[1]
            front = leaf.movedim(watch.dims[place], 0)
            if len(front) != len(places) * each:
                raise IncomparableError("its outputs have no row for each sample")
            own = torch.stack([cotangent[place].to(front.device) for place in places])
            tensors.append(front)
            grads.append(fitted(own.flatten(0, 1), front))
        return tensors, grads

    def _share(self, places: Sequence[int]) -> float:
        """The part of the batch's units that these rows have."""
        return len(places) / self.rows.units

    def _of_scalars(self, leaves: list[Any], share: float) -> Start:
        """The scalar outputs, and their gradients for this share of the batch's units."""
        tensors, grads = [], []
        for place, gradient in self.watch.scalars.items():
            scalar = output_at(leaves, place, 0)
            own = gradient * share if self.watch.shared else gradient
            tensors.append(scalar)
            grads.append(own.to(scalar).reshape(scalar.shape))
        return tensors, grads

    def _outputs(self, args: Any, kwargs: Any) -> list[Any]:
        """What the model gives, in autocast as in the step, from the attributes of its start."""
        with ExitStack() as stack:
            for context in self.watch.contexts:
                stack.enter_context(torch.autocast(**context))
            if self.watch.started is not None:
                self.watch.started.put_back()
            return leaves_of(self.model(*args, **kwargs))


class LossRuns:
    """Runs a loss on units of a batch: a :class:`~opacus.core.isolation.probe.Runs`."""

    relies = False
    changed = None
    stand_in = None

    def __init__(
        self,
        model: Any,
        batch: Any,
        rows: UnitRows,
        loss: Callable[[Any, Any], Any],
        shared: bool,
    ) -> None:
        self._model = model
        self._batch = batch
        self._rows = rows
        self._loss = loss
        self._shared = shared
        self.count, self.most = min(rows.units, TOGETHER), rows.units
        self.counts = True

    def unit(self, place: int) -> int:
        return place

    def named(self, places: Sequence[int]) -> NamedUnits | None:
        return None

    def start(self, places: Sequence[int]) -> Start:
        batch = self._rows.select(self._batch, places)
        try:
            value = self._loss(self._model, batch)
        except TypeError as error:
            traceback = error.__traceback__
            if traceback is not None and traceback.tb_next is None:  # it was not even entered
                raise IncomparableError(f"it is called as loss(model, batch): {error}") from None
            raise
        value = getattr(value, "loss_per_sample", value)
        if not isinstance(value, Tensor):
            raise TypeError(f"loss must return a tensor, got {type(value).__name__}")
        one = value.dim() == 0 and self._shared
        return [value.sum() * len(places) if one else value.sum()], [torch.ones_like(value.sum())]


def _may_stay(kept: Tensor) -> bool:
    """Whether a gradient stays where it is for the rest of the step."""
    if not kept.is_cuda or kept.numel() <= COPIED_ELEMENTS:
        return True
    return kept.numel() * kept.element_size() < COPIED_SHARE * free_memory(kept.device)


def _choose(norms: list[float], count: int) -> list[int]:
    """Units to be run: those with the largest and smallest gradients, and others."""
    finite = [i for i, norm in enumerate(norms) if math.isfinite(norm)]
    if len(finite) <= count:
        return finite
    order = sorted(finite, key=lambda i: (norms[i] == 0, norms[i]))
    ends = list(dict.fromkeys([max(finite, key=lambda i: norms[i]), order[0]]))[:count]
    others = [i for i in finite if i not in ends]
    return ends + random.Random(len(norms)).sample(others, count - len(ends))


def output_at(leaves: list[Any], place: int, dims: int) -> Tensor:
    """The output in this place, of so many dimensions (0: of any).

    Raises:
        IncomparableError: There is another one.
    """
    leaf = leaves[place] if place < len(leaves) else None
    if not isinstance(leaf, Tensor) or not leaf.requires_grad or (dims and leaf.dim() != dims):
        raise IncomparableError("its outputs are others for other numbers of samples")
    return leaf


def _copied(inputs: Any) -> Any:
    leaves, tree = flatten(inputs)
    copies = [
        leaf.detach().clone().requires_grad_(leaf.requires_grad) if type(leaf) is Tensor else leaf
        for leaf in leaves
    ]
    return unflatten(copies, tree)


def _autocast_states() -> list[dict[str, Any]]:
    kinds = ("cuda", "cpu") if torch.cuda.is_available() else ("cpu",)
    return [
        {
            "device_type": kind,
            "enabled": torch.is_autocast_enabled(kind),
            "dtype": torch.get_autocast_dtype(kind),
        }
        for kind in kinds
    ]


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad
