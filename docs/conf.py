"""How the site is built from these pages: `make docs`."""

from __future__ import annotations

import kvrag

# Before autodoc, which imports for type checkers: LlamaIndex cannot be imported that way.
import kvrag.llms.langchain
import kvrag.llms.llamaindex
import kvrag.retrievers.langchain
import kvrag.retrievers.llamaindex

project = "kvrag"
author = "the kvrag authors"
version = release = kvrag.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
exclude_patterns = ["results/README.md"]

# Headings are linked to as GitHub names them.
myst_heading_anchors = 4
# An image may have a width: `![alt](file.png){width=240px}`.
myst_enable_extensions = ["attrs_inline"]
suppress_warnings = ["myst.header"]

autodoc_typehints = "description"
autodoc_member_order = "bysource"
# Libraries of extras need not be installed.
autodoc_mock_imports = ["vllm"]
napoleon_google_docstring = False
# Docstrings name things in single backticks.
default_role = "code"

html_theme = "furo"
html_title = "kvrag"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}
