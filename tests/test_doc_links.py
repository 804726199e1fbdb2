"""Links between the pages: every file and every heading that one names is there."""

import re
from pathlib import Path

import kvrag

ROOT = Path(kvrag.__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])


def anchors(page: Path) -> set[str]:
    """Return the names that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere_and_pictures_are_markdown() -> None:
    for page in PAGES:
        text = page.read_text("utf-8")
        # The site holds only the files that Markdown names.
        assert not re.findall(r"<(?:img|source|video|object)\b.*", text), page
        for target in re.findall(r"\]\(([^)]+)\)", text):
            if "://" in target:
                continue
            name, _, anchor = target.partition("#")
            other = (page.parent / name) if name else page
            assert other.exists(), f"{page}: {target}: no such file"
            assert not anchor or anchor in anchors(other), f"{page}: {target}: no such heading"


def test_every_public_name_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "python.md").read_text("utf-8")
    assert set(kvrag.__all__) <= set(re.findall(r"^\.\. auto\w+:: (\w+)$", page, re.MULTILINE))


def named_pages(page: Path) -> set[Path]:
    """Return the pages that a page links to, or lists in the site's contents."""
    text = page.read_text("utf-8")
    targets = re.findall(r"\]\(([^)#:]+\.md)[^)]*\)", text)
    for contents in re.findall(r"^```{toctree}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        lines = [line for line in contents.splitlines() if line and not line.startswith(":")]
        targets += [re.sub(r".*<(.*)>", r"\1", line) + ".md" for line in lines]
    return {(page.parent / target.partition("#")[0]).resolve() for target in targets}


def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    known = {ROOT / "README.md"}
    while True:
        targets = {target for page in known for target in named_pages(page)}
        if not (found := targets - known):
            break
        known |= found
    assert set(PAGES) - known <= {ROOT / "CHANGELOG.md"}
