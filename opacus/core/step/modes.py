"""The grad sample modes, in one table. A new axis is a field, never a class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Mode:
    """The meaning of a ``grad_sample_mode`` string.

    Attributes:
        samples: Who forms per-sample quantities: our layer rules (``"rules"``),
            the generic vmap rule everywhere (``"vmap"``), the rules under the name of torch's
            expanded weights (``"expanded_weights"``) or the user (``"user"``).
        strategy: ``"materialise"`` keeps every per-sample gradient for the
            optimizer to clip; ``"two_pass"`` finds the norms in a first backward
            and the clipped sum in a second one; ``"one_pass"`` keeps what the sum
            needs instead.
        kernels: Who computes norms: plain PyTorch (``"reference"``) or whichever is faster,
            that or a Triton kernel (``"flash"``).
        parallelism: ``"any"`` (one process or DDP), ``"fsdp"`` or ``"tp"``.
    """

    samples: Literal["rules", "vmap", "expanded_weights", "user"] = "rules"
    strategy: Literal["materialise", "two_pass", "one_pass"] = "materialise"
    kernels: Literal["reference", "flash"] = "reference"
    parallelism: Literal["any", "fsdp", "tp"] = "any"

    @property
    def needs_criterion(self) -> bool:
        """Whether the criterion is wrapped, so that its loss is one number a sample."""
        return self.strategy != "materialise"


# Stands for one of the others, which depends on the model: see auto.py.
AUTO = "auto"

MODES: dict[str, Mode] = {
    "hooks": Mode(),
    "functorch": Mode(samples="vmap"),
    "ew": Mode(samples="expanded_weights"),
    "no_op": Mode(samples="user"),
    "ghost": Mode(strategy="two_pass"),
    "ghost_bk": Mode(strategy="one_pass"),
    "ghost_fsdp": Mode(strategy="two_pass", parallelism="fsdp"),
    "ghost_fsdp_bk": Mode(strategy="one_pass", parallelism="fsdp"),
    "flash": Mode(strategy="two_pass", kernels="flash"),
    "flash_bk": Mode(strategy="one_pass", kernels="flash"),
    "flash_fsdp": Mode(strategy="two_pass", kernels="flash", parallelism="fsdp"),
    "flash_fsdp_bk": Mode(strategy="one_pass", kernels="flash", parallelism="fsdp"),
    "ghost_tp": Mode(strategy="two_pass", parallelism="tp"),
}


def mode_of(grad_sample_mode: str) -> Mode:
    """The mode of this name.

    Raises:
        ValueError: There is no such mode; the message lists those there are. Or it is
            ``"auto"``, which only a model can resolve.
    """
    if grad_sample_mode == AUTO:
        raise ValueError(
            "grad_sample_mode 'auto' depends on the model, which is not known here: use "
            "make_private or wrap_model, or pass what "
            "opacus.core.step.auto.chosen_for(model).mode names"
        )
    try:
        return MODES[grad_sample_mode]
    except (KeyError, TypeError):
        raise ValueError(
            f"Unexpected grad_sample_mode: {grad_sample_mode!r}. "
            f"Allowed values: {', '.join(MODES)}, {AUTO}."
        ) from None
