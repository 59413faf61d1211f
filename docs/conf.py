"""How Sphinx builds the documentation: `make docs`."""

project = "torch-flax-parity"
html_title = "torch-flax-parity"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
myst_heading_anchors = 3
napoleon_numpy_docstring = False
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
# Docstrings set code in single backticks, as Markdown does.
default_role = "code"
# A page fetches nothing from elsewhere, and says no more of the machine than it must.
html_show_sourcelink = False
html_copy_source = False
