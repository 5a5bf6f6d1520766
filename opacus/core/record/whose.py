"""The units of the rows of a model's layers, in the running forward pass."""

from __future__ import annotations

import copy
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opacus.core.record.changes import Changes
from opacus.core.record.course import Course
from opacus.core.record.flags import Flags
from opacus.core.record.kept_values import KeptValues
from opacus.core.record.layers import Layer
from opacus.core.record.passes import ForwardPass, Hidden
from opacus.core.record.provenance import IndexCheck, RepeatCheck
from opacus.core.record.record import Use, differentiable
from opacus.core.record.shared import Scope
from opacus.core.record.trail import Follower, NobodysRowsError, can_follow, same_uses
from opacus.core.record.trail.mode import Trail
from opacus.core.record.trail.row_order import same_order
from opacus.core.rules.spec import LayerSpec
from opacus.core.rules.units import Units, only_unit


class WhoseRows:
    """Finds the units of each use of a layer; refuses layers with rows of unknown units.

    Where a forward pass can be followed (see :mod:`opacus.core.record.trail`), what is found there
    counts. Elsewhere (in compiled models, and where inputs do not tell the number of samples)
    rows are the units, as far as :class:`IndexCheck` and :class:`RepeatCheck` can see.

    Args:
        layers: All layers.

    Attributes:
        flags: Of the model.
        course: Of the latest forward pass.
        guesses: Whether the latest one of several samples could not be followed, and nothing is
            known of its like.
        assumed: Whether rows were taken to be the units' in it, though nothing showed it.
        followed: Whether the latest one that came through was followed.
        asked: Whether :meth:`place` has something to do for every layer now; else it only has for
            outputs of one row, batches of one sample, and units that the user names.
    """

    def __init__(self, layers: Sequence[Layer]) -> None:
        self.indices = IndexCheck(layer.spec for layer in layers)
        self.repeats = RepeatCheck()
        self.flags = Flags()
        self.course = Course(Changes())
        self._several = False  # whether the latest one is of several samples
        self._follower = Follower({layer.spec.name: layer.trained_names for layer in layers})
        self._follows = False  # whether the follower has to be asked about layers now
        self.asked = self.guesses = self.assumed = self.followed = False
        # Units of layers that ran without gradients, as reentrant checkpoints let them.
        self._hidden: Hidden = {}
        self._shared: Trail | None = None  # of the latest forward pass in which layers were shared
        self._kept: KeptValues | None = KeptValues()

    def fresh(self, *, relies: bool = False) -> WhoseRows:
        """One for forward passes on the side; ``relies``: on what the latest one relied on."""
        other = copy.copy(self)
        other.flags = self.flags.fixed()
        other.indices, other.repeats = copy.deepcopy(self.indices), RepeatCheck()
        other._follower, other._follows, other._hidden = (
            self._follower.fresh(relies=relies),
            False,
            {},
        )
        other.asked, other._shared, other.course = False, None, Course()
        other._kept = None if relies or self._kept is None else self._kept.aside()
        return other

    @property
    def carries(self) -> bool:
        """Whether something of samples was there from an earlier batch as the latest pass began."""
        return self._kept is not None and bool(self._kept.carried)

    def keeps(self, model: nn.Module, names: set[str]) -> None:
        """What these hold was found to depend on samples."""
        if self._kept is not None:
            self._kept.note(model, names)

    def begin(
        self,
        model: nn.Module,
        inputs: Any,
        forward_pass: ForwardPass,
        batch: int | None,
        dim: int,
        *,
        recorded: bool,
    ) -> None:
        """A forward pass starts.

        Args:
            model: The model.
            inputs: Its arguments.
            forward_pass: The one that starts.
            batch: Number of units, if that is known.
            dim: Dimension of the inputs with one entry for each unit.
            recorded: Whether layers are tapped in it.
        """
        self._follows, self._hidden, self.asked, self.assumed = False, {}, False, False
        self._shared = None if recorded else self._shared
        self.course.expect(None)
        if self._kept is not None and self._kept.trail is not None:
            self._kept.end_alone(None, None, None)  # of a pass that was interrupted
        if recorded and batch == 1 and self._kept is not None:
            self._kept.begin_alone(model, inputs, forward_pass.generation, dim)
        asks = None
        if recorded:
            self.flags.look(model)
            self._several = batch is None or batch > 1
            if self._kept is not None and self._kept.places:
                self._kept.arrive(forward_pass.generation)
        if recorded and batch is not None and batch > 1:
            given = inputs, self.flags.state
            asks = self._follower.begin(given, batch, dim, lambda: can_follow(model, inputs))
            self.course.expect(self._follower.structure)
            self.guesses = self.assumed = asks is None
        if asks is not None:
            self._follows = self.asked = asks
            self.indices.begin(inputs, None, False)
            trail = self._follower.trail if asks else None
            if trail is not None and self._kept is not None:
                self._kept.begin(model, trail, forward_pass.generation)
        elif dim == 0:
            self.indices.begin(inputs, batch, recorded, model)

    def ran(self, manner: Hashable) -> None:
        """It has come through; see :meth:`Course.end`."""
        trail = self._follower.trail
        self.followed = trail is not None
        looked = trail is not None and any(trail.looked)
        self.course.end(manner, followed=self.followed, looked=looked, several=self._several)
        if self.course.new:
            self._follower.follow_next(like=self.course.changed is None)

    def end(
        self,
        output: Any = None,
        forward_pass: ForwardPass | None = None,
        model: nn.Module | None = None,
    ) -> None:
        """It has ended, with this output of the model; ``None`` if it failed."""
        if self._kept is not None and self._kept.trail is not None:
            batch = None if forward_pass is None else forward_pass.generation
            self._kept.end_alone(model, output, batch)
        if self._follows and model is not None and forward_pass is not None:
            self._note_kept(model, forward_pass)
        if self._kept is not None and self._kept.places:
            self._kept.leave()
        self._follows = False
        self.asked = bool(self._hidden) or self._shared is not None
        if forward_pass is not None:
            forward_pass.hidden = self._hidden
        self.indices.end()
        self._follower.end(output, frozenset() if forward_pass is None else forward_pass.kinds)
        self.assumed |= self._follower.assumed

    def _note_kept(self, model: nn.Module, forward_pass: ForwardPass) -> None:
        trail = self._follower.trail
        if trail is not None and self._kept is not None:
            with trail.aside():
                self._kept.end(model, trail, forward_pass.generation)

    def place(
        self, use: Use, outputs: list[Tensor], inputs: Sequence[Tensor], *, recomputed: bool
    ) -> list[Tensor]:
        """Find out whose the rows of a layer's outputs are; one that all share becomes many.

        Args:
            use: Of the layer; gets its units.
            outputs: Of the layer.
            inputs: Of the layer.
            recomputed: Whether a checkpoint runs it again.
        """
        named, spec = use.forward_pass.named, use.spec
        if named is not None and named.by_token:  # shapes alone say which is which
            use.units = named.of_layer(spec, None, outputs[0], use.batch_dim)
            return outputs
        follower = self._follower if self._follows and not recomputed else None
        first = outputs[0]
        # In a block that runs again rows are whose they were, though nothing is followed.
        known = recomputed and spec.name in use.forward_pass.moved
        if follower is not None and first.shape[:1] == (1,):
            known = follower.knows(spec, first)
        if not known:
            outputs = [self._spread(use, output, inputs) for output in outputs]
        if follower is not None:
            try:
                use.units = follower.units_of(spec, inputs, outputs[0], use.batch_dim)
                self._check_order(use, outputs, inputs)
            except NobodysRowsError as error:  # as DoRA runs an adapter, for its weight
                use.refusal = str(error)
        elif recomputed:
            use.units = self._units_before(spec)
        elif use.forward_pass.batch == 1 and outputs[0].dim():
            use.units = only_unit(outputs[0].shape, use.batch_dim)
        if named is not None:
            with self.aside():
                use.units = named.of_layer(spec, use.units, outputs[0], use.batch_dim)
        return outputs

    def _check_order(self, use: Use, outputs: list[Tensor], inputs: Sequence[Tensor]) -> None:
        """Check that a layer that will run again on some rows leaves them in their places.

        Raises:
            ValueError: It does not.
        """
        trail = self._follower.trail
        if trail is None or not use.layer.rule.needs_parameters:
            return
        dim = use.batch_dim if use.units is None else use.units.in_front()[0]
        others = [*inputs, *outputs[1:]]
        with trail.aside():
            same = same_order(trail.state, others, dim, outputs[0])
        if not same:
            raise ValueError(
                f"{use.spec} gives rows in another order than it gets them, or has outputs that "
                "differ in it, so it cannot run on one sample's rows for that sample's gradient: "
                "move rows outside of the layer, or freeze it"
            )

    def place_compiled(self, use: Use, output: Tensor, *, recomputed: bool) -> None:
        """Find out whose the rows of a layer's output are, which runs in a compiled graph.

        Raises:
            RuntimeError: A checkpoint runs it again, and it was used on different rows.
        """
        spec, one = use.spec, use.forward_pass
        by_token = one.named is not None and one.named.by_token
        if recomputed:
            use.units = self._units_again(spec, one)
        elif self._follows and not by_token:
            use.units = self._follower.units_of(spec, [], output, use.batch_dim)
            one.in_graphs.setdefault(spec.name, []).append(use.units)
        if one.named is not None:
            with self.aside():
                use.units = one.named.of_layer(spec, use.units, output, use.batch_dim)

    @staticmethod
    def _units_again(spec: LayerSpec, one: ForwardPass) -> Units | None:
        """The rows of a layer in a compiled graph that a checkpoint runs again, in this call.

        Raises:
            RuntimeError: They differ between the uses of the layer, so that it is not known which.
        """
        found = one.in_graphs.get(spec.name, [])
        if not same_uses({spec.name: found[1:]}, {spec.name: found[:-1]}):
            raise RuntimeError(
                f"{spec} is computed again by an activation checkpoint, in a compiled graph, and "
                "was used several times, on rows that are not the same samples, so whose they are "
                "is not known: leave that part of the model uncompiled, or out of checkpoints"
            )
        return found[0] if found else None

    def sharing(self, use: Use, outputs: Sequence[Tensor]) -> Scope | None:
        """The forward pass, if it is known that all samples share a layer's output.

        See :mod:`opacus.core.record.shared`.
        """
        named = use.forward_pass.named
        if not self._follows or len(outputs) > 1 or (named is not None and named.by_token):
            return None
        scope = self._follower.sharing(outputs[0], use.batch_dim)
        if scope is not None:
            scope.shared.add((use.spec.name, outputs[0].shape))
            self._shared = scope
        return scope

    def shared_again(self, spec: LayerSpec, output: Tensor) -> Scope | None:
        """The latest forward pass, if all samples shared there what a layer gives again."""
        scope = self._shared
        return scope if scope is not None and (spec.name, output.shape) in scope.shared else None

    def same_rows(self, given: Tensor, output: Tensor) -> None:
        """Row i of a layer's output comes from row i of its input, which nothing else shows."""
        if self._follows and self._follower.trail is not None:
            self._follower.trail.same_rows(given, output)

    def aside(self) -> AbstractContextManager[None]:
        """Operations in it are not the model's."""
        return self._follower.aside()

    @property
    def scope(self) -> Trail | None:
        """The forward pass, if it is followed."""
        return self._follower.trail if self._follows else None

    def _spread(self, use: Use, output: Tensor, inputs: Sequence[Tensor]) -> Tensor:
        """Give each sample its own copy of an output computed once for all of them.

        A table indexed by positions of shape ``[1, T]`` is added to every sample by
        broadcasting, which would sum the samples' gradients before the tap.
        """
        batch = use.forward_pass.batch
        if batch is None or batch == 1 or output.dim() < 2 or output.shape[0] != 1:
            return output
        if use.batch_dim == 1 or any(t.dim() and t.shape[0] != 1 for t in inputs):
            return output
        use.repeated = True
        self.repeats.repeated(use.spec)
        return output.expand(batch, *output.shape[1:])

    def note_hidden(self, layer: Layer, output: Any, batch_dim: int) -> None:
        """A layer ran without gradients: a reentrant checkpoint may run it again."""
        first = next((t for t in tree_leaves(output) if differentiable(t)), None)
        spec = layer.trainable_now()
        if not self._follows or first is None or not spec.params:
            return
        try:
            units: Units | str | None = self._follower.units_of(spec, [], first, batch_dim)
        except ValueError as error:  # if nothing computes it again, no matter
            units = str(error)
        self._hidden.setdefault(spec.name, []).append(units)
        self.asked = True

    @property
    def moved_hidden(self) -> bool:
        """Whether a layer ran without gradients in the latest call, on rows that are no samples."""
        return any(units is not None for uses in self._hidden.values() for units in uses)

    def _units_before(self, spec: LayerSpec) -> Units | None:
        """The units of a layer that is computed again, in a pass that was hidden.

        Raises:
            ValueError: They were not known then.
            RuntimeError: They differ between the uses of the layer, so that it is not known which.
        """
        found = self._hidden.get(spec.name, [])
        unknown = next((units for units in found if isinstance(units, str)), None)
        if unknown is not None:
            raise ValueError(unknown)
        if len(found) > 1 and any(units is not None for units in found):
            raise RuntimeError(
                f"{spec} is used several times in reentrant checkpoints, on rows that are not the "
                "samples, so whose they are is not known: use checkpoint(..., use_reentrant=False)"
            )
        return found[0] if found else None  # type: ignore[return-value]

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_follows": False, "_hidden": {}, "asked": False, "_shared": None}
