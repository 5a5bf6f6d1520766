"""The cost model against every measured cell, and against what must hold in any case."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from memory_test.benchmarks import scale_check, tables
from opacus.scale import MODES, SHAPES, LlamaShape, Rates, Run, predict, rates_of, shape_of
from opacus.scale.__main__ import main
from opacus.scale.held import held_bytes
from opacus.scale.rates import read
from opacus.scale.shapes import block_on_meta, linears

GB = 2**30
# Where the host sets the pace: file and mode that are predicted worse than 15%, and why.
KNOWN_MISSES = {
    # Median 50.8 ms, 39.5 at best: a busy host; 43.0 in the other call of the same file.
    ("2026-11-28_h200_single_one_pass_1b", "no_dp"),
    # The package takes less of the host's time than when the ratios of rates.json were fitted.
    ("2026-11-28_h200x2_one_pass_1b_last", "ghost_fsdp_bk"),
    *(("2026-11-28_h200x2", mode) for mode in MODES),  # also a noisy host: 2048 tokens are faster
    ("2026-11-28_h200x2_large_and_long", "ghost_fsdp"),
    ("2026-11-28_h200x2_large_and_long", "flash_fsdp"),
}


def test_where_the_device_sets_the_pace_every_cell_is_predicted_to_15_percent():
    compared = [one for one in scale_check.compare_all() if not one.host_bound]
    assert len(compared) >= 50
    wrong = [one for one in compared if abs(one.time_error) > scale_check.TOLERANCE]
    assert not wrong, scale_check.markdown(wrong)


def test_where_the_host_does_the_known_cells_are_missed():
    compared = [one for one in scale_check.compare_all() if one.host_bound]
    wrong = [one for one in compared if abs(one.time_error) > scale_check.TOLERANCE]
    found = {(one.measured.file, one.measured.run.mode) for one in wrong}
    assert found == KNOWN_MISSES, scale_check.markdown(wrong)


def test_memory_is_predicted_to_15_percent_but_for_long_samples_with_checkpointing():
    compared = scale_check.compare_all()
    wrong = [one for one in compared if abs(one.memory_error) > scale_check.TOLERANCE]
    assert len(wrong) <= 5
    for one in wrong:  # too large, and no more than one copy of the logits and a fifth
        run, measured = one.measured.run, one.measured.peak_gb
        logits = 2 * run.tokens_here * run.shape.vocab / GB
        assert run.checkpointing and measured < one.peak_gb < 1.2 * measured + logits


def test_most_cells_are_checks_and_not_fits():
    compared = scale_check.compare_all()
    fitted = sum(one.measured.fitted for one in compared)
    # One cell of each file gives the speed of the host.
    assert fitted <= len(scale_check.FITTED) + len({c.measured.file for c in compared})
    assert len(compared) - fitted >= 2 * fitted


def test_a_worse_model_would_fail():
    rates = rates_of("h200")
    run = Run(SHAPES["llama3-1b"], 2, 4096, 4)
    good = predict(run, rates).duration.step
    slower = predict(run, replace(rates, product_flops=rates.product_flops / 2)).duration.step
    assert slower > 1.3 * good


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama3-1b", 1.50), ("llama3-3b", 3.61), ("llama3-8b", 8.03), ("llama3-70b", 70.55),
     ("llama3-405b", 405.85)],
)  # fmt: skip
def test_parameters_are_those_of_the_models(name, billions):
    assert SHAPES[name].parameters / 1e9 == pytest.approx(billions, abs=0.01)


def test_sizes_are_those_of_the_real_class():
    transformers = pytest.importorskip("transformers")
    shape = SHAPES["llama3-8b"]
    config = transformers.LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp, vocab_size=shape.vocab, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    block = model.model.layers[0]
    real = sorted((m.in_features, m.out_features) for m in block.modules()
                  if isinstance(m, nn.Linear))  # fmt: skip
    assert real == sorted(linears(shape))


def test_saved_activations_are_those_of_the_real_block():
    transformers = pytest.importorskip("transformers")
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    small = LlamaShape(hidden=256, layers=1, heads=8, kv_heads=2, mlp=1024, vocab=64)
    config = transformers.LlamaConfig(
        hidden_size=small.hidden, num_attention_heads=small.heads,
        num_key_value_heads=small.kv_heads, intermediate_size=small.mlp,
        attn_implementation="sdpa",
    )  # fmt: skip
    block = LlamaDecoderLayer(config, 0).bfloat16()
    tokens = 64
    x = torch.randn(1, tokens, small.hidden, dtype=torch.bfloat16, requires_grad=True)
    place = LlamaRotaryEmbedding(config)(x, torch.arange(tokens)[None])
    known = {p.untyped_storage()._cdata for p in block.parameters()}
    known |= {t.untyped_storage()._cdata for t in place}
    seen = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage._cdata not in known:
            seen[storage._cdata] = (storage.nbytes(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        block(x, position_embeddings=place)
    each = sum(size for size, _ in seen.values()) / tokens
    # On the CPU keys and values may be repeated for all heads, and sums of a row are kept.
    assert each == pytest.approx(small.activation_bytes_of_block, rel=0.12)


def test_nothing_is_allocated():
    assert all(p.is_meta for p in block_on_meta(SHAPES["llama3-405b"]).parameters())


def test_every_rate_has_a_source():
    for card, rates in read().items():
        assert set(rates) == {f.name for f in fields(Rates)}, card
        for name, rate in rates.items():
            assert rate["value"] > 0 and len(rate["source"]) > 10, (card, name)


def test_more_cards_hold_less_each_until_activations_are_all():
    peaks = [
        predict(Run(SHAPES["llama3-8b"], w, 4096), rates_of("h100")).memory for w in (2, 8, 64)
    ]
    states = [memory.state for memory in peaks]
    assert states[0] == 4 * states[1] == 32 * states[2]
    assert all(memory.peak > memory.state for memory in peaks)


@pytest.mark.parametrize("mode", MODES)
def test_time_grows_linearly_with_tokens_apart_from_attention(mode):
    rates = rates_of("h200")
    at = [predict(Run(SHAPES["llama3-8b"], 8, t, mode=mode), rates).duration.device
          for t in (16384, 32768)]  # fmt: skip
    for part in ("products", "elementwise"):
        assert at[1][part] == pytest.approx(2 * at[0][part])
    assert at[1]["attention"] == pytest.approx(4 * at[0]["attention"])


def test_what_is_held_follows_the_planner():
    rates, shape = rates_of("h200"), SHAPES["llama3-1b"]
    long = held_bytes(Run(shape, 2, 8192), rates)
    # One long sample: its gradient is smaller than its activations.
    assert long.total == pytest.approx(2 * shape.multiplied)
    short = held_bytes(Run(shape, 2, 128, 64), rates)
    assert short.total < 64 * long.total / 10
    tight = replace(rates, memory_bytes=6 * GB)
    assert (
        held_bytes(Run(shape, 2, 1024, 16), tight).total
        <= held_bytes(Run(shape, 2, 1024, 16), rates).total
    )


def test_checkpointing_trades_memory_for_time():
    rates = rates_of("h100")
    plain = Run(SHAPES["llama3-8b"], 64, 8192, mode="ghost_fsdp")
    saved = predict(replace(plain, checkpointing=True), rates)
    whole = predict(plain, rates)
    assert saved.memory.peak < 0.7 * whole.memory.peak
    assert saved.duration.step > 1.1 * whole.duration.step


def test_the_network_counts_between_hosts():
    rates = rates_of("h100")
    inside = predict(Run(SHAPES["llama3-70b"], 8, 1024), rates).duration.device["communication"]
    across = predict(Run(SHAPES["llama3-70b"], 16, 1024), rates).duration.device["communication"]
    groups = Run(SHAPES["llama3-70b"], 16, 1024, shard=8)
    hybrid = predict(groups, rates).duration.device["communication"]
    assert inside < hybrid < across


def test_the_command_prints_a_prediction(capsys):
    arguments = ["--model", "llama3-70b", "--gpus", "256", "--seq", "8192"]
    assert main([*arguments, "--mode", "ghost_fsdp", "--checkpointing"]) == 0
    text = capsys.readouterr().out
    assert "70.55B parameters" in text and "fits" in text and "DOES NOT" not in text
    assert main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"] and found["held_gb"] > 100 and found["time_ratio"] > 1
    assert main([*arguments, "--shard", "7"]) == 2
    assert "shard" in capsys.readouterr().err


def test_the_module_runs_without_anything_but_torch():
    code = (
        "import sys, runpy; sys.argv = ['x', '--model', 'llama3-405b', '--gpus', '4096', '--seq',"
        " '8192', '--json']\n"
        "try: runpy.run_module('opacus.scale', run_name='__main__')\n"
        "except SystemExit as end: assert not end.code\n"
        "assert 'transformers' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["peak_gb"] > 0


def test_what_cannot_be_asked_for():
    shape = shape_of("llama3-8b")
    for changes, word in [
        ({"gpus": 0}, "gpus"), ({"tokens": 0}, "tokens"), ({"mode": "hooks"}, "mode"),
        ({"optimizer": "lion"}, "optimizer"), ({"gpus": 1}, "one GPU"), ({"shard": 3}, "shard"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=word):
            Run(**({"shape": shape, "gpus": 8, "tokens": 512} | changes))
    with pytest.raises(ValueError, match="model"):
        shape_of("llama4")
    with pytest.raises(ValueError, match="card"):
        rates_of("b200")


def test_documents_have_tables_that_can_be_filled():
    for path in tables.DOCUMENTS:
        names = [found[2] for found in tables.MARKED.finditer(path.read_text())]
        assert names and set(names) <= set(tables.TABLES), path
    assert "llama3-405b | 4096" in tables.scale_table()
    assert "Within 15%" in tables.summary_table()
