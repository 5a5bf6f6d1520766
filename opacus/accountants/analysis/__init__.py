"""The mathematics of the accountants, without any state.

The submodules are loaded when first used: `gdp` and `prv` import scipy.
"""

from __future__ import annotations

import importlib
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    if name in ("gdp", "prv", "rdp"):
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
