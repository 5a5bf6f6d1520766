"""Which module reads a parameter: the one whose forward runs with it.

A container without a forward (``ParameterList``, ``ParameterDict``, a bare ``Module``) computes
nothing, so its parameters are read by the module that holds it, as are those of which
``torch.nn.utils.parametrize`` makes that module's weight. If a module reads them elsewhere after
all, autograd delivers their gradient past the taps, and the step is refused.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

# Elements of buffers that are copied before each run of a layer that has to run again.
MOST_ELEMENTS = 1 << 16


def runs(module: nn.Module) -> bool:
    """Whether a module has a forward of its own."""
    return "forward" in vars(module) or type(module).forward is not nn.Module.forward


def held_for(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The parts of a module that hold parameters which its own forward reads.

    Yields:
        Name of the part in the module, and the part.
    """
    for name, child in module._modules.items():
        if child is None:
            continue
        if isinstance(child, ParametrizationList):
            inner: Iterator[tuple[str, nn.Module]] = iter(child.named_modules())
        elif not runs(child):
            inner = _with_held(child)
        else:
            continue
        for path, part in inner:
            yield (f"{name}.{path}" if path else name), part


def buffered(module: nn.Module) -> list[tuple[str, nn.Module]]:
    """The module and its held parts that have small buffers, which a forward pass may change.

    Returns:
        Prefix of the buffers' names in the module, and the part.
    """
    parts = [("", module), *((f"{path}.", part) for path, part in held_for(module))]
    return [
        (prefix, part)
        for prefix, part in parts
        if any(b is not None and b.is_floating_point() for b in part._buffers.values())
        and sum(b.numel() for b in part._buffers.values() if b is not None) <= MOST_ELEMENTS
    ]


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
