"""Configuration of the documentation."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from opacus.version import __version__

project = "Opacus for large models"
author = "The authors of Opacus for large models"
copyright = f"2026, {author}"
release = __version__
html_title = f"Opacus for large models {__version__}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]
autodoc_member_order = "bysource"
html_theme = "furo"
suppress_warnings = ["myst.xref_missing"]
autodoc_typehints = "signature"
