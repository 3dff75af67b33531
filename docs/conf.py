"""Sphinx: ``scripts/docs`` builds the site."""

project = "sglang-unified-kv"
author = "the authors of sglang-unified-kv"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = "sglang-unified-kv"
html_show_copyright = False
# Anchors as code hosts make them, which the pages' links use.
myst_heading_anchors = 3
# Two hyphens are a flag, not a dash.
smartquotes = False
