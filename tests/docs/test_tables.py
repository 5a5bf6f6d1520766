"""The tables and plots of the documents are those of the committed results."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from statistics import median

import pytest

from memory_test.benchmarks import cards_plot, experiment_plots, experiment_tables, measured, tables

IMAGE = re.compile(r"!\[[^\]]*\]\(([^)]+)\)")
SMALL_SERIES = Path(__file__).parents[1] / "memory_test" / "data" / "results"
REDRAW = "run memory_test/benchmarks/experiment_plots.py"
README = tables.ROOT / "README.md"
PAGE = next(path for path in tables.DOCUMENTS if path.name == "experiments.md")


@pytest.mark.parametrize("path", tables.DOCUMENTS, ids=lambda path: path.name)
def test_the_figures_of_a_document_are_those_of_the_results(path: Path) -> None:
    text = path.read_text("utf-8")
    assert tables.MARKED.search(text)
    assert tables.filled(text) == text, "run memory_test/benchmarks/tables.py"


def test_every_table_can_be_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tables.main(list(experiment_tables.TABLES)) == 0
    printed = capsys.readouterr().out
    for name in experiment_tables.TABLES:
        assert tables.TABLES[name]() in printed, name
    assert tables.main(["no such table"]) == 2


def test_all_cells_are_in_one_file() -> None:
    assert tables.cells_csv() == tables.CELLS.read_text("utf-8"), "run tables.py"
    assert len(tables.CELLS.read_text("utf-8").splitlines()) == len(measured.all_cells()) + 1


def middle(values: list[float]) -> str:
    return f"{median(values):.2f}× ({min(values):.2f}–{max(values):.2f})"


def test_the_readme_gives_medians_and_ranges_over_all_cells() -> None:
    cells = measured.all_cells()
    text = README.read_text("utf-8")
    rows = [[c.strip() for c in line.split("|")] for line in text.splitlines() if "×" in line]
    modes = [row[2].strip("`") for row in rows]
    assert {"ghost_fsdp_bk", "ghost_fsdp", "ghost_bk", "ghost", "hooks"} == set(modes)
    for mode, row in zip(modes, rows, strict=True):
        own = [c for c in cells if (c.mode, c.package, c.deferred) == (mode, row[3], False)]
        pairs = [(c, plain) for c in own if (plain := measured.baseline(c, cells))]
        times = [c.ms / plain.ms for c, plain in pairs]
        memory = [c.peak_gb / plain.peak_gb for c, plain in pairs]
        assert row[4:7] == [str(len(pairs)), middle(times), middle(memory)], row


def test_the_plots_were_drawn_from_the_results() -> None:
    image = pytest.importorskip("PIL.Image")
    shown = {Path(name).name for path in tables.DOCUMENTS for name in images(path)}
    for drawn in experiment_plots.PICTURES:
        assert drawn.name in shown
        with image.open(experiment_plots.FOLDER / drawn.name) as picture:
            assert picture.text["Source"] == drawn.source, f"{drawn.name}: {REDRAW}"
    with image.open(cards_plot.PICTURE) as picture:
        assert picture.text["Source"] == cards_plot.source(), "run cards_plot.py"


def images(page: Path) -> list[str]:
    return IMAGE.findall(page.read_text("utf-8"))


def test_every_picture_is_shown_and_exists() -> None:
    pages = [tables.ROOT / "README.md", *(tables.ROOT / "docs").glob("**/*.md")]
    shown = {(path.parent / name).resolve() for path in pages for name in images(path)}
    assert all(path.is_file() for path in shown)
    assert shown >= set((tables.ROOT / "docs").glob("images/*.png"))


@pytest.fixture
def small_series(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of results with one series in it, of two CPU processes, that calls itself a GPU's."""
    from memory_test.common.results import read_results
    from memory_test.common.schema import LAYOUT

    results, failures, _ = read_results(SMALL_SERIES)
    for result in results:
        result.pop("file")
        result |= {"device": "NVIDIA H100 80GB HBM3", "model": "llama3-1b", "seq_length": 4096}
        result["date"] += f" {len(result['mode'])}"
    empty = {part: [] for part in ("deferred", "norms", "accuracy", "profiles")}
    bundle = {"layout": LAYOUT, "what": "a try", "results": results, "failures": failures, **empty}
    (tmp_path / "small.json").write_text(json.dumps(bundle))
    for path in measured.RESULTS.rglob("*x2_*_two_pass.json"):
        shutil.copy(path, tmp_path)
    monkeypatch.setattr(measured, "RESULTS", tmp_path)
    return tmp_path


def test_a_new_series_changes_the_document(small_series: Path) -> None:
    text = tables.filled(PAGE.read_text("utf-8"))
    assert text != PAGE.read_text("utf-8")
    text = experiment_tables.runs()
    assert "### small" in text and "a try." in text
    bundle = measured.files()["small"]
    for result in experiment_tables.groups_of(bundle)[0].results:
        assert f"| {result['median_time_ms']:.1f} |" in text
    assert experiment_tables.norm_phases() != experiment_tables.NOTHING


def test_pairs_come_from_series_and_other_files(small_series: Path) -> None:
    files = {pair.file for pair in measured.deferred_pairs()}
    assert "small" in files and len(files) == 3
    for pair in measured.deferred_pairs():
        assert pair.speedup == pair.immediate_ms / pair.deferred_ms


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([], ""),
        ([1.0, 1.1], "does not hold (0 of 2)"),
        ([1.0, 1.6], "holds in part (1 of 2)"),
        ([1.5, 1.6], "holds (2 of 2)"),
    ],
)
def test_verdicts(found: list[float], expected: str) -> None:
    assert experiment_tables.verdict(found, 1.5) == expected


def test_what_a_pair_can_tell() -> None:
    pair = measured.Pair("ghost", "llama3-8b", 8192, "", 2.0, 1.0, 0.0, "f")
    large = experiment_tables.EXPECTED[-1]
    assert large.covers(pair) and pair.speedup == 2.0
    assert not experiment_tables.EXPECTED[2].covers(pair)
