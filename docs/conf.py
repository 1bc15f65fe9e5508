"""Sphinx configuration; `scripts/docs` generates the pages below `generated/` and builds."""

project = "Vivace"
author = "The Vivace authors"
project_copyright = author

extensions = ["myst_parser"]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = "Vivace"
html_show_sphinx = False
