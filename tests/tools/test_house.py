"""How far a reader of a step has to walk, and how large files are: it may not grow unnoticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest

from opacus.optimizers import step_guard
from tests.tools.classes import sizes, too_large
from tests.tools.step_walk import PACKAGE, walk_of

MANIFEST = Path(__file__).parents[1] / "api" / "opacus-1.6.0-api.json"
# Classes whose size is watched, and the methods that each may have beyond Opacus' own.
MOST_METHODS = {
    "opacus.core.record.recorder.Recorder": 12,
    "opacus.core.record.taps.Taps": 12,
    "opacus.core.record.hooks.LayerHooks": 12,
    "opacus.core.norms.ledger.NormLedger": 12,
    "opacus.core.sums.strategy.Ghost": 12,
    "opacus.optimizers.optimizer.DPOptimizer": 12,
}
# No class has more.
MOST_OF_ANY = 25


@pytest.mark.parametrize(
    ("mode", "files", "moves", "returns"), [("ghost_bk", 66, 425, 80), ("hooks", 55, 490, 140)]
)
def test_a_step_of_eight_layers_stays_readable(
    mode: str, files: int, moves: int, returns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Each step of an optimizer looks at all private ones, those of other tests, too.
    monkeypatch.setattr(step_guard, "_GUARDED", WeakSet())
    walk = walk_of(mode)
    assert 10 < len(walk.files) <= files
    assert 100 < walk.moves <= moves, walk.files.most_common(20)
    assert walk.returns <= returns
    if mode == "ghost_bk":
        stays, back = walk.one_backward()
        assert 5 < stays <= 12 and back <= 4


def test_files_end_where_ideas_part() -> None:
    lengths = {path: len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert len(lengths) > 100
    assert {str(path): n for path, n in lengths.items() if n >= 430} == {}


def opacus_own() -> dict[str, set[str]]:
    """Methods and properties that Opacus' interface demands of a class, by its name."""
    modules: dict[str, Any] = json.loads(MANIFEST.read_text())["modules"]
    return {
        f"{module}.{name}": set(entry["members"])
        for module, content in modules.items()
        for name, entry in content["names"].items()
        if entry["kind"] == "class"
    }


def test_classes_hold_one_idea() -> None:
    forced = opacus_own()
    assert {"step", "zero_grad"} <= forced["opacus.optimizers.optimizer.DPOptimizer"]
    classes = sizes(PACKAGE)
    assert len(classes) > 200 and too_large(classes, most=MOST_OF_ANY, forced=forced) == {}
    own = {c.name: len(c.methods - forced.get(c.name, set())) for c in classes}
    watched = {name: own[name] for name in MOST_METHODS}
    assert all(n >= 5 for n in watched.values())
    assert {name: n for name, n in watched.items() if n > MOST_METHODS[name]} == {}


def test_a_large_class_is_found(tmp_path: Path) -> None:
    methods = "\n".join(f"    def m{i}(self): self.a{i} = self.b.c = 1" for i in range(4))
    (tmp_path / "p").mkdir()
    (tmp_path / "p" / "__init__.py").write_text(f"class Large:\n{methods}\n")
    (found,) = sizes(tmp_path / "p")
    assert (found.name, len(found.methods), len(found.attributes)) == ("p.Large", 4, 4)
    assert found.writes == {"self.b.c"}
    assert too_large([found], most=3, forced={}) == {"p.Large": ["m0", "m1", "m2", "m3"]}
    assert too_large([found], most=3, forced={"p.Large": {"m1"}}) == {}
