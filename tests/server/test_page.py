"""The page of `kvrag serve`: its files over HTTP, and its flows in a real browser."""

import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from kvrag.chunk import Document
from kvrag.engine.engine import KVEngine
from kvrag.engine.prices import Prices
from kvrag.engine.request import Request
from kvrag.engine.verify import Verdict
from kvrag.fusion.pricing import RowPrices
from kvrag.server.access import ApiKey
from kvrag.server.app import ServerOptions
from kvrag.server.documents import uploads_path
from kvrag.server.history import history_path
from kvrag.server.service import about
from tests.server.test_faults import metric, wait_until
from tests.support.api_server import Served, lasting, saying, serving
from tests.support.browser import PHONE, PICTURES, NewPage, ask, browsing, serious_findings, started
from tests.support.rag import Rag, make_index

ROOT = Path(__file__).parent.parent.parent
PAGE = ROOT / "kvrag" / "server" / "page"
EVIL = "<img src=x onerror=\"document.title='evil'\"> & <script>document.title='evil'</script>"


@pytest.fixture(scope="module")
def long_served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server over a document of several chunks, one of which tries to be markup."""
    folder = tmp_path_factory.mktemp("page")
    ships = [f"Page {n}: the {n}th ship of the year carried salt and rope." for n in range(30)]
    ships.insert(10, f"Page x: the odd ship carried {EVIL} and nothing else.")
    with make_index(folder, chunk_tokens=48) as index:
        index.add([Document(source="log/ships.md", text="\n\n".join(ships))])
        with serving(index) as running:
            yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started() as opened:
        yield opened


@pytest.fixture
def new_page(browser: Any) -> Iterator[NewPage]:
    with browsing(browser) as opened:
        yield opened


# -- over HTTP -------------------------------------------------------------------------------


def test_the_page_allows_its_own_files_alone(served: Served) -> None:
    with httpx.Client(base_url=served.server.url) as http:
        page = http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        names = re.findall(r'"(page/[\w.]+)"', page.text)
        assert sorted(names) == ["page/app.css", "page/app.js"]
        for path in ("/", *(f"/{name}" for name in names)):
            answer = http.get(path)
            policy = answer.headers["content-security-policy"]
            assert "default-src 'none'" in policy
            assert "script-src 'self';" in policy
            assert "unsafe" not in policy
            assert answer.headers["x-content-type-options"] == "nosniff"
            again = http.get(path, headers={"If-None-Match": answer.headers["etag"]})
            assert (again.status_code, again.content) == (304, b"")
        for name in ("nothing.js", "..%2Fapp.py", "%2e%2e/app.py"):
            assert http.get(f"/page/{name}").status_code == 404


def test_the_page_is_small_and_asks_nobody_else() -> None:
    files = sorted(path.name for path in PAGE.iterdir())
    assert files == ["app.css", "app.js", "index.html"]
    texts = {name: (PAGE / name).read_text() for name in files}
    assert sum(map(len, texts.values())) < 300_000
    # Names of XML namespaces are no addresses.
    addresses = re.findall(r"https?://(?!www\.w3\.org/)[^\s\"'`]+", "".join(texts.values()))
    assert addresses == []
    for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "eval(", "localStorage"):
        assert word not in texts["app.js"], word


def test_the_page_is_that_of_its_sources(tmp_path: Path) -> None:
    if shutil.which("node") is None or not (ROOT / "web" / "node_modules" / "esbuild").exists():
        pytest.skip("needs node, and npm install in web/")
    subprocess.run(["node", "build.mjs", str(tmp_path)], cwd=ROOT / "web", check=True)
    for path in PAGE.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), "run 'npm run build'"


MARKS = """
const element = () => ({ children: [], append() {}, setAttribute() {}, replaceChildren() {} });
globalThis.document = { createElement: element };
const { Markdown } = await import("./markdown.js");
for (const mark of ["*a ", "**a ", "a*b ", "_a ", "*", "__", "`"]) {
  for (const isOpen of [true, false]) {
    new Markdown(element()).show(mark.repeat(100_000 / mark.length) + "x", isOpen);
  }
}
"""


def test_marks_that_end_nothing_are_read_in_linear_time(tmp_path: Path) -> None:
    bundler = ROOT / "web" / "node_modules" / ".bin" / "esbuild"
    if shutil.which("node") is None or not bundler.exists():
        pytest.skip("needs node, and npm install in web/")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    (tmp_path / "marks.js").write_text(MARKS)
    source, out = ROOT / "web" / "src" / "markdown.ts", tmp_path / "markdown.js"
    subprocess.run([bundler, source, "--bundle", "--format=esm", f"--outfile={out}"], check=True)
    # A second, or minutes if it takes the square of the length.
    subprocess.run(["node", "marks.js"], cwd=tmp_path, check=True, timeout=60)


def test_a_server_with_keys_shows_the_page_and_nothing_more(rag: Rag) -> None:
    key = ApiKey(name="ada", key="key-of-ada-0123456789")
    with serving(rag.index, ServerOptions(keys=[key])) as served:
        root = served.server.url
        assert httpx.get(f"{root}/").status_code == 200
        assert httpx.get(f"{root}/page/app.js").status_code == 200
        for path in ("/v1/kvrag", "/v1/kvrag/chunks/x", "/page", "/pages/app.js"):
            assert httpx.get(root + path).status_code == 401
        header = {"Authorization": f"Bearer {key.key}"}
        assert httpx.get(f"{root}/v1/kvrag", headers=header).json()["index"] == "index"


@pytest.mark.parametrize("policy", ["two_stage", "none", "seam", "query:ratio=0.2"])
def test_ways_to_answer_cost_more_the_closer_they_are_to_full_prefill(
    rag: Rag, monkeypatch: pytest.MonkeyPatch, policy: str
) -> None:
    engine = KVEngine(rag.index, policy=policy)
    monkeypatch.setattr(Prices, "known", lambda *_: None)
    found = about(engine, "model", "rag:index", 4, keeps_history=True, can_upload=False)
    assert {one.seconds for one in found.efforts} == {None}
    monkeypatch.setattr(Prices, "known", lambda *_: RowPrices((1, 1000), (0.001, 1.0)))
    found = about(engine, "model", "rag:index", 4, keeps_history=True, can_upload=False)
    ways = [one.options for one in found.efforts]
    assert ways[-1] == {"reuse": False}
    assert ways.index({}) == (policy != "none")
    for one in ways:
        Request("", **one).over(engine.defaults).recompute.choice()
    seconds = [one.seconds or 0.0 for one in found.efforts]
    assert seconds == sorted(seconds)
    assert 0 < seconds[0] < seconds[-1]


def test_a_chunk_in_its_document(long_served: Served) -> None:
    ids = long_served.engine.index.catalog.chunk_ids_of("log/ships.md")
    assert len(ids) > 8
    where = f"{long_served.url}/kvrag/chunks"
    for at, around, first, last in ((5, 2, 3, 7), (0, 3, 0, 3), (len(ids) - 1, 1, -2, -1)):
        body = httpx.get(f"{where}/{ids[at]}", params={"around": around}).json()
        assert body["chunk_id"] == ids[at]
        assert body["num_chunks"] == len(ids)
        found = [one["chunk_id"] for one in body["passages"]]
        assert found == ids[first:][: len(found)]
        assert found[-1] == ids[last]
    assert httpx.get(f"{where}/absent").status_code == 404
    assert httpx.get(f"{where}/{ids[0]}", params={"around": 21}).status_code == 400


def test_pages_of_other_sites_cannot_write(rag: Rag, served: Served) -> None:
    body = {"model": served.model, "prompt": "Ines", "max_tokens": 1}
    where = f"{served.url}/completions"
    own = served.server.url
    for origin in ("https://evil.example", "null", f"{own}0", f"{own}.evil.example"):
        refused = httpx.post(where, json=body, headers={"Origin": origin})
        assert refused.status_code == 403
        assert refused.json()["error"]["code"] == "wrong_origin"
    for headers in ({}, {"Origin": own}):
        assert httpx.post(where, json=body, headers=headers, timeout=60).status_code == 200
    known = "https://app.example"
    with serving(rag.index, ServerOptions(origins=[known])) as open_:
        sent = httpx.post(
            f"{open_.url}/completions", json=body, headers={"Origin": known}, timeout=60
        )
        assert sent.status_code == 200


# -- in a browser ----------------------------------------------------------------------------


@pytest.mark.slow
def test_asking_and_opening_a_source(new_page: NewPage, long_served: Served) -> None:
    page = new_page()
    ask(page, long_served, "the odd ship")
    cards = page.get_by_role("list").locator(".card")
    cards.first.wait_for()
    assert serious_findings(page) == []
    assert page.get_by_role("heading", name="the odd ship").is_visible()
    assert cards.locator(".number").all_inner_texts() == ["1", "2", "3", "4"]
    odd = page.get_by_role("button").filter(has_text="odd ship")
    odd.focus()
    page.keyboard.press("Enter")
    marked = page.locator("mark")
    marked.wait_for()
    # Markup of a document is text, and its scripts are not run.
    assert "<img src=x" in marked.inner_text()
    assert "<script>" in page.locator(".drawer-body").inner_text()
    assert page.locator(".passage").count() > 3
    assert page.locator(".passage img, .passage script").count() == 0
    assert page.title() == "index · kvrag"
    assert serious_findings(page) == []
    before = page.locator(".passage").count()
    page.get_by_role("button", name="Show what comes after").click()
    page.locator(".passage").nth(before).wait_for()
    page.keyboard.press("Escape")
    marked.wait_for(state="detached")
    assert "Answer complete" in page.get_by_role("status").inner_text()


WRITTEN = (
    """## What was found

