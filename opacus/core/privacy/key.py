"""Keys: where the random numbers of the privacy guarantee come from.

A run has one secret key, from the operating system. Every random number of the guarantee is a
function of that key, its purpose (noise, sampling), the step, the parameter's name and the number
of the element (or of the data set's item). So the numbers are the same on any number of ranks and
devices, the global seed does not change them, and none is used twice: the step number only grows.
"""

from __future__ import annotations

import hashlib
import os
import struct
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from opacus.core.platform.switches import switched_on

_BYTES = 32
# Purposes: gradients' noise, that of the count in adaptive clipping, noise asked for by itself,
# the coin tosses of sampling, and those of gradients that are stored in fewer bits.
NOISE, COUNT, APART, SAMPLING, ROUNDING = "noise", "count", "apart", "sampling", "rounding"


@dataclass(frozen=True)
class Key:
    """A secret of 32 bytes. Whoever knows it can recompute, and so remove, the noise.

    Attributes:
        secret: The bytes.
    """

    secret: bytes = field(repr=False)

    def derive(self, *labels: str) -> bytes:
        """32 bytes, others for other labels, which tell nothing of the secret."""
        text = b"".join(struct.pack("<q", len(t)) + t for t in (label.encode() for label in labels))
        return hashlib.blake2b(text, key=self.secret, digest_size=_BYTES).digest()

    @property
    def identifier(self) -> str:
        """A public name of the key: equal for equal keys. It tells nothing of the secret."""
        return self.derive("identifier").hex()[:32]


