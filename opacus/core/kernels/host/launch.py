"""Launches of Triton kernels that cost the host little more than an operation of PyTorch.

``kernel[grid](...)`` looks at every argument, builds a key of text, reads environment
variables and compares global values, each time. A :class:`Variant` lets Triton do that once for
each kind of arguments and then starts what Triton had compiled for them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import triton  # type: ignore[import-not-found,import-untyped,unused-ignore]
from torch import Tensor, nn
from triton import knobs  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.runtime import driver  # type: ignore[import-not-found,import-untyped,unused-ignore]
from triton.runtime.jit import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    JITFunction,
)
from triton.tools.tensor_descriptor import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
    TensorDescriptor,
)

try:
    from triton.experimental.gluon.nvidia.hopper import (  # type: ignore[import-not-found,import-untyped,unused-ignore]
        TensorDescriptor as GluonDescriptor,
    )
except ImportError:  # a Triton without Gluon
    GluonDescriptor = TensorDescriptor

# Versions whose compiled kernels are known to be started like this; others go through Triton.
FIRST, LAST = (3, 6), (3, 9)
INT32, INT64 = 1 << 31, 1 << 63


VERSION = tuple(int(part) for part in triton.__version__.split(".")[:2])
KNOWN = FIRST <= VERSION <= LAST
# Descriptors' contents that are remembered, by shape and kind.
MOST_DESCRIPTORS = 4096
_contents: dict[tuple[Any, ...], dict[str, Any]] = {}


def describe(kind: Any, tensor: Tensor, block: tuple[int, ...], *layout: Any) -> Any:
    """A tensor descriptor of class ``kind``; its checks are made once for each shape.

    Args:
        kind: Triton's class of descriptors or Gluon's.
        tensor: What the copy engine is to read.
        block: Shape of what it reads at once.
        layout: Of the block in shared memory, for Gluon; must live as long as the program.
    """
    key = (kind, tensor.shape, tensor.stride(), tensor.dtype, block, *map(id, layout))
    contents = _contents.get(key)
    if contents is None or tensor.data_ptr() % 16:
        shape, strides = list(tensor.shape), list(tensor.stride())
        made = kind(tensor, shape, strides, list(block), *layout)  # raises what Triton refuses
        if KNOWN:
            if len(_contents) >= MOST_DESCRIPTORS:
                _contents.clear()
            _contents[key] = {name: value for name, value in vars(made).items() if name != "base"}
        return made
    made = kind.__new__(kind)
    vars(made).update(contents, base=tensor)
    return made


class _Compiled(NamedTuple):
    """What Triton compiled for one kind of arguments.

    Attributes:
        run: Its launcher.
        function: Handle of the kernel on the device.
        metadata: What the launcher reads.
        constants: Values of the compile-time arguments, in the kernel's order.
        kept: Objects that must live as long: the kernel, and objects that a key identifies by
            address.
    """

    run: Callable[..., None]
    function: Any
    metadata: Any
    constants: tuple[Any, ...]
    kept: tuple[Any, ...]


class Variant:
    """A kernel with its compile-time constants and options: ``variant(grid, *arguments)``.

    The first launch for each kind of arguments goes through Triton, as ``kernel[grid]``; those
    after it start the same compiled kernel. A kind is all that Triton compiles for, and a little
    more: device; dtype of a tensor, and whether it starts at a multiple of 16 bytes; whether an
    int is 1, a multiple of 16, or wider than 32 bits; dtype, block, layout and padding of a
    descriptor. Whatever is none of these goes through Triton each time: other types of
    arguments, the interpreter, other versions or cards, and kernels with launch hooks.

    Args:
        kernel: A function with ``triton.jit`` or ``gluon.jit``.
        constants: Its arguments that are constants, which come after all others, and options
            such as ``num_warps``.
    """

    def __init__(self, kernel: Any, **constants: Any) -> None:
        self.kernel = kernel
        self.constants = constants
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}
        self._direct = _starts_directly(kernel)

    def __call__(self, grid: tuple[int, ...], *arguments: Any) -> None:
        """Launch on the arguments' device, on its current stream.

        Args:
            grid: Programs, in up to three dimensions.
            arguments: All arguments that are not constants, in order; the tensors on one device.
        """
        place = _device_of(arguments)
        if place >= 0 and place != torch.cuda.current_device():
            with torch.cuda.device(place):  # on another one it would not wait for what they are of
                self(grid, *arguments)
            return
        if not self._direct or _is_watched(self.kernel):
            self.kernel[grid](*arguments, **self.constants)
            return
        active = driver.active
        device = active.get_current_device()
        kind: list[Any] = [active, device]
        values = _examine(arguments, kind)
        if values is None:
            self.kernel[grid](*arguments, **self.constants)
            return
        key = tuple(kind)
        known = self._compiled.get(key)
        if known is None:
            compiled = self.kernel[grid](*arguments, **self.constants)
            self._remember(key, compiled, arguments)
            return
        x, y, z = grid if len(grid) == 3 else (*grid, 1, 1)[:3]
        known.run(
            x, y, z, active.get_current_stream(device), known.function, known.metadata,
            None, None, None, *values, *known.constants,
        )  # fmt: skip

    def _remember(self, key: tuple[Any, ...], compiled: Any, arguments: tuple[Any, ...]) -> None:
        """Keep what Triton has launched, if its type and attributes are as expected."""
        names = self.kernel.arg_names[len(arguments) :]
        tensors = [a if isinstance(a, Tensor) else a.base for a in arguments if _points(a)]
        expected = driver.active.get_active_torch_device()
        if (
            not set(names) <= self.constants.keys()
            or any(t.device != expected for t in tensors)
            or not all(hasattr(compiled, n) for n in ("run", "function", "packed_metadata"))
        ):
            return
        constants = tuple(self.constants[name] for name in names)
        layouts = tuple(getattr(a, "layout", None) for a in arguments)
        run, function, metadata = compiled.run, compiled.function, compiled.packed_metadata
        self._compiled[key] = _Compiled(run, function, metadata, constants, (compiled, layouts))


def _device_of(arguments: tuple[Any, ...]) -> int:
    """Index of the GPU that the first tensor is on; -1 if it is on none."""
    for value in arguments:
        if _points(value):
            return (value if isinstance(value, Tensor) else value.base).get_device()
    return -1


def _examine(arguments: tuple[Any, ...], kind: list[Any]) -> list[Any] | None:
    """Add to ``kind`` what a kernel is compiled for; the arguments as a launcher takes them.

    ``None`` where an argument is of an unknown type.
    """
    values: list[Any] = []
    for value in arguments:
        own = type(value)
        if own is int:
            if -INT32 <= value < INT32:
                kind.append(1 if value == 1 else 2 if value & 15 == 0 else 3)
            elif -INT64 <= value < INT64:
                kind.append(4 if value & 15 == 0 else 5)
            else:
                return None
            values.append(value)
        elif own is Tensor or own is nn.Parameter:
            place = value.data_ptr()
            kind += (value.dtype, value.get_device(), place & 15 == 0)
            values.append(place)
        elif own is float:
            kind.append(float)
            values.append(value)
        elif own is TensorDescriptor or own is GluonDescriptor:
            base = value.base
            layout = id(getattr(value, "layout", None))
            block = tuple(value.block_shape)
            kind += (own, base.dtype, base.get_device(), block, layout, value.padding)
            values.append(value)
        else:
            return None
    return values


def _points(argument: Any) -> bool:
    return isinstance(argument, (Tensor, TensorDescriptor, GluonDescriptor))


def _starts_directly(kernel: Any) -> bool:
    """Whether this kernel is compiled for NVIDIA cards by a known version of Triton."""
    return KNOWN and torch.version.hip is None and isinstance(kernel, JITFunction)


def _is_watched(kernel: Any) -> bool:
    """Whether hooks observe launches or change what is compiled."""
    runtime = knobs.runtime
    return bool(
        kernel.pre_run_hooks
        or getattr(runtime.launch_enter_hook, "calls", runtime.launch_enter_hook)
        or getattr(runtime.launch_exit_hook, "calls", runtime.launch_exit_hook)
        or getattr(runtime, "add_stages_inspection_hook", None)
    )
