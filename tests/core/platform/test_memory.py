"""What a process may have of a device's memory."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from opacus.core.platform import memory
from opacus.core.platform.sizes import FREE_MEMORY_MARGIN

GPU = torch.device("cuda", 0)
WHOLE, USED, CACHED = 1000, 200, 50


@pytest.mark.parametrize(
    "share, free, can_get",
    [
        (1.0, 700, 750),  # the device is the limit
        (1.0, 100, 150),  # others have the rest of it
        (0.4, 700, 200),  # the process may have less, and has 250
        (0.2, 700, 50),  # more than it may have: what is cached stays its own
    ],
)
def test_what_new_tensors_can_get(
    share: float, free: int, can_get: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    stats = {
        "allocated_bytes": {"all": {"current": USED}},
        "reserved_bytes": {"all": {"current": USED + CACHED}},
    }
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (free, WHOLE))
    properties = SimpleNamespace(total_memory=WHOLE)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(
        torch.cuda, "get_per_process_memory_fraction", lambda _: share, raising=False
    )
    assert memory.in_use(GPU) == USED
    assert memory.free_memory(GPU) == can_get
    margin = int(FREE_MEMORY_MARGIN * share * WHOLE)
    assert memory.most_in_use(GPU) == USED + max(0, can_get - margin)


def test_a_device_that_is_not_in_use_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=WHOLE)
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda _: {})
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (700, WHOLE))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    assert (memory.in_use(GPU), memory.free_memory(GPU)) == (0, 700)


def test_the_driver_is_asked_when_memory_may_have_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    reserved, asked = [USED + CACHED], []

    def ask(device: torch.device) -> tuple[int, int]:
        asked.append(device)
        return 700 - 100 * len(asked), WHOLE

    def stats(device: torch.device) -> dict[str, dict[str, dict[str, int]]]:
        of = {"allocated_bytes": USED, "reserved_bytes": reserved[0]}
        return {name: {"all": {"current": value}} for name, value in of.items()}

    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", ask)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=WHOLE)
    )
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda _: 1.0, raising=False)
    card, margin = memory.Card(), int(FREE_MEMORY_MARGIN * WHOLE)
    first = [card.most_in_use(GPU) for _ in range(memory.ASKED_EVERY)]
    assert len(asked) == 1
    assert set(first) == {USED + 600 + CACHED - margin}
    assert card.most_in_use(GPU) == USED + 500 + CACHED - margin
    reserved[0] += 30
    assert card.most_in_use(GPU) == USED + 400 + CACHED + 30 - margin
    assert len(asked) == 3
