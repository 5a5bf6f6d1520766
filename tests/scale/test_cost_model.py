"""The cost model against the real class, and against what must hold in any case."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, replace

import pytest
import torch
from torch import nn

from memory_test.benchmarks import tables
from memory_test.scale import MODES, SHAPES, LlamaShape, Rates, Run, predict, rates_of, shape_of
from memory_test.scale.__main__ import main
from memory_test.scale.held import held_bytes
from memory_test.scale.memory import DEFERRED_SHARE, memory_of
from memory_test.scale.paper import rows
from memory_test.scale.rates import read
from memory_test.scale.shapes import block_on_meta, linears
from memory_test.scale.ways import planned
from opacus.core.sums.limits import default_budget

GB = 2**30


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


def peak_of_step(shape: LlamaShape, run: Run) -> int:
    """Bytes that a non-private step of the real class allocates at its peak, weights apart."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden, num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads, num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp, vocab_size=shape.vocab, tie_word_embeddings=False,
        attn_implementation="sdpa", use_cache=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).bfloat16().train()
    if run.checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(1, shape.vocab, (run.batch, run.tokens))

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        flat = logits[:, :-1].reshape(-1, shape.vocab)
        return nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1))

    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        output = model(input_ids=ids)
        loss = loss_of(output.logits)
        if not run.holds_logits:
            del output
        loss.backward()
    live, peak = 0, 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda one: one.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.filterwarnings("ignore")  # of the profiler
@pytest.mark.parametrize(
    ("vocab", "when", "error"), [(4096, "loss", 0.01), (64, "block", 0.15)]
)  # with a small vocabulary the logits are nothing, and a block that is computed again counts
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(("batch", "holds"), [(1, False), (2, True)])
def test_the_peak_is_that_of_the_real_class(vocab, when, error, checkpointing, batch, holds):
    pytest.importorskip("transformers")
    shape = LlamaShape(hidden=64, layers=6, heads=4, kv_heads=4, mlp=256, vocab=vocab)
    run = Run(shape, 1, 512, batch, "no_dp", checkpointing, holds_logits=holds)
    memory = memory_of(run, rates_of("h200"))
    assert memory.when == when
    assert memory.peak - memory.state == pytest.approx(peak_of_step(shape, run), rel=error)


def test_deferred_norms_wait_within_their_budget(monkeypatch):
    held = {"allocated_bytes": {"all": {"current": 40 * GB}}}
    monkeypatch.setattr(torch.cuda, "memory_stats_as_nested_dict", lambda device: held)
    assert default_budget(torch.device("cuda")) == DEFERRED_SHARE * 40 * GB
    run = Run(SHAPES["llama3-8b"], 8, 8192, mode="ghost_fsdp", checkpointing=True)
    rates = rates_of("h200")
    plain, waiting = (memory_of(replace(run, deferred=d), rates).moments["block"] for d in (0, 1))
    assert plain < waiting <= plain + DEFERRED_SHARE * memory_of(run, rates).moments["loss"]


def test_one_copy_of_the_logits_goes_where_the_loop_lets_go_of_them():
    run = Run(SHAPES["llama3-1b"], 2, 16384, 1, "ghost_fsdp")
    held, dropped = (
        memory_of(replace(run, holds_logits=h), rates_of("h200")).peak for h in (True, False)
    )
    assert held - dropped == 16384 * run.shape.logit_bytes


def test_each_kind_of_mode_takes_its_own_time_of_the_host():
    rates = rates_of("h200")
    host = {
        mode: predict(Run(SHAPES["llama3-1b"], 2, 512, mode=mode), rates).duration.host
        for mode in MODES
    }
    ratio = {mode: seconds / host["no_dp"] for mode, seconds in host.items()}
    assert 1 < ratio["ghost_fsdp_bk"] < ratio["flash_fsdp_bk"] < 1.5
    assert 1.5 < ratio["ghost_fsdp"] == ratio["flash_fsdp"] < 2.5


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
    assert main([*arguments, "--json", "--drop-logits"]) == 0
    assert json.loads(capsys.readouterr().out)["peak_gb"] < found["peak_gb"]
    assert main([*arguments, "--shard", "7"]) == 2
    assert "shard" in capsys.readouterr().err


def test_the_module_runs_without_anything_but_torch():
    code = (
        "import sys, runpy; sys.argv = ['x', '--model', 'llama3-405b', '--gpus', '4096', '--seq',"
        " '8192', '--json']\n"
        "try: runpy.run_module('memory_test.scale', run_name='__main__')\n"
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
    assert "within 15%" in tables.summary_table()


def test_blocks_are_held_offloaded_or_run_again_as_the_budget_asks():
    rates, run = rates_of("h200"), Run(SHAPES["llama3-8b"], 8, 4096, 4, checkpointing=True)
    whole = predict(run, rates)
    assert planned(run, rates, rates.memory_bytes).held_blocks == 32
    last = None
    for share in (0.9, 0.7, 0.5):
        chosen = planned(run, rates, share * whole.memory.peak)
        found = predict(chosen, rates)
        assert found.memory.peak <= share * whole.memory.peak
        assert 0 < chosen.replayed_blocks == 32 - chosen.held_blocks
        assert found.duration.step > (whole if last is None else last).duration.step
        last = found
    sent = predict(planned(run, rates, 0.5 * whole.memory.peak, 100 * GB), rates)
    assert sent.run.offloaded_blocks and not sent.run.replayed_blocks
    assert whole.duration.step < sent.duration.step < last.duration.step
    small = predict(replace(run, stored=1), rates)
    assert small.held < 0.8 * whole.held
    assert all(row["fits"] is (row["breaks_first"][:6] != "memory") for row in rows())
