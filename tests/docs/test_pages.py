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
