"""The layers of a model, with the rule of each and the owners of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from torch import Tensor, nn

from opacus.core.platform.attributes import Attributes
from opacus.core.platform.held import HeldModule
from opacus.core.record.readers import borrowed, held_for, read_once, runs
from opacus.core.rules import RULES, LayerRule, rule_for
from opacus.core.rules.by_unit import READ, UNIT_GRADIENTS, given
from opacus.core.rules.embedding import refuse_renormalised
from opacus.core.rules.generic import GenericRule
from opacus.core.rules.spec import LayerSpec, make_spec

# Specs of two parts of a layer's parameters.
Split = tuple[LayerSpec, LayerSpec]


@dataclass(eq=False)
class Layer:
    """A module whose parameters, those that its forward reads, get per-sample gradients.

    Names of parameters that it reads from parts of it have dots; see :mod:`.readers`.

    Attributes:
        held: The module, which an output that is kept does not keep.
        owners: Local parameter name -> name of the parameter in the model; the
            same for all layers that share a parameter.
        shared: Whether another layer has one of these parameters too.
        batch_first: Whether this layer has the batch in dimension 0 (else in 1); ``None``
            if it goes by what the model says.
        features: Number of last dimensions of the output that are not samples or time
            steps; ``None`` if unknown.
        unheld: Local names of parameters that the optimizer does not hold, which count as frozen.
    """

    held: HeldModule
    spec: LayerSpec
    rule: LayerRule
    owners: Mapping[str, str]
    shared: bool = False
    batch_first: bool | None = None
    features: int | None = None
    unheld: frozenset[str] = frozenset()
    reader: HeldModule | None = None  # the module that reads its parameter, for ``READ``
    # Those that its latest run has started from, by name, if they are small (power iterations).
    buffers_before: Mapping[str, Tensor] = field(default_factory=dict)
    # Attributes that it has started from, where a rule runs it again.
    attributes_before: Attributes | None = None
    # What `split` has answered.
    splits: dict[tuple[str, ...], Split] = field(default_factory=dict, init=False)
    _parts: dict[tuple[str, ...], LayerSpec] = field(default_factory=dict, init=False)

    @property
    def module(self) -> nn.Module:
        """The module itself."""
        return self.held()

    def by_unit(self, spec: LayerSpec) -> tuple[Layer, LayerSpec]:
        """The layer, and ``spec``, of records that hold the gradients of units themselves."""
        spec = given(spec)
        return replace(self, spec=spec, rule=UNIT_GRADIENTS), spec

    def place(self, name: str) -> tuple[dict[str, nn.Parameter | None], str]:
        """Where a parameter is: the dict that holds it, and its key there."""
        return place_in(self.module, name)

    def parameter(self, name: str) -> nn.Parameter | None:
        """The parameter of this local name, as it is now."""
        parameters, local = self.place(name)
        return parameters.get(local)

    def parameters(self, names: Iterable[str]) -> list[nn.Parameter | None]:
        """:meth:`parameter` of each name."""
        module = self.module
        places = [place_in(module, name) for name in names]
        return [parameters.get(local) for parameters, local in places]

    def split(self, params: tuple[str, ...]) -> Split:
        """The specs of those of ``params`` that are light for the rule, and of the others."""
        light = tuple([name for name in params if name in self.rule.light])
        rest = tuple([name for name in params if name not in self.rule.light])
        self.splits[params] = self.part(light), self.part(rest)
        return self.splits[params]

    def part(self, params: tuple[str, ...]) -> LayerSpec:
        """The spec restricted to some of its parameters."""
        if params not in self._parts:
            self._parts[params] = replace(self.spec, params=params)
        return self._parts[params]

    def trainable_now(self) -> LayerSpec:
        """The spec restricted to the parameters that the optimizer still trains."""
        names = self.trained_names()
        return self.spec if len(names) == len(self.spec.params) else self.part(names)

    def trained_names(self) -> tuple[str, ...]:
        """Local names of the parameters that require gradients and that the optimizer holds."""
        names: list[str] = []
        every = self.spec.params
        for name, parameter in zip(every, self.parameters(every), strict=True):
            if parameter is not None and parameter.requires_grad and name not in self.unheld:
                names.append(name)
        return tuple(names)


def place_in(module: nn.Module, name: str) -> tuple[dict[str, nn.Parameter | None], str]:
    """See :meth:`Layer.place`."""
    path, _, local = name.rpartition(".")
    return (module.get_submodule(path) if path else module)._parameters, local


def is_alias(parameter: Tensor) -> bool:
    """Whether this stands for a parameter while a private model runs on a lone sample."""
    return not parameter.is_leaf and getattr(parameter.grad_fn, "stands_for_parameters", False)


def layers_of(model: nn.Module, choose: Callable[[nn.Module], LayerRule] = rule_for) -> list[Layer]:
    """One :class:`Layer` for each module whose forward reads a trainable parameter of its own.

    Args:
        model: The model; modules that appear twice are listed once.
        choose: Picks the rule of a module.
    """
    owner = {id(p): name for name, p in model.named_parameters()}
    parts = {id(part) for m in model.modules() if runs(m) for _, part in held_for(m)}
    readers = {id(m._modules[n]): m for m in model.modules() for n in read_once(m)}
    layers = []
    for name, module in model.named_modules():
        with _by_name(name, module):
            refuse_renormalised(module)
        if id(module) in parts and module is not model:
            continue
        others = {n: p for n, p in borrowed(module).items() if p.requires_grad}
        own = any(p.requires_grad for p in module.parameters(recurse=False))
        if not own and not others:
            continue
        # Known rules see their own parameters alone.
        reader = readers.get(id(module))
        rule = GenericRule(module) if others else READ if reader is not None else choose(module)
        with _by_name(name, module):
            spec = make_spec(name, module, rule.options(module), others)
        owners = {p: owner[id(others.get(p, module._parameters.get(p)))] for p in spec.params}
        written = (
            RULES.get(spec.kind, rule) if reader is None else rule
        )  # what the layer is, whichever rule it gets
        batch_first = written.batch_leads or _own_batch_first(module, spec)
        features = written.features(spec)
        layer = Layer(
            HeldModule(module), spec, rule, owners, batch_first=batch_first, features=features
        )
        if reader is not None:
            layer.reader = HeldModule(reader)
        layers.append(layer)
    _mark_shared(layers)
    return layers


@contextmanager
def _by_name(name: str, module: nn.Module) -> Iterator[None]:
    """What is wrong with a layer is said with its name."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"layer '{name}' ({type(module).__name__}): {error}") from None


def _own_batch_first(module: nn.Module, spec: LayerSpec) -> bool | None:
    """A layer's own statement whether its batch comes first."""
    own = spec.options.get("batch_first", getattr(module, "batch_first", None))
    return own if isinstance(own, bool) else None


def _mark_shared(layers: list[Layer]) -> None:
    holders: dict[str, set[str]] = {}
    for layer in layers:
        for owner in layer.owners.values():
            holders.setdefault(owner, set()).add(layer.spec.name)
    for layer in layers:
        layer.shared = any(len(holders[owner]) > 1 for owner in layer.owners.values())
