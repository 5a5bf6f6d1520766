"""Ranks that build the same thing agree on it first, and fail together if they do not."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import nn


@contextmanager
def together(active: bool, facts: Mapping[str, Any]) -> Iterator[None]:
    """Run local checks; then every rank fails if one did, or if the ranks' facts differ.

    Without this a rank that refuses an argument leaves the others waiting in their first
    collective. The body must not communicate.

    Args:
        active: Whether to ask the other ranks, all of the default process group; the same
            on all of them. One all-gather of short strings.
        facts: What must be equal on all ranks: what it is called in an error, and its value.

    Raises:
        ValueError: Facts differ; the message names them and the ranks' values.
        RuntimeError: Another rank's checks failed; its own error is raised there.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    if active:
        try:
            _compare(error, {name: str(value) for name, value in facts.items()})
        except (ValueError, RuntimeError):
            if error is None:
                raise
    if error is not None:
        raise error


def _compare(error: Exception | None, facts: Mapping[str, str]) -> None:
    refusal = None if error is None else f"{type(error).__name__}: {error}"
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, (refusal, dict(facts)))
    refusals = [f"rank {rank}: {said}" for rank, (said, _) in enumerate(every) if said]
    if refusals:
        raise RuntimeError("make_private was refused on another rank. " + "; ".join(refusals[:4]))
    differing = {
        name: [known.get(name) for _, known in every]
        for name in facts
        if len({known.get(name) for _, known in every}) > 1
    }
    if differing:
        values = "; ".join(f"{name} (by rank): {said}" for name, said in differing.items())
        raise ValueError(
            f"ranks must agree on the model and the privacy parameters, but they differ in {values}"
        )


def describe(model: nn.Module) -> str:
    """A short text that differs where the parameters of two models do, values apart."""
    lines = [
        f"{name} {tuple(p.shape)} {p.dtype} {p.requires_grad} {getattr(p, 'placements', None)}"
        for name, p in model.named_parameters()
    ]
    digest = hashlib.sha256("\n".join(lines).encode()).hexdigest()[:12]
    elements = sum(p.numel() for p in model.parameters())
    return f"{len(lines)} parameters with {elements} elements, digest {digest}"
