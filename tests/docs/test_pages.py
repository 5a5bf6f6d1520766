"""Pages link to what exists, and their Python can at least be parsed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    path.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "docs/zh/*.md", "examples/*.md", "memory_test/**/*.md")
    for path in sorted(ROOT.glob(pattern))
]
FENCE = re.compile(r"^```(\w*).*?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub and MyST name them."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in headings}


def broken(page: Path, text: str) -> list[str]:
    found = []
    for link in LINK.findall(FENCE.sub("", text)):
        if "://" in link or link.startswith("mailto:"):
            continue
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    assert broken(ROOT / page, (ROOT / page).read_text("utf-8")) == []


@pytest.mark.parametrize("link", ["nowhere.md", "design.md#nowhere"])
def test_a_broken_link_is_found(link: str) -> None:
    assert broken(ROOT / "docs" / "index.md", f"see [this]({link})") == [link]


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_python_can_be_parsed(page: Path) -> None:
    for language, code in FENCE.findall((ROOT / page).read_text("utf-8")):
        if language == "python":
            compile(code, str(page), "exec")


# Half the words, twice the use: docs and the Markdown of memory_test together, and single pages.
MOST_WORDS = {"docs/privacy.md": 1200, "docs/sharp_edges.md": 1000}
MOST_WORDS_TOGETHER = 20_000


def test_pages_are_short() -> None:
    words = {str(p): len((ROOT / p).read_text("utf-8").split()) for p in PAGES}
    assert not {page for page, most in MOST_WORDS.items() if words[page] > most}
    counted = [n for page, n in words.items() if page.startswith(("docs/", "memory_test/"))]
    assert len(counted) > 20
    assert sum(counted) <= MOST_WORDS_TOGETHER
