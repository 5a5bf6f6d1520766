"""How much host memory a GPU's records may take."""

from __future__ import annotations

import pytest
import torch

from opacus.core.platform import host_share as module

CARD = torch.device("cuda", 0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """One with 64 GiB free, of which a container may have 40 and uses 8."""

    def made(limit: str = str(40 << 30)) -> None:
        for name, text in {
            "info": f"MemTotal: 99 kB\nMemAvailable:   {64 << 20} kB\n",
            "max": limit,
            "current": str(8 << 30),
        }.items():
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(module, "_INFO", tmp_path / "info")
    monkeypatch.setattr(module, "_LIMITS", ((tmp_path / "max", tmp_path / "current"),))
    module.host_share.cache_clear()
    yield made
    module.host_share.cache_clear()


def test_a_quarter_of_what_is_free_is_shared_by_the_processes(machine, monkeypatch) -> None:
    machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert module.free_host_memory() == 32 << 30
    assert module.host_share(CARD) == 4 << 30


def test_no_limit_is_no_limit(machine) -> None:
    machine("max\n")
    assert module.free_host_memory() == 64 << 30


def test_it_stays_what_it_was(machine, monkeypatch) -> None:
    """What a run has sent there is not free any more, and may be sent again."""
    machine()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    before = module.host_share(CARD)
    machine(str(9 << 30))
    assert module.free_host_memory() == 1 << 30
    assert module.host_share(CARD) == before == 8 << 30


def test_nothing_where_nothing_is_known(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(module, "_INFO", tmp_path / "none")
    assert module.free_host_memory() == 0


def test_a_cpu_has_no_memory_beside_the_hosts(machine) -> None:
    machine()
    assert module.host_share(torch.device("cpu")) == 0
