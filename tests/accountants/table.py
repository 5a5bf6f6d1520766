"""The values of epsilon that other libraries computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
TABLE: dict[str, Any] = json.loads((FOLDER / "reference.json").read_text())
CASES = [dict(zip(TABLE["columns"], row, strict=True)) for row in TABLE["rows"]]
# Large epsilons need large grids, about a second each.
QUICK = [case for case in CASES if case["rdp"] < 60.0 and case["steps"] < 20_000]
