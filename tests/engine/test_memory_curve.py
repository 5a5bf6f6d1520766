"""The curve of time over memory, and what explain() says of both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from opacus.memory_curve import load, main
from tests.helpers.replayed_blocks import build, private, step

BUILD = """
from tests.helpers import replayed_blocks as one

def build():
    made = one.private(one.build(), 0.2)
    return made[0], lambda: one.step(made)
"""


def test_one_command_measures_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    script, rows, picture = (tmp_path / name for name in ("b.py", "rows.json", "curve.png"))
    script.write_text(BUILD)
    files = ["--json", str(rows), "--plot", str(picture)]
    main([f"{script}:build", "--limits", "1,0", "--steps", "1", *files])
    whole, none = json.loads(rows.read_text())
    assert "replay" not in whole["ways"] and none["ways"]["replay"] == 12
    assert whole["ms"] > 0 and none["ms"] > 0 and whole["limit_gib"] == 1
    assert "12 replay" in capsys.readouterr().out
    assert picture.stat().st_size > 1000
    with pytest.raises(ValueError, match="has no function 'other'"):
        load(f"{script}:other")


def test_a_file_that_is_not_there_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["nowhere.py:build"])
    assert "there is no Python file 'nowhere.py'" in capsys.readouterr().err


def test_a_budget_is_a_number_of_bytes() -> None:
    module = private(build(), 0.2)[0]
    for budget in (-1, "8GB"):
        with pytest.raises(ValueError, match=f"held_budget must be a number of bytes.*{budget}"):
            module.held_budget = budget


def test_explain_says_what_was_predicted_and_measured() -> None:
    made = private(build(), 0.2)
    made[0].held_budget = 0
    step(made)
    said = made[0].explain()
    assert "12 replay" in said and "Held until the sum:" in said
    assert "ms predicted (" in said and "replay 0.0" in said
    assert "Measured: backward pass with norms" in said
