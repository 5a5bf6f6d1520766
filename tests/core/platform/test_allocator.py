"""No page faults on the CPU for memory that has just been given back."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

STEPS = """
import resource, sys
import torch  # and nothing else without it: other imports may raise the threshold by chance

if sys.argv[1] == "with":
    from opacus.core.platform.allocator import keep_freed_memory

    keep_freed_memory()
faults = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    tensors = [torch.ones(25_000) for _ in range(100)]  # 10 MB, each too small to be mapped alone
    del tensors
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sorted(faults[4:])[4])
"""


def faults(how: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", STEPS, how], capture_output=True, text=True, timeout=300, check=True
    )
    return int(run.stdout)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"):
        monkeypatch.delenv(name, raising=False)
    assert faults("with") < 200
    assert faults("without") > 500  # or else this test shows nothing


def test_hooks_see_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from opacus import GradSampleModule
    from opacus.grad_sample import gsm_base

    calls = []
    monkeypatch.setattr(gsm_base, "keep_freed_memory", lambda: calls.append(1))
    GradSampleModule(nn.Linear(2, 2))
    assert calls
