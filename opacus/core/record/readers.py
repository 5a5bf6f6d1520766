"""Which module reads a parameter: the one whose forward runs with it.

A container without a forward (``ParameterList``, ``ParameterDict``, a bare ``Module``) computes
nothing, so its parameters are read by the module that holds it, as are those of which
``torch.nn.utils.parametrize`` makes that module's weight. A module that reads parameters of a part
which has a forward names that part in its attribute ``reads_parameters_of``. If a module reads them
elsewhere after all, their gradient bypasses the taps, and the step is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

# Elements of buffers that are copied before each run of a layer that has to run again.
MOST_ELEMENTS = 1 << 16
# Parts of transformers' state space and linear attention layers, which read their parameters.
_STATE_SPACE = ("conv1d", "dt_proj")
_DEBERTA = ("transformers.models.deberta.", "transformers.models.deberta_v2.")


def _reads(module: nn.Module) -> tuple[str, ...]:
    """Names of parts with a forward whose parameters the module's own forward reads."""
    own: tuple[str, ...] | None = getattr(module, "reads_parameters_of", None)
    if own is not None:
        return tuple(own)
    theirs = type(module).__module__.startswith("transformers.models.")
    return _STATE_SPACE if theirs and "conv1d" in module._modules else ()


def read_once(module: nn.Module) -> tuple[str, ...]:
    """Names of parts of one parameter that the module reads once for all samples, as DeBERTa
    does its table of relative positions."""
    theirs = type(module).__module__.startswith(_DEBERTA)
    return ("rel_embeddings",) if theirs and "rel_embeddings" in module._modules else ()


def runs(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def held_for(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a module that hold parameters which its own forward reads.

    Yields:
        Name of the part in the module, and the part.
    """
    reads = _reads(module)
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, ParametrizationList):
            inner: Iterator[tuple[str, nn.Module]] = iter(child.named_modules())
        elif not runs(child) or name in reads:
            inner = _with_held(child)
        else:
            continue
        for path, part in inner:
            yield (f"{name}.{path}" if path else name), part


def buffered(module: nn.Module) -> tuple[str, ...]:
    """Paths of the module and its held parts with small buffers, which a forward may change."""
    parts = [("", module), *held_for(module)]
    return tuple(path for path, part in parts if _changes(list(part._buffers.values())))


def _changes(buffers: Sequence[Tensor | None]) -> bool:
    known = [b for b in buffers if b is not None]
    return (
        any(b.is_floating_point() for b in known) and sum(b.numel() for b in known) <= MOST_ELEMENTS
    )


def _with_held(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    yield "", module
    yield from held_for(module)


def borrowed(module: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that a module's forward reads from its parts, by dotted name."""
    return {
        f"{path}.{name}": parameter
        for path, part in held_for(module)
        for name, parameter in part._parameters.items()
        if parameter is not None
    }
