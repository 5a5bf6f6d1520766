"""Memory of a CUDA device: what this process uses of it, and what it can still get."""

from __future__ import annotations

import gc

import torch

from opacus.core.platform.sizes import FREE_MEMORY_MARGIN

# Steps after which the driver is asked again in any case.
ASKED_EVERY = 16


def in_use(device: torch.device | None = None) -> int:
    """Bytes that tensors of this process have now."""
    return _used_and_cached(device)[0]


def free_memory(device: torch.device) -> int:
    """Bytes that new tensors can get: what no process has, and what torch has in its cache."""
    return _used_and_free(device)[1]


def most_in_use(device: torch.device) -> int:
    """Bytes that tensors of this process may have: all that they can get, less a margin."""
    return _most(device, *_used_and_free(device))


class Card:
    """:func:`most_in_use` for each step: the driver takes milliseconds to say what is free.

    It is asked when torch has taken memory from the card or given some back, and else now and then:
    another process may have.
    """

    def __init__(self) -> None:
        self._reserved, self._free, self._asked = -1, 0, 0

    def most_in_use(self, device: torch.device) -> int:
        """Bytes that tensors of this process may have, see :func:`most_in_use`."""
        used, cached = _used_and_cached(device)
        if used + cached != self._reserved or self._asked == ASKED_EVERY:
            self._reserved, self._asked = used + cached, 0
            self._free, _ = torch.cuda.mem_get_info(device)
        self._asked += 1
        return _most(device, used, _can_get(device, used, cached, self._free))


def give_back_to_the_card() -> None:
    """Give back what torch has in its cache, as memory has run out.

    What it has is in pieces: the next step would fail at its first large tensor, of logits, say,
    where the first step had room for it.
    """
    gc.collect()  # graphs with checkpoints are in cycles
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def _most(device: torch.device, used: int, free: int) -> int:
    return used + max(0, free - int(FREE_MEMORY_MARGIN * _allowed(device)))


def _used_and_free(device: torch.device) -> tuple[int, int]:
    free, _ = torch.cuda.mem_get_info(device)
    used, cached = _used_and_cached(device)
    return used, _can_get(device, used, cached, free)


def _can_get(device: torch.device, used: int, cached: int, free: int) -> int:
    return min(free, max(0, _allowed(device) - used - cached)) + cached


def _allowed(device: torch.device) -> int:
    """Bytes of the device that torch may have: ``set_per_process_memory_fraction`` limits them."""
    share = getattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0)(device)
    return int(share * torch.cuda.get_device_properties(device).total_memory)


def _used_and_cached(device: torch.device | None) -> tuple[int, int]:
    stats = torch.cuda.memory_stats_as_nested_dict(device)  # the flat ones take much longer
    if not stats:
        return 0, 0
    used = int(stats["allocated_bytes"]["all"]["current"])
    reserved = stats.get("reserved_bytes")
    return used, int(reserved["all"]["current"]) - used if reserved else 0
