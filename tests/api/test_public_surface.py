"""The public surface of Opacus 1.6.0: every name, signature, default and base class."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent


def test_every_public_name_is_compatible() -> None:
    left_out = json.loads((HERE / "left_out.json").read_text())
    done = subprocess.run(
        [sys.executable, str(HERE / "check_api.py"), str(HERE / "opacus-1.6.0-api.json")],
        capture_output=True,
        text=True,
        cwd=HERE.parents[1],
        env={"PYTHONPATH": str(HERE.parents[1]), "PATH": ""},
    )
    lines = done.stdout.strip().splitlines()
    assert lines[-1].startswith("API: "), done.stdout + done.stderr
    differing = {line.split(": ", 1)[0] for line in lines[:-1] if "not checked" not in line}
    assert differing == set(left_out), "\n".join(sorted(differing ^ set(left_out)))
    total = int(lines[-1].split()[3])
    assert total > 1300 and len(left_out) < 0.02 * total
