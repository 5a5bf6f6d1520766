"""The Gluon kernels compile for compute capability 9.0, which needs no GPU.

What they compute is tested on one: the interpreter does not know Gluon.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys

import pytest

COMPILE = """
import sys
import torch
from triton.runtime import driver
from tests.core.kernels import fake_driver

driver.set_active(fake_driver.NoDevice())
from opacus.core.kernels.norms import hopper

x, partial = torch.zeros(2, 128, 512, dtype=torch.bfloat16), torch.zeros(8)
if sys.argv[1] == "width":
    for t in hopper.WIDTH_TILES:
        kernel = hopper._width_kernel.warmup(
            hopper._descriptor(x, t.k, t.m // 2), hopper._descriptor(x, t.k, t.n), partial,
            128, 8, 4, 2, M=t.m, N=t.n, K=t.k, STAGES=t.stages, GROUP=t.group, num_warps=4,
            grid=(1,))
        print(kernel.asm["ptx"], "// next")
else:
    for t in hopper.GRAM_TILES:
        kernel = hopper._gram_kernel.warmup(
            hopper._descriptor(x, t.m, t.k), hopper._descriptor(x, t.m, t.k), partial,
            128, 8, 4, 2, 2, M=t.m, K=t.k, STAGES=t.stages, GROUP=t.group, WARPS=t.warps,
            num_warps=t.warps, grid=(1,))
        print(kernel.asm["ptx"], "// next")
"""


def has_gluon() -> bool:
    try:
        return importlib.util.find_spec("triton.experimental.gluon") is not None
    except ImportError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not has_gluon(), reason="no Triton with Gluon")
@pytest.mark.parametrize("kernel,count", [("width", 3), ("gram", 1)])
def test_kernels_compile(kernel: str, count: int) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPILE, kernel],
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    codes = run.stdout.split("// next")[:-1]
    assert len(codes) == count
    for code in codes:
        for instruction in ("wgmma.mma_async", "cp.async.bulk.tensor", "setmaxnreg.inc"):
            assert instruction in code
        check_buffers_are_released(code)


def check_buffers_are_released(code: str) -> None:
    """Each round of a loop releases another buffer.

    A compiler that takes "the buffer before this one" for a constant of the loop leaves the
    copying warp waiting for ever.
    """
    rounds = [b for b in re.split(r"\n\$L__BB", code) if "wgmma" in b and "try_wait" in b]
    assert rounds
    for block in rounds:
        released = re.findall(r"mbarrier\.arrive\.shared::cta\.b64 _, \[(%r\d+)\]", block)
        assert released
        for register in released:
            assert re.search(rf"^\s*\S+\s+{re.escape(register)},", block, re.MULTILINE), register
