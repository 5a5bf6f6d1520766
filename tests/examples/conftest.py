"""The examples are scripts: their folder is not a package, so it goes onto the path."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "examples"))
