"""A driver for Triton that compiles for compute capability 9.0 and only notes launches."""

from __future__ import annotations

import itertools
from typing import Any

import torch
from triton.backends.compiler import GPUTarget

# Launcher, grid, handle of the kernel, hooks and arguments of each launch.
launches: list[tuple[Any, tuple[int, ...], Any, tuple[Any, Any], tuple[Any, ...]]] = []
_handles = itertools.count(1)


class Launcher:
    """Stands for what starts a compiled kernel."""

    def __init__(self, *arguments: Any) -> None:
        pass

    def __call__(
        self, x: int, y: int, z: int, stream: Any, function: Any, metadata: Any, launch: Any,
        enter: Any, leave: Any, *arguments: Any,
    ) -> None:  # fmt: skip
        for hook in (enter, leave):
            if hook is not None:
                hook(launch)
        launches.append((self, (x, y, z), function, (enter, leave), arguments))


class NoDevice:
    """As much of a driver as compiling and launching ask for."""

    launcher_cls = Launcher
    device = torch.device("cpu")
    number = 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, device: int = 0) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return self.device

    def map_python_to_cpp_type(self, name: str) -> str:
        return name

    class utils:
        @staticmethod
        def get_device_properties(device: int) -> dict[str, int]:
            return {"max_shared_mem": 232448, "multiprocessor_count": 132,
                    "max_num_regs": 65536, "warpSize": 32}  # fmt: skip

        @staticmethod
        def load_binary(*arguments: Any) -> tuple[int, ...]:
            return (0, next(_handles), 0, 0, 1024)

        @staticmethod
        def unload_module(*arguments: Any) -> None:
            pass
