"""The pictures of the page in docs/."""

import os
import shutil
from pathlib import Path

import httpx
import pytest

from kvrag.engine.engine import KVEngine
from kvrag.ingest.index import Index
from kvrag.server.app import ServerOptions
from tests.support.api_server import serving
from tests.support.browser import PHONE, PICTURES, ask, browsing, picture, started


@pytest.mark.slow
@pytest.mark.skipif(PICTURES not in os.environ, reason=f"{PICTURES} names no folder")
def test_pictures_of_docs(tmp_path: Path) -> None:
    """Draw docs/page-*.png, over the index of examples/handbook that the environment names."""
    shutil.copytree(os.environ.get("KVRAG_PAGE_INDEX", "kvrag-index"), tmp_path / "handbook")
    question = "How long is lost property kept?"
    with (
        started() as browser,
        browsing(browser) as new_page,
        Index.open(tmp_path / "handbook") as index,
        serving(index, ServerOptions(keeps_history=True), KVEngine(index, max_tokens=48)) as served,
    ):
        # What only the first question of a process pays is in no picture.
        body = {"model": "rag:handbook", "messages": [{"role": "user", "content": "Who paints?"}]}
        httpx.post(f"{served.url}/chat/completions", json=body | {"max_tokens": 1}, timeout=300)
        page = new_page(viewport={"width": 1200, "height": 800})
        page.set_default_timeout(300_000)
        ask(page, served, question)
        page.locator(".card").first.wait_for()
        page.locator(".conversation").wait_for()
        page.get_by_label("Your question").blur()
        picture(page, "page-answer")
        page.get_by_role("button", name="Check").click()
        page.locator("p.note").filter(has_text="Full prefill").wait_for()
        page.locator(".report > summary").click()
        page.locator(".report").evaluate("one => one.scrollIntoView({block: 'start'})")
        page.mouse.move(0, 0)
        picture(page, "page-report")
        page.locator(".report > summary").click()
        page.locator(".card").last.click()
        page.locator(".cited").wait_for()
        page.emulate_media(color_scheme="dark")
        picture(page, "page-document")
        page.keyboard.press("Escape")
        page.evaluate("document.activeElement.blur()")
        page.set_viewport_size(PHONE)
        page.locator(".thread").evaluate("one => one.scrollTo(0, 0)")
        picture(page, "page-phone")
