"""The sharded tensors of a checkpoint: model and optimizer, each rank its own shards."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from opacus.checkpoints.folder import rank_and_size
from opacus.optimizers.joint import forget_state


def save_tensors(path: Path, module: nn.Module, optimizer: Optimizer) -> None:
    """Write model and optimizer; a collective call."""
    with _quiet():
        dcp.save(  # type: ignore[attr-defined]
            _tensors(module, optimizer, with_optimizer=bool(optimizer.state)),
            storage_writer=dcp.FileSystemWriter(path),  # type: ignore[attr-defined]
            no_dist=rank_and_size()[1] == 1,
        )


def load_tensors(
    path: Path, module: nn.Module, optimizer: Optimizer, *, has_optimizer: bool
) -> None:
    """Read model and optimizer; a collective call.

    Args:
        path: The checkpoint.
        module: The model that :func:`check_model` has found to be the one that was saved.
        optimizer: The wrapped optimizer.
        has_optimizer: Whether the checkpoint has its state; else it has none afterwards.
    """
    if not has_optimizer:
        forget_state(optimizer)
    tensors = _tensors(module, optimizer, with_optimizer=has_optimizer)
    with _quiet():
        dcp.load(  # type: ignore[attr-defined]
            tensors,
            storage_reader=dcp.FileSystemReader(path),  # type: ignore[attr-defined]
            no_dist=rank_and_size()[1] == 1,
        )
    set_model_state_dict(module, tensors["model"])
    if has_optimizer:
        set_optimizer_state_dict(module, optimizer, optim_state_dict=tensors["optimizer"])


def _tensors(module: nn.Module, optimizer: Optimizer, *, with_optimizer: bool) -> dict[str, Any]:
    """Sharded state of model and optimizer: names to tensors, the live ones."""
    tensors: dict[str, Any] = {"model": get_model_state_dict(module)}
    if with_optimizer:
        tensors["optimizer"] = get_optimizer_state_dict(module, optimizer)
    return tensors


def check_model(path: Path, module: nn.Module) -> None:
    """Refuse a checkpoint of another model."""
    reader: Any = dcp.FileSystemReader(path)  # type: ignore[attr-defined]
    metadata = reader.read_metadata().state_dict_metadata
    saved = {
        name.removeprefix("model."): tuple(about.size)
        for name, about in metadata.items()
        if name.startswith("model.") and hasattr(about, "size")
    }
    tensors = get_model_state_dict(module)
    own = {name: tuple(t.shape) for name, t in tensors.items() if isinstance(t, Tensor)}
    wrong = [
        f"{name} {saved.get(name, 'not saved')} (here {own.get(name, 'not there')})"
        for name in sorted(saved.keys() | own.keys())
        if saved.get(name) != own.get(name)
    ]
    if wrong:
        raise ValueError(
            f"it is a checkpoint of another model; {len(wrong)} entries differ: "
            f"{', '.join(wrong[:5])}. Nothing was loaded"
        )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence DCP's warning about a single process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is")
        yield
