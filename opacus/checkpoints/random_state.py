"""The random state of a run: kept in a checkpoint, or replaced by new streams.

That of dropout and of shuffled orders; noise and Poisson sampling have keys (core/privacy/key.py).
A run that resumes on as many ranks as before continues its streams. On another number of ranks
they mean something else (a shard has another size, a rank another share of the data), so new ones
are derived from a secret of the run, the step and the number of ranks. They never repeat earlier
draws, and a second attempt to resume derives the same.
"""

from __future__ import annotations

import hashlib
import os
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

State = dict[str, Any]


class Secret:
    """The secret that new streams are derived from. Whoever knows it can recompute them.

    Args:
        text: a saved one; by default it comes from the operating system.
    """

    def __init__(self, text: str | None = None) -> None:
        self.text = os.urandom(32).hex() if text is None else text

    def next(self, step: int, world_size: int) -> Secret:
        """The secret of the run that goes on from `step` on another number of ranks."""
        return Secret(self._digest("next", step, world_size).hex())

    def seed(self, *labels: object) -> int:
        """A number in [0, 2^62), another one for other labels."""
        return int.from_bytes(self._digest("seed", *labels)[:8], "big") >> 2

    def _digest(self, *labels: object) -> bytes:
        return hashlib.sha256(repr((self.text, *labels)).encode()).digest()


class RandomState:
    """All generators that this rank draws from, global ones first.

    Args:
        noise: generator of the noise, `None` if that is a global one.
        sampling: generators of the data loader and its sampler.
    """

    def __init__(
        self, noise: torch.Generator | None, sampling: Sequence[torch.Generator] = ()
    ) -> None:
        self.noise = noise
        self.sampling = [g for g in sampling if g is not noise]

    def state(self) -> State:
        """The state, as types that `torch.load(weights_only=True)` reads."""
        legacy: Any = np.random.get_state()
        name, keys, *rest = legacy
        return {
            "torch": torch_state(),
            "numpy": [str(name), keys.tolist(), *rest],
            "python": random.getstate(),
            "noise": None if self.noise is None else self.noise.get_state(),
            "sampling": [generator.get_state() for generator in self.sampling],
        }

    def restore(self, state: State, natural: Sequence[torch.Generator] = ()) -> None:
        """Restore a saved state.

        Args:
            state: what :meth:`state` returned.
            natural: generators to leave as they are.
        """
        set_torch_state(state["torch"])
        name, keys, *rest = state["numpy"]
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
        random.setstate(_as_tuples(state["python"]))
        pairs = [(self.noise, state["noise"])]
        pairs += zip(self.sampling, state["sampling"], strict=False)
        for generator, saved in pairs:
            left_alone = any(generator is one for one in natural)
            if generator is not None and saved is not None and not left_alone:
                generator.set_state(saved)

    def renew(self, secret: Secret, index: int) -> None:
        """Start new streams.

        Args:
            secret: the same on all ranks.
            index: number of this rank among those that hold different samples. Ranks with equal
                numbers get equal streams, as tensor parallelism needs; those of the sampling are
                equal on all ranks (a sampler folds its rank in itself).
        """
        torch.manual_seed(secret.seed("torch", index))  # and those of the accelerator
        np.random.seed(secret.seed("numpy", index) % 2**32)
        random.seed(secret.seed("python", index))
        if self.noise is not None:
            self.noise.manual_seed(secret.seed("noise", index))
        for number, generator in enumerate(self.sampling):
            generator.manual_seed(secret.seed("sampling", number))


def torch_state() -> list[Tensor]:
    """The global generators of torch: of the CPU and, if it is in use, of this GPU."""
    on_gpu = torch.cuda.is_available() and torch.cuda.is_initialized()
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if on_gpu else [])]


def set_torch_state(state: Sequence[Tensor]) -> None:
    """Restore what :func:`torch_state` returned."""
    torch.set_rng_state(state[0])
    if len(state) > 1 and torch.cuda.is_available():
        torch.cuda.set_rng_state(state[1])


def _as_tuples(value: Any) -> Any:
    return tuple(_as_tuples(v) for v in value) if isinstance(value, (list, tuple)) else value
