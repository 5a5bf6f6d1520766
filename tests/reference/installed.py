"""Finds or installs Opacus 1.6.0 in a folder of its own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from filelock import FileLock

VERSION = "1.6.0"
# Opacus needs opt_einsum, which nothing else here does.
PACKAGES = (f"opacus=={VERSION}", "opt_einsum==3.4.0")


def opacus_folder() -> Path:
    """The folder ``OPACUS_REFERENCE``, or one that pip fills once for each user and machine.

    Skips the test if no package index is there, except in CI, where it fails.
    """
    if "OPACUS_REFERENCE" in os.environ:
        return Path(os.environ["OPACUS_REFERENCE"])
    folder = Path(tempfile.gettempdir()) / f"opacus-{VERSION}-for-user-{os.getuid()}"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            _install(folder)
    return folder


def _install(folder: Path) -> None:
    unfinished = Path(f"{folder}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target"]
    done = subprocess.run([*pip, str(unfinished), *PACKAGES], capture_output=True, text=True)
    if done.returncode == 0:
        unfinished.rename(folder)
        return
    message = f"pip could not install {' '.join(PACKAGES)}: {done.stderr.strip()[-500:]}"
    if os.environ.get("CI"):
        pytest.fail(message)
    pytest.skip(message)
