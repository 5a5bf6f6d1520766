"""Batches of one sample, whose per-sample gradient is the gradient that autograd forms.

Note [Parameters through one node]
    While the model runs on a single sample, its layers are not tapped. All trainable
    parameters are replaced by aliases that come out of one autograd node, so that its
    backward receives the whole gradient of the sample, from whichever place in the forward
    pass it comes: tied, reused, or used outside its layer. The parameters themselves take
    no part: nothing reaches their ``grad``, in whichever way backward is started.

    What is left of the cost of private training is the norm, the factor and the noise.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor, nn

from opacus.core.platform.switches import switched_on
from opacus.core.platform.torch_internals import TakenOff, put_back, take_off
from opacus.core.record.layers import Layer, is_alias
from opacus.core.record.passes import ForwardPass
from opacus.core.record.record import ANCHOR, Sink, Use

VARIABLE = "OPACUS_LONE_SAMPLE"

PassSink = Callable[[ForwardPass, dict[str, Tensor]], None]
# An alias in place of a parameter: a module's parameters, the name, the parameter, its alias.
Place = tuple[dict[str, nn.Parameter | None], str, nn.Parameter, Tensor]
# A layer's parameter: the layer, the name there, the name in the model.
Name = tuple[Layer, str, str]


def lone_sample_from_environment() -> bool:
    """Whether ``OPACUS_LONE_SAMPLE`` lets batches of one sample run without taps (default: yes).

    Raises:
        ValueError: The variable is neither ``0`` nor ``1``.
    """
    return switched_on(VARIABLE, default=True)


class LoneSample:
    """Runs the model without taps where its batch is one sample.

    Guarantee: the gradient handed on is that of one loss with respect to all trainable
    parameters, so clipping it bounds the sample's whole contribution. It starts only after a
    step with taps has shown that the model's inputs tell the number of samples; a loss
    of another number of samples is refused before anything is summed, and so are more rows in the
    layers that ran first and last in that step, of those with one row for each sample: losses of
    several samples may look like those of one sample's positions.

    Args:
        layers: The tapped layers: all that own trainable parameters.
        sink: Called in the backward pass with a forward pass and its gradients
            ``[*shape]`` by parameter name, without gradient tracking.
        handles: Of each layer's hooks, the one before and the one after it has run, which
            have nothing to do while no layer is tapped.

    Attributes:
        running: Whether aliases may be in the places of parameters.
        ruled_out: Why batches of one sample are tapped like others; ``None`` if they are not.
        alive: Forward passes whose graphs are not gone yet.
        again_in_graphs: Whether compiled parts that a checkpoint runs again find the aliases, too:
            with the parameters they would run another graph, which saves other tensors.
    """

    again_in_graphs: ClassVar[bool] = False

    def __init__(
        self, layers: Sequence[Layer], sink: PassSink, handles: Sequence[tuple[Any, Any]]
    ) -> None:
        self._layers = layers
        self._handles = handles
        self._sink = sink
        self._off_duty: list[tuple[Layer, Any]] = []  # those that are taken off
        self.running = False
        self._proven = False
        self._moved: frozenset[str] = frozenset()  # layers whose rows are not samples
        self.ruled_out: str | None = None
        self._replaced: list[Place] = []
        self._off: TakenOff = []
        self.alive: weakref.WeakSet[PassUse] = weakref.WeakSet()

    @property
    def ready(self) -> bool:
        """Whether the next batch of one sample runs without taps."""
        return self._proven and self.ruled_out is None

    def rule_out(self, reason: str) -> None:
        """From now on tap batches of one sample like others."""
        self.ruled_out = self.ruled_out or reason

    def learn(self, passes: Collection[ForwardPass], samples: int) -> None:
        """A step of ``samples`` losses with taps has gone well, on these forward passes."""
        named = any(one.named is not None for one in passes)
        if self._proven or self.ruled_out or not samples or not passes or named:
            return
        if {one.batch for one in passes} != {samples}:
            self.rule_out("the model's inputs do not tell the number of samples")
            return
        if any(rows != samples for one in passes for rows in one.rows.values()):
            self.rule_out("layers have several rows for a sample")
            return
        moved = set[str]().union(*(one.moved for one in passes))
        used = [n for one in passes for n in one.generation.uses if n not in moved]
        if not used:
            self.rule_out("no layer has one row for each sample")
            return
        self._proven, self._moved = True, frozenset(moved)
        watched = {used[0], used[-1]}
        for layer, (before, after) in zip(self._layers, self._handles, strict=True):
            off = [before] if layer.spec.name in watched else [before, after]
            self._off_duty += [(layer, handle) for handle in off]

    def several_rows(self, passes: Collection[ForwardPass]) -> tuple[str, int] | None:
        """A layer with several rows in passes on one sample, where rows are samples."""
        seen = (found for one in passes for found in one.rows.items())
        return next(((name, n) for name, n in seen if n > 1 and name not in self._moved), None)

    def all_lone(self, waiting: Collection[Any]) -> bool:
        """Whether all forward passes that wait for their backward run without taps."""
        return bool(self.alive) and all(use in self.alive for use in waiting)

    def begin(self, forward_pass: ForwardPass) -> bool:
        """The model's forward begins: put the aliases in the places of the parameters.

        Returns:
            Whether it was done: not inside another private model that has done so.
        """
        self.end()
        self.running = True
        found = trainable(names_of(self._layers))
        ours = any(one.owner for one in found) and not any(is_alias(one.parameter) for one in found)
        if not ours:
            return False
        self._replaced = put_aliases(found, self._waiting(PassUse(forward_pass, self._sink)))
        self._off = take_off(handle for _, handle in self._off_duty)
        return True

    def _waiting(self, use: PassUse) -> PassUse:
        """The use, which waits for its backward pass from now on."""
        use.forward_pass.generation.waiting.add(use)
        self.alive.add(use)
        return use

    def end(self) -> None:
        """The model's forward has ended or failed: the parameters are back in their places.

        What the forward has assigned to ``weight.data``, or put in a parameter's place, stays.
        """
        if self._off:
            put_back(self._off)
        while self._replaced:
            own, local, parameter, alias = self._replaced.pop()
            if own.get(local) is not alias:
                continue
            own[local] = parameter
            if alias.data_ptr() != parameter.data_ptr() or alias.shape != parameter.shape:
                parameter.data = alias.data
        self.running = False

    def ran_for(self, losses: Tensor, sink: Sink) -> bool:
        """Whether the first use of the model that is found in the graph of ``losses`` was untapped.

        If there are others too, the losses are refused when their gradients have come.
        """
        nodes: list[Any] = [losses.grad_fn] if self.alive else []
        seen: set[Any] = set()
        while nodes:
            node = nodes.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            use = getattr(node, "use", None)
            if isinstance(use, PassUse) and use in self.alive:
                return True
            if isinstance(use, Use) and use.sink is sink:
                return False
            nodes += [before for before, _ in node.next_functions]
        return False

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_replaced": [], "_off": [], "running": False, "alive": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, alive=weakref.WeakSet())


class PassUse:
    """One forward pass on one sample, until its graph is gone."""

    __slots__ = ("__weakref__", "_sink", "forward_pass")

    def __init__(self, forward_pass: ForwardPass, sink: PassSink) -> None:
        self.forward_pass = forward_pass
        self._sink = weakref.WeakMethod(sink)

    def deliver(self, grads: dict[str, Tensor]) -> None:
        """Hand on the gradients of one backward pass, by parameter name."""
        sink = self._sink()
        if sink is None:
            raise RuntimeError("the private model was deleted before backward()")
        self.forward_pass.generation.waiting.discard(self)
        self.forward_pass.reach()
        with torch.no_grad():
            plain = {n: g.detach() if g.requires_grad else g for n, g in grads.items()}
            sink(self.forward_pass, plain)


class Trainable(NamedTuple):
    """A trainable parameter where a layer has it.

    Attributes:
        own: The parameters of the module.
        local: Its name among them.
        owner: Its name in the model; ``None`` if no optimizer holds it.
    """

    own: dict[str, nn.Parameter | None]
    local: str
    owner: str | None
    parameter: nn.Parameter


def names_of(layers: Iterable[Layer]) -> Iterator[Name]:
    """Every parameter of the layers."""
    return ((layer, name, owner) for layer in layers for name, owner in layer.owners.items())


def trainable(names: Iterable[Name]) -> list[Trainable]:
    """Those of these parameters that are there and trainable now."""
    found = []
    for layer, name, owner in names:
        own, local = layer.place(name)
        parameter = own.get(local)
        if parameter is not None and parameter.requires_grad:
            held = None if name in layer.unheld else owner
            found.append(Trainable(own, local, held, parameter))
    return found


def put_aliases(found: Sequence[Trainable], use: PassUse) -> list[Place]:
    """Replace parameters by aliases through one node, whose gradients go to ``use``.

    One that no optimizer holds is replaced by a detached one.
    """
    parameters = {one.owner: one.parameter for one in found if one.owner is not None}
    names = tuple(parameters)
    nodes = _Aliases.apply(ANCHOR, use, names, list(parameters.values())) if names else ()
    aliases = dict(zip(names, nodes, strict=True))
    places: list[Place] = []
    for own, local, owner, parameter in found:
        alias = parameter.detach() if owner is None else aliases[owner]
        own[local] = alias  # type: ignore[assignment]
        places.append((own, local, parameter, alias))
    return places


def put_originals(places: Iterable[Place]) -> None:
    """Parameters are back where their aliases still are."""
    for own, local, parameter, alias in places:
        if own.get(local) is alias:
            own[local] = parameter


class _Aliases(torch.autograd.Function):
    """Aliases of the parameters; see Note [Parameters through one node]."""

    @staticmethod
    def forward(
        ctx: Any,
        anchor: Tensor,
        use: PassUse,
        names: tuple[str, ...],
        parameters: list[nn.Parameter],
    ) -> tuple[Tensor, ...]:
        ctx.use, ctx.names = use, names
        ctx.stands_for_parameters = True  # see is_alias
        ctx.set_materialize_grads(False)
        return tuple(parameter.detach() for parameter in parameters)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        pairs = zip(ctx.names, grads, strict=True)  # what took no part has none
        ctx.use.deliver({name: grad for name, grad in pairs if grad is not None})
        return None, None, None, None
