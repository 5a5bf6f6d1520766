"""The picture of a run's curves."""

from __future__ import annotations

from pathlib import Path

import curves
import pytest

pytest.importorskip("matplotlib")


@pytest.fixture
def logdir(tmp_path: Path) -> Path:
    """Two curves, one of which is not drawn."""
    writer = pytest.importorskip("torch.utils.tensorboard").SummaryWriter(str(tmp_path / "logs"))
    for step in (1, 2, 3):
        writer.add_scalar("loss", 1 / step, step)
        writer.add_scalar("lr", 0.1, step)
    writer.close()
    return tmp_path / "logs"


def test_curves_are_drawn(logdir: Path, tmp_path: Path) -> None:
    found = curves.read(logdir)
    assert list(found) == ["loss"]
    steps, values = found["loss"]
    assert steps == [1, 2, 3]
    assert values == pytest.approx([1, 1 / 2, 1 / 3])
    assert curves.main([str(logdir), "--out", str(tmp_path / "curves.png")]) == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", [".", "nowhere"])
def test_a_folder_without_curves_is_told(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert curves.main([str(tmp_path / name)]) == 2
    assert "train with --logdir" in capsys.readouterr().err
