"""Settings of all tests: seeds, threads, what is skipped where."""

from __future__ import annotations

import functools
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

torch.set_num_threads(1)
gc.disable()  # until all is collected: imports leave much to look through and little garbage


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What has been imported and collected by its end stays; no later collection looks at it."""
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


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
# others waiting.
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
# What `make test-fast` leaves out besides: what stands around the library, and files of several
# seconds whose subject has quicker ones.
AROUND = ("auditing", "cases", "docs", "integrations", "memory_test", "scale", "tools")
LONG = {
    "accountants/test_noise_search.py",
    "accountants/test_pld_accountant.py",
    "accountants/test_reference.py",
    "accountants/test_tradeoff.py",
    "core/sums/test_replayed_blocks.py",
    "engine/test_buffered_noise.py",
    "engine/test_items_and_samples.py",
    "engine/test_trainers.py",
    "engine/test_training_loops.py",
    "engine/test_what_outlives_the_model.py",
}
# What starts processes is known by what its file calls, or by its folder.
STARTERS = ("run_distributed(", "run_script(", "forked(", "subprocess.", "Popen(")
FOLDERS = ("examples", "reference")
TESTS = Path(__file__).parent


@functools.cache
def starts_processes(path: Path) -> bool:
    return path.parent.name in FOLDERS or any(name in path.read_text() for name in STARTERS)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out what takes long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With --fast what is left out is not even imported."""
    if not config.getoption("--fast") or not collection_path.name.startswith("test_"):
        return None
    place = collection_path.relative_to(TESTS)
    out = place.parts[0] in AROUND or place.as_posix() in (*LONGEST, *LONG)
    return out or starts_processes(collection_path) or None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {str(TESTS / name): number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(str(item.path), len(place)))
    for item in items:
        if str(item.path) in place:
            item.add_marker("slow")
        if starts_processes(item.path):
            item.add_marker("starts_processes")
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="no CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
