"""Configuration of the documentation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from opacus.version import __version__

project = "opacus"
author = "The authors"
release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
html_theme = "furo"
suppress_warnings = ["myst.xref_missing"]
autodoc_typehints = "signature"
