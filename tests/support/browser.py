"""A real browser for tests of the page: Playwright with the system's Chromium."""

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.api_server import Served

ROOT = Path(__file__).parent.parent.parent
AXE = ROOT / "web" / "node_modules" / "axe-core" / "axe.min.js"
PICTURES = "KVRAG_PAGE_PICTURES"
"""Environment variable: a folder that tests of the page write pictures to."""

PHONE = {"width": 390, "height": 780}

# A slow machine: the suite shares its cores.
_MILLISECONDS = 60_000

NewPage = Callable[..., Any]


@contextmanager
def started() -> Iterator[Any]:
    """Yield a browser."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs chromium")
    # Containers run tests as root, where Chromium's own sandbox does not start.
    arguments = ["--no-sandbox", "--disable-gpu"]
    with (
        playwright.sync_playwright() as running,
        running.chromium.launch(executable_path=chromium, args=arguments) as browser,
    ):
        yield browser


@contextmanager
def browsing(browser: Any) -> Iterator[NewPage]:
    """Yield a function that opens a page; what goes wrong in any of them fails the test.

    Its arguments are those of Playwright's ``new_context``.
    """
    wrong: list[str] = []
    contexts = []

    def new_page(**options: Any) -> Any:
        contexts.append(browser.new_context(**options))
        page = contexts[-1].new_page()
        page.set_default_timeout(_MILLISECONDS)
        page.on("pageerror", lambda error: wrong.append(str(error)))
        page.on("console", lambda said: _note(wrong, said))
        return page

    try:
        yield new_page
    finally:
        for context in contexts:
            context.close()
    assert wrong == []


def _note(wrong: list[str], said: Any) -> None:
    # Chromium reports each status over 399, which the page shows the person.
    if said.type == "error" and "Failed to load resource" not in said.text:
        wrong.append(said.text)


def ask(page: Any, served: Served, question: str) -> None:
    """Open a server's page, and ask."""
    page.goto(f"{served.server.url}/")
    page.get_by_label("Your question").fill(question)
    page.keyboard.press("Enter")


def serious_findings(page: Any) -> list[str]:
    """Return what axe-core finds wrong with a page, of the impacts serious and critical."""
    if not AXE.exists():
        pytest.skip("needs axe-core: npm install in web/")
    # By the debugger: the page's policy allows no script of others.
    page.evaluate(AXE.read_text())
    found = page.evaluate("axe.run()")
    return [
        f"{one['id']}: {node['target']} {node['failureSummary']}"
        for one in found["violations"]
        if one["impact"] in ("serious", "critical")
        for node in one["nodes"]
    ]


def picture(page: Any, name: str) -> None:
    """Write a picture of the page to the folder that the environment names."""
    page.screenshot(path=str(Path(os.environ[PICTURES]) / f"{name}.png"), animations="disabled")