class RunKey:
    """The key of a run and the number of its next step, which is never reused.

    The secret comes from the operating system. It comes from a seed instead where that is asked
    for: with a generator, or with ``OPACUS_REPRODUCIBLE=1`` (then from torch's global generator on
    the CPU). Runs with equal seeds then have equal random numbers, and whoever knows the seed
    knows them. The numbers for it are drawn when the object is made; what happens to the generator
    afterwards changes nothing.

    A copy (``copy.deepcopy``, ``pickle``) gets a key of its own, from the operating system, and so
    does a forked process, except of a seeded key.

    Args:
        generator: A seeded source.
        secure: Never from a seed.
        shared: All ranks of the default process group have rank 0's key. The first use is then a
            collective call.

    Attributes:
        secure: As given.
        asked: Whether a seed was asked for.
        seeded: Whether the key comes from it.
        keeps_past: Whether numbers are made again after their step (correlated noise). A saved
            state then holds the secrets that its numbers were made with.
    """

    def __init__(
        self,
        generator: torch.Generator | None = None,
        *,
        secure: bool = False,
        shared: bool = False,
    ) -> None:
        asked = generator is not None or reproducible_from_environment()
        self.asked = asked and not secure and not isinstance(generator, SystemGenerator)
        self.seeded = self.asked
        self.secure = secure
        self.shared = shared
        self.keeps_past = False
        self._next: dict[str, int] = {}
        # Keys of a run that was resumed, each with the first step of the noise that it is not for.
        self._earlier: list[tuple[int, Key]] = []
        self._secret = seed_bytes(generator) if self.seeded else None
        self._key: Key | None = None
        # Of each secret and purpose, by name.
        self._derived: dict[tuple[bytes, str], dict[str, bytes]] = {}
        _KEYS.add(self)

    @property
    def key(self) -> Key:
        """The key; agreed on by all ranks when it is first asked for, if it is shared."""
        if self._key is None:
            secret = os.urandom(_BYTES) if self._secret is None else self._secret
            self._key = Key(_of_rank_0(secret) if self.shared else secret)
        return self._key

    @property
    def agreed(self) -> bool:
        """Whether asking for the key is no collective call any more."""
        return self._key is not None

    def agree(self) -> None:
        """Agree on the key now, if it is shared: a collective call."""
        _ = self.key

    def stream(self, purpose: str, name: str, number: int | None = None) -> bytes:
        """32 bytes for the random numbers of one purpose and parameter.

        Args:
            number: Of the step; by default one that is still to come.
        """
        return self.streams(purpose, [name], [number])[0][0]

    def streams(
        self, purpose: str, names: Sequence[str], numbers: Sequence[int | None]
    ) -> list[list[bytes]]:
        """:meth:`stream` of each name, in each of these steps."""
        keys = [self._key_of(number) for number in numbers]
        tables = [self._derived.setdefault((key.secret, purpose), {}) for key in keys]
        for key, table in zip(keys, tables, strict=True):
            for name in names:
                if name not in table:
                    table[name] = key.derive(purpose, name)
        return [[table[name] for table in tables] for name in names]

    def _key_of(self, number: int | None) -> Key:
        if number is None or not self._earlier:
            return self.key
        return next((key for end, key in self._earlier if number < end), self.key)

    def follow(self, old: RunKey) -> None:
        """Continue after the numbers of another key, whose past numbers stay its own."""
        self.at_least(old.numbers)
        self.keeps_past = old.keeps_past
        if old.keeps_past and old.step:
            self._earlier = [*old._earlier, (old.step, old.key)]

    @property
    def step(self) -> int:
        """Number of the next step's noise, equal to the number of steps with noise so far."""
        return self._next.get(NOISE, 0)

    @property
    def numbers(self) -> dict[str, int]:
        """The next number of each purpose."""
        return dict(self._next)

    def advance(self, purpose: str) -> int:
        """A number that this purpose has not used before; call it on all ranks."""
        number = self._next.get(purpose, 0)
        self._next[purpose] = number + 1
        return number

    def at_least(self, numbers: Mapping[str, int]) -> None:
        """Never give out a smaller number for a purpose than these."""
        for purpose, number in numbers.items():
            self._next[purpose] = max(number, self._next.get(purpose, 0))

    def pass_over(self, steps: int) -> None:
        """Give out no number that so many steps before may have had with this key, if seeded.

        A step has a count for each of its physical batches, of which there are fewer than 2^20.
        Passes over the data, some of them left before a step, are taken to be at most 16 a step.
        """
        if not self.seeded:
            return
        self.at_least({NOISE: steps, COUNT: steps << 20, SAMPLING: steps << 4})

    def renew(self) -> None:
        """A new key from the operating system; the numbers go on."""
        self.seeded, self._secret, self._key = False, None, None
        self._derived.clear()

    def adopt(self, secret: bytes) -> None:
        """Use this secret."""
        self._key = Key(secret)

    def state_dict(self) -> dict[str, Any]:
        """The key's public name and the next numbers; the secret if it comes from a seed."""
        state: dict[str, Any] = {"key": self.key.identifier, "next": self.numbers}
        if self.keeps_past:
            keys = [*self._earlier, (self.step, self.key)]
            state["earlier"] = [(end, key.secret.hex()) for end, key in keys]
        return {**state, "secret": self.key.secret.hex()} if self.seeded else state

    def resume(self, state: Mapping[str, Any]) -> bool:
        """Give out no number that a saved run has had, and have its key if both are seeded.

        A key from the operating system is never continued: a second run from the same checkpoint
        would draw the same noise for other sums.

        Args:
            state: What :meth:`state_dict` returned.

        Returns:
            Whether the random numbers are what was asked for: those of the saved run, or new ones.
        """
        self.at_least(state["next"])
        if self.keeps_past:
            earlier = state["earlier"]
            self._earlier = [(end, Key(bytes.fromhex(secret))) for end, secret in earlier]
        if not self.asked:
            return True
        if "secret" not in state:
            return False
        self._key, self.seeded = Key(bytes.fromhex(state["secret"])), True
        self._derived.clear()
        return True

    def __getstate__(self) -> dict[str, Any]:
        """Without the secret: two copies would draw the same noise for different sums."""
        lost: dict[str, Any] = {"seeded": False, "_secret": None, "_key": None}
        return {**vars(self), **lost, "_derived": {}, "_earlier": [], "_next": self.numbers}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        _KEYS.add(self)

    def part(self) -> None:
        """This process was forked: its noise must not be that of the process that goes on."""
        if self._key is None or self.seeded:
            return
        if self.keeps_past and self.step:
            self._earlier = [*self._earlier, (self.step, self._key)]
        self.renew()


_KEYS: weakref.WeakSet[RunKey] = weakref.WeakSet()


def _part_from_parent() -> None:
    for key in list(_KEYS):
        key.part()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_part_from_parent)


class SystemGenerator(torch.Generator):
    """Stands for the operating system where a generator is asked for; see ``secure_mode``.

    For what does not belong to the guarantee (the seeds of data loader workers, shuffling) it is
    an ordinary generator, seeded by the operating system.
    """

    def __init__(self) -> None:
        super().__init__()
        self.manual_seed(int.from_bytes(os.urandom(7), "big"))


def reproducible_from_environment() -> bool:
    """Whether ``OPACUS_REPRODUCIBLE`` asks for keys from torch's global seed.

    Raises:
        ValueError: It is neither ``0`` nor ``1``.
    """
    return switched_on("OPACUS_REPRODUCIBLE")


def seed_bytes(generator: torch.Generator | None) -> bytes:
    """32 bytes drawn from a generator; from the global one of the CPU if ``None``.

    Not from the one of the default device, which may be another one.
    """
    device = torch.device("cpu") if generator is None else generator.device
    drawn = torch.randint(2**62, (_BYTES // 8,), generator=generator, device=device)
    return struct.pack("<4q", *drawn.tolist())


def _of_rank_0(secret: bytes) -> bytes:
    """Rank 0's bytes, on all ranks."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return secret
    box: list[Any] = [secret]
    dist.broadcast_object_list(box, src=0)
    return bytes(box[0])
