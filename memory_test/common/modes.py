"""Modes of a run: the two non-private ones, and those that the installed package has."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from memory_test.common.failures import UsageError

NON_PRIVATE = ("no_dp", "no_dp_single")
# Modes that experiments name, in the order of tables and plots.
HARNESS_MODES = (
    *NON_PRIVATE,
    "hooks",
    "ghost",
    "ghost_bk",
    "flash",
    "flash_bk",
    "ghost_fsdp",
    "ghost_fsdp_bk",
    "flash_fsdp",
    "flash_fsdp_bk",
    "auto",
)
# What pip opacus 1.6.0 has, which has no table of modes.
_WITHOUT_TABLE = ("hooks", "functorch", "ghost", "ghost_fsdp")


@dataclass(frozen=True)
class RunMode:
    """How a run trains.

    Attributes:
        name: As given to ``--mode``.
        private: Whether gradients are clipped and noised.
        sharded: Whether the model is sharded by FSDP2 over all processes.
        deferrable: Whether norms may be deferred.
    """

    name: str
    private: bool
    sharded: bool
    deferrable: bool


def takes_all_devices(name: str) -> bool:
    """Whether a run in this mode is spread over all GPUs."""
    return name in ("no_dp", "auto") or "fsdp" in name


def is_deferrable(name: str) -> bool:
    """Whether ``OPACUS_USE_DEFERRED_NORM`` changes what this mode does."""
    return name.startswith(("ghost", "flash", "auto"))


def package_modes() -> dict[str, Any]:
    """The modes of the ``opacus`` that is imported, with what it says about each."""
    try:
        from opacus.core.step import modes
    except ImportError:
        return dict.fromkeys(_WITHOUT_TABLE)
    known: dict[str, Any] = dict(modes.MODES)
    return known | ({modes.AUTO: None} if hasattr(modes, "AUTO") else {})


def available_modes() -> list[str]:
    """Modes of the experiments that can be run with this package, in the order of plots."""
    known = package_modes()
    return [m for m in HARNESS_MODES if m in NON_PRIVATE or m in known]


def resolve_mode(name: str, world_size: int) -> RunMode:
    """The mode of this name, for so many processes.

    Raises:
        UsageError: There is no such mode, it is not in this package, or it needs another
            number of processes.
    """
    known = package_modes()
    if name not in NON_PRIVATE and name not in known:
        raise UsageError(_unknown(name, known))
    parallelism = getattr(known.get(name), "parallelism", "fsdp" if "fsdp" in name else "any")
    if parallelism == "tp":
        raise UsageError(f"--mode {name}: tensor parallelism is not measured here")
    sharded = name == "no_dp" or parallelism == "fsdp" or (name == "auto" and world_size > 1)
    if not sharded and world_size > 1:
        raise UsageError(
            f"--mode {name} runs in one process, but {world_size} were started: leave torchrun "
            "out, or use --nproc_per_node=1"
        )
    return RunMode(name, name not in NON_PRIVATE, sharded, is_deferrable(name))


def _unknown(name: str, known: dict[str, Any]) -> str:
    import opacus

    have = ", ".join(available_modes())
    if name in HARNESS_MODES:
        return (
            f"--mode {name} is not in this opacus ({opacus.__version__}, {opacus.__file__}), "
            f"which has: {have}"
        )
    further = [m for m in known if m not in HARNESS_MODES]
    return f"--mode {name}: no such mode; there are: {have}; and further {', '.join(further)}"
