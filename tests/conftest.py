"""Settings of all tests: seeds, threads, what is skipped where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

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


# Files of a minute and more, the longest first: a worker that began one of them last would keep the
# others waiting. `make test-fast` leaves them out.
LONGEST = [
    "core/kernels/test_triton_interpreter.py",
    "examples/test_train_text_fsdp.py",
    "distributed/test_checkpoint_reshard.py",
    "memory_test/test_torch_profile_script.py",
    "memory_test/test_experiments.py",
    "distributed/test_parallelism.py",
    "data/test_samplers.py",
    "distributed/test_compiled_blocks.py",
    "docs/test_snippets.py",
    "engine/test_checkpoint.py",
    "distributed/test_fsdp_matches_oracle.py",
    "distributed/test_noise.py",
    "distributed/test_checkpoint_scaler.py",
    "integrations/test_trainer_ranks.py",
    "auditing/test_gradient_canaries.py",
    "examples/test_ddp_digits.py",
    "distributed/test_multinode.py",
]
# What starts processes is known by what its file imports, or by its folder.
STARTERS = ("run_distributed", "run_script", "forked", "subprocess")
FOLDERS = ("examples", "reference")
TESTS = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {str(TESTS / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))
    for item in items:
        if str(item.path) in place:
            item.add_marker("slow")
        module = getattr(item, "module", None)
        if item.path.parent.name in FOLDERS or any(hasattr(module, n) for n in STARTERS):
            item.add_marker("starts_processes")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
