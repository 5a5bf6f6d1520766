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


NAMED = re.compile(r"`(\w[\w./-]*\.(?:py|md))`")
PRINTED = re.compile(r"^# (\w+\.py)$", re.MULTILINE)  # files whose content a page shows


def missing(page: Path, text: str) -> list[str]:
    """Files named in a page that are not there, whichever folder their names start from."""
    found = set(NAMED.findall(FENCE.sub("", text))) - set(PRINTED.findall(text))
    if page.name == "privacy.md":
        return sorted(name for name in found if not (ROOT / "opacus" / name).exists())
    return sorted(name for name in found if not any(f"/{f}".endswith(f"/{name}") for f in FILES))


FILES = [
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", *(f"{folder}/**/*.*" for folder in ("docs", "examples", "memory_test")))
    for path in ROOT.glob(pattern)
] + [p.relative_to(ROOT).as_posix() for f in ("opacus", "tests") for p in ROOT.glob(f"{f}/**/*.py")]


@pytest.mark.parametrize("page", [p for p in PAGES if p.name != "CHANGELOG.md"], ids=str)
def test_files_named_in_a_page_exist(page: Path) -> None:
    assert missing(ROOT / page, (ROOT / page).read_text("utf-8")) == []


def test_a_missing_file_is_found() -> None:
    page = ROOT / "docs" / "privacy.md"
    assert missing(page, "see `core/nowhere.py`, `version.py`") == ["core/nowhere.py"]
    assert missing(ROOT / "README.md", "`nowhere.py`, `core/step/modes.py`") == ["nowhere.py"]


# Half the words, twice the use: docs and the Markdown of memory_test together, and single pages.
MOST_WORDS = {"docs/privacy.md": 1200, "docs/sharp_edges.md": 1000, "docs/performance.md": 700}
MOST_WORDS_TOGETHER = 20_000


def test_pages_are_short() -> None:
    words = {str(p): len((ROOT / p).read_text("utf-8").split()) for p in PAGES}
    assert not {page for page, most in MOST_WORDS.items() if words[page] > most}
    counted = [n for page, n in words.items() if page.startswith(("docs/", "memory_test/"))]
    assert len(counted) > 20
    assert sum(counted) <= MOST_WORDS_TOGETHER
