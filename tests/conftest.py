"""Settings of all tests: seeds, threads, what is skipped where."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    before = {k: v for k, v in os.environ.items() if k.startswith("OPACUS_")}
    os.environ.pop("OPACUS_USE_DEFERRED_NORM", None)
    yield
    for key in [k for k in os.environ if k.startswith("OPACUS_")]:
        del os.environ[key]
    os.environ.update(before)


@pytest.fixture
def reproducible(_environment: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise and sampling come from torch's global seed, as this test's comparison needs."""
    monkeypatch.setenv("OPACUS_REPRODUCIBLE", "1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
