"""Pages and e-books as a reader sees them."""

import io
import time
import zipfile

import pytest

from kvrag.ingest.html import html_to_text
from kvrag.ingest.loaders import load_bytes
from tests.support import office

CASES = {
    "a page": (
        "<body><style>p{}</style><nav>Home</nav><h2>The  clock</h2><p>Tomas <b>repairs</b>\n it."
        "<br>Daily.</p><script>x</script><ul><li>one<li>two</ul><pre>\n  a\n\n  b\n</pre>",
        "Home\n\n## The clock\n\nTomas repairs it.\nDaily.\n\n- one\n- two\n\n  a\n\n  b",
    ),
    "odd markup": (
        "<p>a</q></b></div></p>b<!-- c --><svg><text>no</text></svg><p>d",
        "a\n\nb\n\nd",
    ),
    "a second title": ("<body><title>no</title><p>x", "x"),
    "an empty cell": ("<table><tr><td></td><td>b</td></tr><tr><td>c<td><p>d</table>", "| b\nc | d"),
    "corner": (
        "<table><tr><th></th><th>2022</th><th>2023</th></tr>"
        "<tr><th>Revenue</th><td>11</td><td>22</td></tr></table>",
        "| 2022 | 2023\nRevenue | 11 | 22",
    ),
    "rowspan": (
        "<table><tr><th>Region<th>Product<th>Units<tr><td rowspan=2>EU<td>Cable<td>12"
        "<tr><td>Hub<td>7<tr><td>US<td>Cable<td>3</table>",
        "Region | Product | Units\nEU | Cable | 12\nEU | Hub | 7\nUS | Cable | 3",
    ),
    "rowspan at the end of a row": (
        "<table><tr><td>a<td rowspan=2>both<tr><td>b</table>",
        "a | both\nb | both",
    ),
    "rowspan to the end": ("<table><tr><td rowspan=0>a<td>1<tr><td>2</table>", "a | 1\na | 2"),
    "rowspan beyond its group": (
        "<table><thead><tr><th rowspan=9>a<th>b</thead><tbody><tr><td>1<td>2</tbody></table>",
        "a | b\n1 | 2",
    ),
    "colspan": (
        "<table><tr><td colspan=2>Total<td>5<tr><td>a<td>b<td>c</table>",
        "Total |  | 5\na | b | c",
    ),
    "both spans": (
        "<table><tr><td rowspan=2 colspan=2>M<td>1<tr><td>2<tr><td>a<td>b<td>c</table>",
        "M |  | 1\nM |  | 2\na | b | c",
    ),
    "blocks in cells": (
        "<table><tr><td><p>Day</p></td><td><p>Opens</p></td></tr>"
        "<tr><td><p>Monday</p><p>to Friday</p></td><td>9<br>18</td></tr></table>",
        "Day | Opens\nMonday to Friday | 9 18",
    ),
    "lists in cells": (
        "<table><tr><td>Gas<td><ol><li>Off<li>Leave</ol><tr><td>b<td>c</table>",
        "Gas | 1. Off 2. Leave\nb | c",
    ),
    "heading in a cell of a row": (
        "<table><tr><th><h3>a</h3><th>b<tr><td>1<td>2</table>",
        "a | b\n1 | 2",
    ),
    "tables that arrange a page": (
        "<table><tr><td><h1>Page</h1><p>One<table><tr><td>a<td>b<tr><td>c<td>d</table><td>side</table>",
        "# Page\n\nOne\n\na | b\nc | d\n\nside",
    ),
    "caption": (
        "<table><caption>Ships</caption><tr><td>a<td>b</table>after",
        "Ships\n\na | b\n\nafter",
    ),
    "items with paragraphs": (
        "<ol><li><p>Turn off the gas.</p><li><p>Leave.</p><p>Now.</p></ol><p>End",
        "1. Turn off the gas.\n2. Leave.\n  Now.\n\nEnd",
    ),
    "numbers": (
        "<ol start=3 type=a><li>x<ul><li>y<li>z</ul><li value=9>w</ol><ol type=I><li>p<li>q</ol>",
        "c. x\n  - y\n  - z\ni. w\n\nI. p\nII. q",
    ),
    "numbers that count down": ("<ol reversed><li>x<li>y</ol>", "- x\n- y"),
    "hidden items do not count": ("<ol><li>a<li hidden>b<li>c</ol>", "1. a\n2. c"),
    "heading in an item": ("<ol><li><h3>Gas</h3><p>Off.</ol>", "### 1. Gas\n\n  Off."),
    "hidden": (
        "<p>Open.<p hidden>One<p style='color:red; DISPLAY : none'>Two<div hidden=''><p>Three</div>"
        "<p style='visibility:hidden'>Four<dialog>Five</dialog><span hidden>Six</span>"
        "<p hidden=until-found>Found.<dialog open>Said.</dialog><p style='x-display:none'>Kept.",
        "Open.\n\nFound.\n\nSaid.\n\nKept.",
    ),
    "ruby": (
        "<p><ruby>東<rp>(</rp><rt>とう</rt><rp>)</rp>京<rt>きょう</rt></ruby>に<ruby>行<rt>い</ruby>く",
        "東京(とうきょう)に行(い)く",
    ),
    "ruby with bases": ("<ruby><rb>東<rb>京<rt>とう<rt>きょう</ruby>に", "東京(とうきょう)に"),
    "ruby of several words": ("<ruby>OJT<rt> On the\njob </rt></ruby> is", "OJT(On the job) is"),
    "numbers without a kind": ("<ol type=''><li>a<li>b</ol>", "1. a\n2. b"),
    "words of forms": (
        "<fieldset><legend>Name</legend>Ada</fieldset><select><option>Riga<option>Varn</select>",
        "Name\n\nAda\n\nRiga\n\nVarn",
    ),
    "soft hyphens": ("<p>har&shy;bour", "harbour"),
    "hashes in preformatted text": ("<pre># install\nrun</pre>", "```\n# install\nrun\n```"),
    "a heading that nothing ends": (
        "<h1>" + "long " * 100 + "<div>text</div>",
        "# " + "long " * 99 + "long\n\ntext",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_pages_are_as_they_are_seen(name: str) -> None:
    markup, text = CASES[name]
    assert html_to_text("a.html", markup)[1] == text


def test_a_page_that_its_script_will_show_is_read() -> None:
    assert html_to_text("a.html", "<body style='display:none'><p>Open.")[1] == "Open."


def test_books_are_read_as_pages_are() -> None:
    markups, texts = zip(*(CASES[name] for name in CASES if "ends" not in name), strict=True)
    for markup, text in zip(markups, texts, strict=True):
        (book,) = load_bytes("/docs/a.epub", office.epub_bytes(markup))
        assert book.text == f"{text}\n\n## Its maker\n\nTomas"
        assert book.metadata == {"title": "Varn by the sea"}


def test_pages_of_books_may_have_odd_names_and_declare_their_encoding() -> None:
    container = '<container><rootfiles><rootfile full-path="b/c.opf"/></rootfiles></container>'
    package = (
        '<package xmlns="http://www.idpf.org/2007/opf"><manifest>'
        '<item id="a" href="text/first%20page.xhtml"/></manifest>'
        '<spine><itemref idref="a"/></spine></package>'
    )
    page = '<?xml version="1.0" encoding="iso-8859-1"?><html><body><p>Zürich</p></body></html>'
    files = {
        "META-INF\\container.xml": container,
        "b/c.opf": package,
        "b/text/First page.xhtml": page.encode("latin-1"),
    }
    (book,) = load_bytes("/docs/a.epub", office.archive_bytes(files))
    assert book.text == "Zürich"


def test_what_a_book_names_and_lacks_costs_nothing_else() -> None:
    package = (
        '<package><manifest><item id="b" href="b.xhtml"/><item id="lost" href="lost.xhtml"/>'
        '<item id="cover" href="cover.jpg" media-type="image/jpeg"/></manifest><spine>'
        '<itemref idref="nowhere"/><itemref idref="cover"/><itemref idref="lost"/>'
        '<itemref idref="b"/></spine></package>'
    )
    packed = io.BytesIO(office.epub_bytes(package=package))
    with zipfile.ZipFile(packed, "a") as archive:
        archive.writestr("b/cover.jpg", b"\xff\xd8\xff\xe0")
    (book,) = load_bytes("/docs/a.epub", packed.getvalue())
    assert book.text == "# The clock\n\nIt ticks."


@pytest.mark.parametrize(
    "markup",
    [
        "<table>" + "<tr>" + "<td rowspan=65534 colspan=999>a" * 2_000 + "<tr><td>b" * 20_000,
        "<table>" + "".join(f"<tr><td colspan={n}>a<td>b" for n in range(1, 3_000)),
        "<table><tr><td rowspan=60000>" + "long " * 200_000 + "<tr><td>b" * 20_000,
        "<table><tr><td>a<td>" * 1_000 + "text " * 400_000,
        "<ul><li>" * 2_000 + "x<p>y" * 5_000,
        "<ruby>a<rt>b" * 1_000,
        "<h1>" * 2_000 + "x " * 100_000,
    ],
)
def test_spans_and_lists_cost_no_more_than_their_text(markup: str) -> None:
    started = time.process_time()
    text = html_to_text("a.html", markup)[1]
    assert len(text) < 40 * len(markup)
    assert time.process_time() - started < 20
