"""What is known of a device's memory, and who calls a function."""

from __future__ import annotations

import pytest
import torch

from opacus.core.platform.callers import MOST_FRAMES, callers
from opacus.core.platform.memory import free_memory, in_use, most_in_use
from opacus.core.platform.sizes import FREE_MEMORY_MARGIN

GPU = torch.device("cuda")
USED, RESERVED, FREE, WHOLE = 300, 400, 500, 1000


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, dict[str, int]]]:
    """The numbers that torch gives of a device: 100 of 1,000 bytes are another process's."""
    stats = {
        "allocated_bytes": {"all": {"current": USED}},
        "reserved_bytes": {"all": {"current": RESERVED}},
    }
    whole = type("Properties", (), {"total_memory": WHOLE})()
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: stats)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (FREE, WHOLE))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: whole)
    return stats


@pytest.mark.usefixtures("gpu")
def test_what_torch_has_in_its_cache_is_free() -> None:
    assert in_use(GPU) == USED
    assert free_memory(GPU) == FREE + RESERVED - USED
    margin = int(FREE_MEMORY_MARGIN * WHOLE)
    assert margin > 0 and most_in_use(GPU) == RESERVED + FREE - margin


def test_a_device_that_is_not_in_use_yet(gpu: dict[str, dict[str, dict[str, int]]]) -> None:
    gpu.clear()
    assert (in_use(GPU), free_memory(GPU)) == (0, FREE)


def test_callers_are_those_of_who_asks() -> None:
    def asks() -> list[str]:
        return [frame.f_code.co_name for frame in callers()]

    def between(depth: int) -> list[str]:
        return asks() if depth == 0 else between(depth - 1)

    names = between(2)
    assert names[:4] == ["between"] * 3 + ["test_callers_are_those_of_who_asks"]
    assert between(MOST_FRAMES) == ["between"] * MOST_FRAMES