Here every **ship that enters** is written. It is in `ships.md`, <b>as text</b>:

- *salt* and
  - [rope](https://example.org/)
1. snake_case_name

*Slanted to its end.*
"""
    + "\n" * 99
    + """

| ship | load |
|------|------|
| odd  | salt |

```
**code**
```"""
)


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_markdown_is_shown_as_meant_and_sentences_lead_to_their_passages(
    new_page: NewPage, served: Served, scheme: str
) -> None:
    page = new_page(color_scheme=scheme, viewport=PHONE)
    with saying(WRITTEN):
        ask(page, served, "Which ship?")
        page.locator(".cite").first.wait_for()
    answer = page.locator(".answer")
    for selector, text in {
        "h3": "What was found",
        "strong": "ship that enters",
        "p code": "ships.md",
        "ul > li > em": "salt",
        "ul ul > li": "[rope](https://example.org/)",
        "p > em": "Slanted to its end.",
        "th": "ship",
        "pre code": "**code**",
    }.items():
        assert answer.locator(selector).first.inner_text() == text, selector
    assert "<b>as text</b>" in answer.inner_text()
    assert "snake_case_name" in answer.inner_text()
    assert answer.locator("b, a, img").count() == 0
    assert "##" not in answer.inner_text()
    assert serious_findings(page) == []
    assert page.evaluate("document.documentElement.scrollWidth - innerWidth") <= 0
    number = page.locator(".cite").first
    assert (
        number.locator("xpath=..")
        .inner_text()
        .startswith("Here every ship that enters is written.")
    )
    if folder := os.environ.get(PICTURES):
        page.screenshot(path=f"{folder}/markdown-{scheme}.png")
    number.click()
    marked = page.locator("mark")
    marked.wait_for()
    assert marked.inner_text().startswith(f"Source {number.inner_text()}:")
    assert marked.inner_text().endswith("Every ship that enters is written into it.")
    passage = page.locator(".cited p:not(.place)").inner_text()
    assert len(marked.inner_text()) < len(passage)
    assert serious_findings(page) == []


@pytest.mark.slow
def test_passages_are_there_before_the_answer(new_page: NewPage, served: Served) -> None:
    with lasting() as released:
        page = new_page()
        ask(page, served, "Who keeps the ledger?")
        page.locator(".card").nth(3).wait_for()
        assert page.get_by_role("button", name="Stop").is_visible()
        assert serious_findings(page) == []
        released.set()
        page.get_by_text("The answer was cut").wait_for()
        assert page.locator(".card").count() == 4


@pytest.mark.slow
def test_an_answer_that_is_cut_and_a_second_question(new_page: NewPage, served: Served) -> None:
    page = new_page(viewport=PHONE, color_scheme="dark")
    asked: list[dict[str, Any]] = []
    page.on("request", lambda one: asked.append(one.post_data_json) if one.post_data else None)
    ask(page, served, "Who keeps the ledger?")
    page.get_by_text("The answer was cut after 16 tokens.").wait_for()
    assert serious_findings(page) == []
    answer = page.locator(".answer").inner_text()
    page.get_by_label("Your question").fill("And the clock?")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_text("The answer was cut").nth(1).wait_for()
    turns = asked[1]["messages"]
    assert [one["role"] for one in turns] == ["user", "assistant", "user"]
    assert turns[1]["content"].split() == answer.split()
    overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
    assert overflow <= 0
    page.get_by_role("button", name="Menu").click()
    assert serious_findings(page) == []
    page.get_by_role("button", name="New question").click()
    page.get_by_role("heading", name="Ask index").wait_for()


@pytest.mark.slow
def test_stopping_an_answer(new_page: NewPage, served: Served) -> None:
    with lasting():
        page = new_page()
        ask(page, served, "Who?")
        page.get_by_text("on and on").wait_for()
        page.get_by_role("button", name="Stop").click()
        page.get_by_text("You stopped this answer.").wait_for()
        wait_until(lambda: metric(served, "kvrag_server_answers_open") == 0)
        page.get_by_role("button", name="Ask", exact=True).wait_for()


@pytest.mark.slow
def test_a_full_queue_a_stopped_server_and_another_try(new_page: NewPage, rag: Rag) -> None:
    page = new_page()
    page.clock.install()
    with serving(rag.index) as served:
        busy = {
            "status": 503,
            "headers": {"Retry-After": "7"},
            "json": {"error": {"message": "128 answers are waiting"}},
        }
        page.route("**/v1/chat/completions", lambda route: route.fulfill(**busy))
        ask(page, served, "Who keeps the ledger?")
        page.get_by_role("alert").get_by_text("128 answers are waiting.").wait_for()
        again = page.get_by_role("button", name=re.compile("Try again in \\d s"))
        assert again.is_disabled()
        assert serious_findings(page) == []
        page.unroute("**/v1/chat/completions")
        page.clock.run_for(9000)
        page.get_by_role("button", name="Try again", exact=True).click()
        page.locator(".card").first.wait_for()
    page.get_by_label("Your question").fill("And now?")
    page.keyboard.press("Enter")
    page.get_by_text("The server does not answer").wait_for()


@pytest.mark.slow
def test_what_went_wrong_is_in_sight_and_is_told_again(new_page: NewPage, rag: Rag) -> None:
    history_path(rag.path).unlink(missing_ok=True)
    with serving(rag.index, ServerOptions(keeps_history=True)) as served:
        page = new_page(viewport={"width": 390, "height": 400})
        page.route("**/v1/chat/completions", lambda route: route.abort())
        ask(page, served, "Who? " * 60)
        page.get_by_role("alert").wait_for()
        field = page.get_by_label("Your question").bounding_box()
        bounds = page.get_by_role("alert").bounding_box()
        assert 0 <= bounds["y"] <= field["y"] - bounds["height"]
        page.locator(".conversation").wait_for(state="attached")
        page.reload()
        page.get_by_role("button", name="Menu").click()
        page.locator(".conversation").click()
        page.get_by_text("This answer was not finished.").wait_for()
        assert page.get_by_text("The model said nothing").count() == 0
        page.unroute("**/v1/chat/completions")
        page.get_by_role("button", name="Try again").click()
        page.locator(".card").first.wait_for()
        assert page.get_by_text("This answer was not finished.").count() == 0


@pytest.mark.slow
def test_a_key_is_asked_for_and_kept_by_the_tab(new_page: NewPage, rag: Rag) -> None:
    key = ApiKey(name="ada", key="key-of-ada-0123456789")
    with serving(rag.index, ServerOptions(keys=[key])) as served:
        page = new_page()
        page.goto(f"{served.server.url}/")
        page.get_by_label("Key", exact=True).fill("wrong")
        assert serious_findings(page) == []
        page.keyboard.press("Enter")
        page.get_by_text("The server does not know the key").wait_for()
        page.get_by_label("Key", exact=True).fill(key.key)
        page.get_by_role("button", name="Continue").click()
        page.get_by_label("Your question").wait_for()
        page.reload()
        page.get_by_label("Your question").wait_for()
        assert page.evaluate("[localStorage.length, document.cookie]") == [0, ""]
        other = page.context.new_page()
        other.goto(f"{served.server.url}/")
        other.get_by_label("Key", exact=True).wait_for()
        other.get_by_role("button", name="Cancel").click()
        other.get_by_text("Without a key").wait_for()


@pytest.mark.slow
def test_the_report_and_another_answer_beside_the_first(
    new_page: NewPage, long_served: Served
) -> None:
    page = new_page()
    asked: list[dict[str, Any]] = []
    page.on("request", lambda one: asked.append(one.post_data_json) if one.post_data else None)
    ask(page, long_served, "What of the odd ship")
    page.locator(".report > summary").click()
    report = page.locator(".report")
    assert report.locator(".cell").count() > 3
    numbers = report.locator(".legend b").all_inner_texts()
    total = sum(int(one.split()[0].replace(",", "")) for one in numbers)
    answered = page.locator(".report > summary").inner_text()
    assert f" of {total} tokens reused" in answered
    # All tokens are in the strip, and all stages sum to the first token.
    assert report.get_by_role("img").get_attribute("aria-label").startswith(f"{total} tokens")
    assert report.get_by_text("Full prefill (estimate)").is_visible()
    page.get_by_text("Where the tokens come from").click()
    assert report.get_by_role("cell", name=re.compile("ships.md, passage [1-9]")).first.is_visible()
    page.get_by_text("The prompt's text, coloured").click()
    assert "the odd ship" in report.locator(".prompt-text").inner_text()
    assert serious_findings(page) == []
    page.get_by_text("How to answer").click()
    slider = page.get_by_label("From faster to closest to full prefill")
    page.get_by_text("Details", exact=True).click()
    for key, way, policy, wanted in (
        ("Home", "stored text as it is", "none", {"policy": "none"}),
        ("ArrowRight", "balanced", "two_stage", {}),
        ("End", "full prefill", "two_stage", {"reuse": False}),
    ):
        slider.press(key)
        assert slider.get_attribute("aria-valuetext") == way
        assert page.get_by_label("Repair policy").is_disabled() == (way[0] in "sf")
        assert page.get_by_text(f"How to answer: {way}, 4 passages").is_visible()
        page.get_by_role("button", name="Ask again", exact=True).click()
        report.get_by_text(f"Policy: {policy}").wait_for(state="attached")
        page.get_by_role("button", name="Ask", exact=True).wait_for()
        told = {"report", "explain", "found"}
        assert {k: v for k, v in asked[-1]["kvrag"].items() if k not in told} == wanted
    assert page.get_by_text("0 of").first.is_visible()
    slider.press("ArrowLeft")
    page.get_by_label("Repair policy").select_option("query")
    page.get_by_label("Passages to read").fill("2")
    page.get_by_label("Passages to read").blur()
    page.get_by_text("How to answer: 50 % computed again, query, 2 passages").wait_for()
    assert serious_findings(page) == []


@pytest.mark.slow
def test_an_example_an_edited_question_and_a_long_one(new_page: NewPage, tmp_path: Path) -> None:
    text = (
        "# Geese\n\nThe keeper feeds grey geese at noon.\n\n# Who keeps the ledger?\n\nInes does."
    )
    with make_index(tmp_path, chunk_tokens=16) as index:
        index.add([Document(source="a.md", text=text), Document(source="b.md", text=text[:50])])
        with serving(index, ServerOptions(keeps_history=True)) as served:
            page = new_page(viewport=PHONE)
            asked: list[dict[str, Any]] = []
            page.on(
                "request", lambda one: one.method == "POST" and asked.append(one.post_data_json)
            )
            page.goto(f"{served.server.url}/")
            page.get_by_role("button", name="Who keeps the ledger?").wait_for()
            assert serious_findings(page) == []
            page.get_by_role("button", name="Tell me about “Geese”.").click()
            page.get_by_role("button", name="Bad answer").click()
            page.get_by_role("button", name="Good answer").click()
            assert page.get_by_role("button", pressed=True).get_attribute("title") == "Good answer"
            field = page.get_by_label("Your question")
            field.fill("x" * 20_001)
            page.get_by_text("This has 20,001 characters").wait_for()
            page.keyboard.press("Enter")
            assert serious_findings(page) == []
            field.fill("And then?")
            assert page.get_by_text("This has 20,001").count() == 0
            page.keyboard.press("Enter")
            page.get_by_role("button", name="Ask again", exact=True).nth(1).wait_for()
            assert len(asked) == 2
            page.reload()
            page.get_by_role("button", name="Menu").click()
            page.locator(".conversation").click()
            assert page.get_by_role("button", pressed=True).get_attribute("title") == "Good answer"
            page.get_by_role("button", name="Edit the question").first.click()
            assert serious_findings(page) == []
            page.get_by_role("textbox", name="Edit the question").fill("Where are the geese?")
            page.keyboard.press("Enter")
            page.get_by_role("heading", name="Where are the geese?").wait_for()
            page.get_by_role("button", name="Good answer").wait_for()
            turns = [one["content"] for one in asked[-1]["messages"]]
            assert turns == ["Where are the geese?"]
            assert page.locator(".turn").count() == 1
            assert page.get_by_role("button", pressed=True).count() == 0


@pytest.mark.slow
def test_an_answer_is_checked_against_full_prefill(
    new_page: NewPage, long_served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = new_page()
    ask(page, long_served, "the odd ship")
    page.get_by_role("button", name="Check").click()
    said = page.locator("p.note")
    said.filter(has_text=re.compile("Full prefill (says the same|differs)")).wait_for()
    assert page.get_by_text("Asked again, the answer was another").count() == 0
    other = Verdict("two_stage", num_tokens=9, num_agreed=7, num_same=2, kl=0.1, instead="No ship")
    monkeypatch.setattr("kvrag.server.service.verify", lambda *_: other)
    page.get_by_role("button", name="Check").click()
    said.filter(has_text="differs from token 3, and agrees on 7 of 9 tokens.").wait_for()
    assert "No ship" in page.locator(".version").nth(1).inner_text()
    assert serious_findings(page) == []


def test_a_check_waits_for_nobody(served: Served) -> None:
    where = f"{served.url}/kvrag/verify"
    turns = [{"role": "user", "content": "Who keeps the ledger?"}]
    body = {"model": served.rag, "messages": turns, "max_tokens": 4}
    found = httpx.post(where, json=body, timeout=60).json()
    assert found["num_agreed"] <= found["num_tokens"] <= 5
    assert found["is_same"] == (found["instead"] is None)
    assert httpx.post(where, json=body | {"n": 2}).status_code == 400
    with lasting(), httpx.Client() as http:
        path = f"{served.url}/chat/completions"
        with http.stream("POST", path, json=body | {"stream": True}, timeout=60):
            refused = httpx.post(where, json=body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (503, "5")
    wait_until(lambda: metric(served, "kvrag_server_answers_open") == 0)


@pytest.mark.slow
def test_conversations_are_kept_found_renamed_exported_and_deleted(
    new_page: NewPage, rag: Rag
) -> None:
    history_path(rag.path).unlink(missing_ok=True)
    with serving(rag.index, ServerOptions(keeps_history=True)) as served:
        page = new_page()
        ask(page, served, "Who keeps the ledger?")
        first = page.get_by_role("button", name="Who keeps the ledger?", exact=True)
        first.wait_for()
        page.get_by_role("button", name="New question").click()
        page.get_by_label("Your question").fill("Where is the fox?")
        page.keyboard.press("Enter")
        fox = page.get_by_role("button", name="Where is the fox?", exact=True)
        fox.wait_for()
        assert fox.get_attribute("aria-current") == "true"
        assert serious_findings(page) == []
        page.reload()
        first.click()
        page.get_by_role("heading", name="Who keeps the ledger?").wait_for()
        assert page.locator(".card").count() == 4
        page.get_by_label("Search conversations").fill("fox")
        first.wait_for(state="detached")
        page.get_by_role("button", name="More about Where is the fox?").click()
        assert serious_findings(page) == []
        with page.expect_download() as saved:
            page.get_by_role("button", name="Export as Markdown").click()
        text = Path(saved.value.path()).read_text()
        assert text.startswith("# Where is the fox?\n\n## Where is the fox?\n\n")
        assert "\n4. " in text
        page.get_by_role("button", name="More about Where is the fox?").click()
        page.get_by_role("button", name="Rename").click()
        page.get_by_label("Title").fill("Foxes")
        page.keyboard.press("Enter")
        page.get_by_role("button", name="Foxes", exact=True).wait_for()
        page.get_by_role("button", name="More about Foxes").click()
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        page.get_by_text("Nothing found.").wait_for()
        page.get_by_label("Search conversations").fill("")
        first.wait_for()
    history_path(rag.path).unlink()


@pytest.mark.slow
def test_documents_are_listed_added_and_deleted(new_page: NewPage, tmp_path: Path) -> None:
    (tmp_path / "geese.md").write_text("The keeper feeds three grey geese at noon.")
    (tmp_path / "broken.pdf").write_text("no PDF")
    with make_index(tmp_path) as index, serving(index, ServerOptions(can_upload=True)) as served:
        page = new_page()
        page.goto(f"{served.server.url}/")
        page.get_by_role("button", name="Documents").click()
        page.get_by_text("There are no documents yet.").wait_for()
        assert serious_findings(page) == []
        files = [tmp_path / "broken.pdf", tmp_path / "geese.md"]
        page.get_by_label("Choose files").set_input_files(files)
        page.get_by_role("alert").wait_for()
        page.get_by_text("geese.md was added.").wait_for()
        page.get_by_text("1 passage, ").wait_for()
        assert serious_findings(page) == []
        again = page.get_by_role("button", name="Read geese.md again")
        again.click()
        page.get_by_text("geese.md is as it was before.").wait_for()
        (uploads_path(index.path) / "geese.md").write_text("She feeds seven white swans at dusk.")
        again.click()
        page.get_by_text("geese.md has changed, and was read again.").wait_for()
        assert "seven white swans" in index.search("swans", 1)[0].chunk.text
        page.keyboard.press("Escape")
        page.get_by_text("1 document, 1 passage").wait_for()
        page.get_by_role("heading", name="Ask index").wait_for()
        page.get_by_role("button", name="Documents").click()
        page.get_by_role("button", name="Delete geese.md").click()
        page.get_by_role("button", name="Delete", exact=True).click()
        page.get_by_text("There are no documents yet.").wait_for()
        assert index.documents() == []
        index.add([Document(source="note", text="A note that no file holds.")])
        page.keyboard.press("Escape")
        page.get_by_role("button", name="Documents").click()
        page.get_by_role("button", name="Delete note").wait_for()
        assert page.get_by_role("button", name="Read note again").count() == 0
        (tmp_path / "birds" / "grey").mkdir(parents=True)
        (tmp_path / "birds" / ".hidden.md").write_text("Nobody reads this.")
        for one in ("swans.md", "grey/swans.md"):
            (tmp_path / "birds" / one).write_text(f"Swans of {one}.")
        page.get_by_label("Choose a folder").set_input_files(tmp_path / "birds")
        page.get_by_text("birds - swans.md was added.").wait_for()
        page.get_by_text("birds - grey - swans.md was added.").wait_for()
        page.keyboard.press("Escape")
        page.evaluate(DROP)
        page.get_by_text("dropped.md was added.").wait_for()
        assert len(index.documents()) == 4
        page.evaluate(UNREADABLE)
        page.get_by_text("The browser could not read all of ducks.").wait_for()


# What a browser does when a person drops a file.
DROP = """() => {
  const dropped = new DataTransfer();
  dropped.items.add(new File(["Ducks."], "dropped.md"));
  document.body.dispatchEvent(new DragEvent("drop", {dataTransfer: dropped, bubbles: true}));
}"""
# The same of a folder that is gone.
UNREADABLE = """() => {
  const readEntries = (_, failed) => failed(new DOMException("gone"));
  const folder = {isDirectory: true, name: "ducks", createReader: () => ({readEntries})};
  const items = [{webkitGetAsEntry: () => folder, getAsFile: () => null}];
  const dropped = new Event("drop", {bubbles: true, cancelable: true});
  document.body.dispatchEvent(Object.assign(dropped, {dataTransfer: {types: ["Files"], items}}));
}"""


@pytest.mark.slow
def test_a_server_without_uploads_says_so(new_page: NewPage, served: Served) -> None:
    page = new_page()
    page.goto(f"{served.server.url}/")
    page.get_by_role("button", name="Documents").click()
    page.get_by_text("This server takes no documents from here.").wait_for()
    page.get_by_text("kvrag serve --index index --allow-upload").wait_for()
    page.locator(".document").get_by_text("ledger").wait_for()
    assert page.get_by_label("Choose files").count() == 0
    assert serious_findings(page) == []
    assert page.get_by_role("button", name=re.compile("Delete")).count() == 0
