"""How far a reader of a step has to walk, and how large files are: it may not grow unnoticed."""

from __future__ import annotations

import pytest

from tests.tools.step_walk import PACKAGE, walk_of


@pytest.mark.parametrize(
    ("mode", "files", "moves", "returns"), [("ghost_bk", 70, 540, 100), ("hooks", 60, 520, 150)]
)
def test_a_step_of_eight_layers_stays_readable(
    mode: str, files: int, moves: int, returns: int
) -> None:
    walk = walk_of(mode)
    assert 10 < len(walk.files) <= files
    assert 100 < walk.moves <= moves, walk.files.most_common(20)
    assert walk.returns <= returns


def test_files_end_where_ideas_part() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lengths) > 100
    assert {str(path): n for path, n in lengths.items() if n >= 450} == {}
