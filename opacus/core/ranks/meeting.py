"""Ranks announce what they are about to do through the store that joined them.

For moments at which a collective could hang because ranks may not agree on the next one. No
collective, and nothing on the device; a meeting costs some round trips to the store.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import itertools
import sys
import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch.distributed as dist
from torch import nn

from opacus.core.platform.sharded import is_dtensor
from opacus.core.platform.torch_internals import default_store

_SAME, _DIFFER = b"same", b"differ"
_ENDED = "opacus/ended/{}"
_LOOK = 0.5  # seconds between looks for ranks that have ended


@dataclass(frozen=True)
class Outcome:
    """The values of the ranks; ``None`` for one that did not come in time."""

    said: dict[int, str | None]

    @property
    def agreed(self) -> bool:
        return len(set(self.said.values())) == 1


class Meetings:
    """Meetings of the ranks that share a model; each rank makes the same ones.

    Args:
        ranks: Those that meet.
        purpose: Part of the keys in the store.
    """

    _made: ClassVar[Counter[str]] = Counter()

    def __init__(self, ranks: Iterable[int], purpose: str) -> None:
        self.ranks = sorted(ranks)
        self._rank = dist.get_rank()
        digest = hashlib.sha256(repr(self.ranks).encode()).hexdigest()[:12]
        self._made[purpose + digest] += 1
        self._prefix = f"opacus/{purpose}/{digest}/{self._made[purpose + digest]}"
        self._store: Any = default_store()
        self._past: list[str] = []  # meetings whose keys are still there
        _tell_the_end(self._store)

    def meet(self, label: str, value: str, wait: float) -> Outcome:
        """Compare ``value`` with what the other ranks say; not empty.

        Args:
            label: Which meeting it is: the same on all ranks, another one each time.
            value: What this rank says, not empty.
            wait: Seconds to wait for the others. If one says something else it takes no longer
                than that.
        """
        if self._store is None or len(self.ranks) == 1:
            return Outcome({self._rank: value})
        key, store = f"{self._prefix}/{label}", self._store
        store.set(f"{key}/{self._rank}", value)
        if store.compare_set(f"{key}/value", "", value) != value.encode():
            store.set(f"{key}/end", _DIFFER)
        elif store.add(f"{key}/count", 1) == len(self.ranks):
            store.set(f"{key}/end", _SAME)
        same = self._ended(key, wait) == _SAME
        if same:
            self._forget_past()
        self._past.append(key)
        if same:
            return Outcome(dict.fromkeys(self.ranks, value))
        return Outcome({rank: self._get(f"{key}/{rank}") for rank in self.ranks})

    def _ended(self, key: str, wait: float) -> bytes | None:
        """How the meeting ended, ``None`` if it did not."""
        deadline, look = time.monotonic() + wait, time.monotonic() + _LOOK
        for pause in itertools.chain(
            [0.0] * 4, [0.0005] * 20, [0.002] * 20, itertools.repeat(0.02)
        ):
            if self._store.check([f"{key}/end"]):
                end: bytes = self._store.get(f"{key}/end")
                return end
            now = time.monotonic()
            if now > deadline or (now > look and self._waits_for_the_ended(key)):
                return None
            look = now + _LOOK if now > look else look
            time.sleep(pause)
        return None

    def _waits_for_the_ended(self, key: str) -> bool:
        """Whether a rank that has not come will not."""
        return any(self.ended(r) and self._get(f"{key}/{r}") is None for r in self.ranks)

    def ended(self, rank: int) -> str:
        """How the process of a rank has ended; empty if it has not."""
        return "" if self._store is None else self._get(_ENDED.format(rank)) or ""

    def _get(self, key: str) -> str | None:
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _forget_past(self) -> None:
        """All have come to this meeting, so all have left those before."""
        for key in self._past:
            self._store.delete_key(f"{key}/{self._rank}")
            if self._rank == self.ranks[0]:
                for part in ("value", "count", "end"):
                    self._store.delete_key(f"{key}/{part}")
        self._past.clear()

    def announce(self, text: str) -> None:
        """Leave a message for ranks that wait in a collective until their peers are gone."""
        if self._store is not None:
            self._store.set(f"{self._prefix}/announced", text)

    def announced(self) -> str | None:
        """A message that another rank has left."""
        try:
            return None if self._store is None else self._get(f"{self._prefix}/announced")
        except RuntimeError:  # the store has gone with the rank that held it
            return None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_store": None}


@functools.cache
def _tell_the_end(store: Any) -> None:
    """Lets ranks that wait for this one know when its process ends, and of which error."""
    if store is not None:
        atexit.register(say_the_end, store, dist.get_rank())


def say_the_end(store: Any, rank: int) -> None:
    """The process of this rank ends."""
    error = getattr(sys, "last_value", None)  # that nobody has caught
    why = "" if error is None else f": {type(error).__name__}: {error}"
    with contextlib.suppress(Exception):  # the store may have gone before
        store.set(_ENDED.format(rank), f"has ended{why}")


def ranks_with(model: nn.Module) -> list[int]:
    """The ranks on the widest mesh that a parameter of the model lies on, or all ranks."""
    return ranks_holding(model.parameters())


def ranks_holding(parameters: Iterable[Any]) -> list[int]:
    """The ranks on the widest mesh that one of these parameters lies on, or all ranks."""
    meshes = {p.device_mesh for p in parameters if is_dtensor(p)}
    if not meshes:
        return list(range(dist.get_world_size()))
    return max(meshes, key=lambda mesh: mesh.ndim).mesh.flatten().tolist()  # type: ignore[no-any-return]
