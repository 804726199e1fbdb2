"""How the site is built from these pages: `make docs`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import kvrag

# Before autodoc, which imports for type checkers: LlamaIndex cannot be imported that way.
import kvrag.llms.langchain
import kvrag.llms.llamaindex
import kvrag.retrievers.langchain
import kvrag.retrievers.llamaindex

# For `tools`, which is not installed.
sys.path.insert(0, str(Path(__file__).parent.parent))

from tools.commands import reference

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
# Pydantic adds them to every model.
autodoc_default_options = {"exclude-members": "model_config,model_post_init"}
# Libraries of extras need not be installed.
autodoc_mock_imports = ["vllm"]
napoleon_google_docstring = False
# They would make one dash of the two before an option.
smartquotes = False
# Docstrings name things in single backticks.
default_role = "code"

html_theme = "furo"
html_title = "kvrag"
html_show_sphinx = False
html_copy_source = False
html_theme_options = {"top_of_page_buttons": []}


_COMMANDS = "reference/commands"


def _add_commands(_app: Any, page: str, source: list[str]) -> None:
    if page == _COMMANDS:
        source[0] += "\n" + reference()


def setup(app: Any) -> None:
    app.connect("source-read", _add_commands)
    # Sphinx does not see that a command has changed.
    app.connect("env-get-outdated", lambda *_: [_COMMANDS])
