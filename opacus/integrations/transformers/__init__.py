"""Private training with Hugging Face's Trainer and TRL.

``DPTrainer`` is a ``Trainer``, ``DPSFTTrainer`` and ``DPDPOTrainer`` are TRL's, with one more
argument, ``privacy=DPArguments(...)``. Another subclass of them becomes private by
``class Mine(DPTrainerMixin, Theirs)``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from opacus.integrations.transformers.arguments import DPArguments

if TYPE_CHECKING:
    from opacus.integrations.transformers.mixin import DPTrainerMixin
    from opacus.integrations.transformers.trainer import DPTrainer
    from opacus.integrations.transformers.trl_dpo import DPDPOTrainer
    from opacus.integrations.transformers.trl_sft import DPSFTTrainer

__all__ = ["DPArguments", "DPDPOTrainer", "DPSFTTrainer", "DPTrainer", "DPTrainerMixin"]

# Where each class is, and what has to be installed for it: the module, and our extra.
_HOMES = {
    "DPTrainerMixin": ("mixin", "transformers", "hf"),
    "DPTrainer": ("trainer", "transformers", "hf"),
    "DPSFTTrainer": ("trl_sft", "trl", "trl"),
    "DPDPOTrainer": ("trl_dpo", "trl", "trl"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    home, needed, extra = _HOMES[name]
    try:
        importlib.import_module(needed)
    except ImportError as error:
        raise ImportError(
            f"{name} needs {needed}, which cannot be imported ({error}): "
            f"pip install 'opacus[{extra}]'"
        ) from error
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)
