"""What a Trainer's checkpoint folder holds beside Trainer's own files: ``privacy.pt``.

The accountant's history, the number of the next step's noise and the name of its key: nothing of
it is secret, so the folder may be pushed to the hub. A resumed run draws new noise and new
examples, which the accountant allows, and never the noise of a step that was taken.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as dcp
from torch import Tensor, nn

from opacus.checkpoints.noise_state import check_noise, noise_entries, restore_noise
from opacus.checkpoints.one_file import (
    check_plan,
    load_optimizer,
    optimizer_state,
    privacy_parameters,
    to_cpu,
    warn_of_changes,
)
from opacus.optimizers import DPOptimizer
from opacus.privacy_engine import PrivacyEngine

FILE = "privacy.pt"
TRAINABLE = "trainable.pt"  # of a sharded model with adapters
_OPTIMIZER = "optimizer.pt"


def save_privacy(
    folder: str, engine: PrivacyEngine, optimizer: DPOptimizer, delta: float, step: int
) -> None:
    """Write ``privacy.pt``; call it in one process, the one of rank 0."""
    state = {
        "accountant": engine.accountant.state_dict(),
        "mechanism": privacy_parameters(optimizer),
        "delta": delta,
        "step": step,
        **noise_entries(optimizer),
    }
    torch.save(state, Path(folder) / FILE)


def read_privacy(folder: str) -> dict[str, Any]:
    """What :func:`save_privacy` wrote.

    Raises:
        ValueError: Folder or file are missing, or it is of another step than Trainer's own state.
    """
    path = Path(folder) / FILE
    if not path.parent.is_dir():
        raise ValueError(f"resume_from_checkpoint={str(folder)!r}: there is no such folder")
    if not path.is_file():
        raise ValueError(
            f"{folder} has no {FILE}, so what its model has spent is not known: it was saved "
            "with save_only_model=True, or by a Trainer that is not private. Load the model with "
            "from_pretrained if its data were other ones"
        )
    state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    trainer = Path(folder) / "trainer_state.json"
    if trainer.is_file():
        steps = json.loads(trainer.read_text(encoding="utf-8"))["global_step"]
        if steps != state["step"]:
            raise ValueError(
                f"{folder} is inconsistent: {FILE} is of step {state['step']}, trainer_state.json "
                f"of step {steps}. Resume from another checkpoint"
            )
    return state


def load_privacy(state: Mapping[str, Any], engine: PrivacyEngine, optimizer: DPOptimizer) -> None:
    """Go on where a checkpoint was saved; call it in all processes."""
    taken = len(engine.accountant)
    check_plan(optimizer, state["mechanism"])
    check_noise(optimizer, state, steps=state["step"])
    engine.accountant.load_state_dict(state["accountant"])
    optimizer.reset_accumulation()
    restore_noise(optimizer, state, steps=len(engine.accountant), taken=taken)
    warn_of_changes(optimizer, state["mechanism"])


def epsilon_after(
    engine: PrivacyEngine, steps: int, *, sigma: float, rate: float, delta: float
) -> float:
    """Epsilon once ``steps`` more steps have been taken."""
    book = type(engine.accountant)()
    book.load_state_dict(engine.accountant.state_dict())
    if steps > 0:
        book.history = [*book.history, (sigma, rate, steps)]
    return float(book.get_epsilon(delta=delta))


def enough_noise(
    epsilon_at: Callable[[float], float], target: float, planned: float
) -> float | None:
    """The noise multiplier from ``planned`` to twice that which ends within a target.

    Args:
        epsilon_at: Of all steps, of a noise multiplier of those that are left.
        target: Largest epsilon.
        planned: Noise multiplier that is not enough.

    Returns:
        ``None`` if twice the planned one is not enough either.
    """
    low, high = planned, 2 * planned
    if epsilon_at(high) > target:
        return None
    while high - low > 1e-3 * planned:
        middle = (low + high) / 2
        low, high = (low, middle) if epsilon_at(middle) <= target else (middle, high)
    return high


# --- sharded models: whole tensors, which load on any number of processes ---


def whole_weights(model: nn.Module) -> dict[str, Tensor]:
    """All weights, unsharded, on the CPU; a collective call."""
    options = dcp.StateDictOptions(full_state_dict=True)
    return to_cpu(dcp.get_model_state_dict(model, options=options))  # type: ignore[no-any-return]


def trainable_weights(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those of ``weights`` that are trained."""
    names = {name for name, p in model.named_parameters() if p.requires_grad}
    return {name: tensor for name, tensor in weights.items() if name in names}


def load_weights(model: nn.Module, folder: str) -> None:
    """Load a folder that Trainer has saved into a sharded model; a collective call.

    Raises:
        ValueError: There are no weights in it.
    """
    options = dcp.StateDictOptions(full_state_dict=True, strict=False)
    dcp.set_model_state_dict(model, read_weights(folder), options=options)


def read_weights(folder: str) -> dict[str, Tensor]:
    """Weights of a saved model, or the trained ones of a model with adapters."""
    from safetensors.torch import load_file

    path = Path(folder)
    if (path / TRAINABLE).is_file():
        return torch.load(path / TRAINABLE, map_location="cpu", weights_only=True)  # type: ignore
    index = path / "model.safetensors.index.json"
    if index.is_file():
        files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    else:
        files = {"model.safetensors"}
    if not all((path / file).is_file() for file in files):
        raise ValueError(f"{folder} holds no weights of a model: {sorted(files)} not found")
    return {k: v for file in sorted(files) for k, v in load_file(str(path / file)).items()}


def whole_optimizer(model: Any, optimizer: DPOptimizer) -> dict[str, Any]:
    """The optimizer's state, unsharded; a collective call."""
    return optimizer_state(model, optimizer)


def load_whole_optimizer(model: Any, optimizer: DPOptimizer, folder: str) -> None:
    """Load what :func:`whole_optimizer` gave; a collective call."""
    state = torch.load(Path(folder) / _OPTIMIZER, map_location="cpu", weights_only=True)
    load_optimizer(model, optimizer, state)
