"""The plot of the norm kernels is drawn from the committed results."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RESULTS = sorted((ROOT / "memory_test" / "results").glob("kernels_*_norms.json"))


def test_plot_is_not_blank(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    image = pytest.importorskip("PIL.Image")
    script = ROOT / "memory_test" / "benchmarks" / "kernel_plot.py"
    png = tmp_path / "kernels.png"
    command = [sys.executable, str(script), str(RESULTS[-1]), "--png", str(png)]
    subprocess.run(command, check=True, timeout=300)
    with image.open(png) as picture:
        assert picture.width > 800
        assert len(picture.convert("RGB").getcolors(1 << 24)) > 50
