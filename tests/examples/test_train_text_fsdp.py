"""Whole runs of the script, small: what they end with, not how they get there."""

from __future__ import annotations

import os
import random
import signal
import tempfile
from functools import partial
from pathlib import Path

import pytest
import torch
import train_text_fsdp as script
from models import SHAPES, build_model
from options import parse_arguments
from problem import load_problem, new_model
from runtime import Runtime, running
from saving import load_classifier
from steps import AfterStep
from text_data import Texts
from tokenizer import make_tokenizer
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from training import EncodedTexts, Task, evaluate

from opacus.checkpoints.folder import read_manifest
from opacus.distributed_checkpoint import Checkpointer, latest_checkpoint
from opacus.utils.fsdp_utils import FSDP2Wrapper
from tests.helpers.distributed import preload, run_distributed

preload("transformers.models.llama.modeling_llama")

EPOCHS = 3


@pytest.fixture
def data(tmp_path):
    """Texts of good and bad words; so few that many batches are empty on a rank."""
    return texts(tmp_path / "data.tsv", 80)


@pytest.fixture
def few(tmp_path):
    """Half as many, for runs that are compared with each other, not for what they learn."""
    return texts(tmp_path / "few.tsv", 40)


def texts(path, count):
    rng = random.Random(0)
    words = (["bad", "awful", "poor"], ["good", "great", "fine"])
    rows = [(" ".join(rng.choices(words[i % 2], k=rng.randint(1, 9))), i % 2) for i in range(count)]
    path.write_text("text\tlabel\n" + "".join(f"{text}\t{label}\n" for text, label in rows))
    return path


def options(data, **more):
    given = {
        "data": data,
        "epochs": EPOCHS,
        "batch-size": 4,
        "max-physical-batch-size": 3,
        "delta": 1e-3,
        "seed": 5,
        **more,
    }
    argv = [f"--{name}={value}" for name, value in given.items() if value is not True]
    return [*argv, *(f"--{name}" for name, value in given.items() if value is True)]


def weights(path):
    """The model in a checkpoint, or in the newest one of a folder."""
    with tempfile.NamedTemporaryFile() as file:
        dcp_to_torch_save(latest_checkpoint(path) or path, file.name)
        return torch.load(file.name)["model"]


def ends_of_epochs(folder):
    return sorted(folder.glob("step-*-end"))


def assert_equal_weights(first, second, rtol=1e-5, atol=1e-6):
    torch.testing.assert_close(weights(first), weights(second), rtol=rtol, atol=atol)


def keep_every_checkpoint(monkeypatch):
    monkeypatch.setattr(script, "Checkpointer", partial(Checkpointer, keep=999))


# --- one process ---


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_fsdp_bk"])
def test_it_learns_and_reports(data, tmp_path, capsys, mode):
    logdir = tmp_path / "curves"
    script.main(options(data, **{"grad-sample-mode": mode, "logdir": logdir, "lr": 0.01}))
    out = capsys.readouterr().out
    lines = {line.split("  ")[0]: line.split() for line in out.splitlines()}
    assert out.count("tokens/s") == EPOCHS
    assert lines["private"][-4:-2] == ["accuracy", "100.0%"]
    assert 7.5 < float(lines["private"][-2]) <= 8.0
    assert float(lines["private"][-1]) == 1e-3
    assert lines["not private"][-3:] == ["accuracy", "100.0%", "unbounded"]
    assert 0.5 <= float(lines["majority class"][-1].rstrip("%")) / 100 < 1
    assert list(logdir.glob("events.*"))


@pytest.mark.parametrize("mode", ["hooks", "ghost", "ghost_fsdp_bk"])
def test_a_resumed_run_ends_like_an_uninterrupted_one(few, tmp_path, monkeypatch, capsys, mode):
    keep_every_checkpoint(monkeypatch)
    whole = tmp_path / "whole"
    more = {"grad-sample-mode": mode, "no-baseline": True, "checkpoint-every": 5}
    script.main(options(few, checkpoint=whole, **more))
    uninterrupted = capsys.readouterr().out
    within = whole / "step-00000015"
    assert within > ends_of_epochs(whole)[0]
    for name, start in (("within", within), ("between", ends_of_epochs(whole)[0])):
        rest = tmp_path / name
        # All draws come from the checkpoint.
        script.main(options(few, checkpoint=rest, resume=start, **{**more, "seed": 6}))
        resumed = capsys.readouterr().out
        assert_equal_weights(whole, rest, rtol=0, atol=0)
        assert f"epoch 1/{EPOCHS}" not in resumed
        assert resumed.splitlines()[-1] == uninterrupted.splitlines()[-1]  # epsilon
    with pytest.raises(AssertionError):
        assert_equal_weights(whole, ends_of_epochs(whole)[-2])


def test_a_run_that_restarts_itself_takes_the_same_options(few, tmp_path, capsys):
    given = options(few, checkpoint=tmp_path / "a", resume=tmp_path / "a", epochs=1)
    for start in ("first", "again"):
        script.main([*given, "--no-baseline"])
        assert ("epoch 1/1" in capsys.readouterr().out) == (start == "first")


@pytest.mark.parametrize("mode", ["ghost", "ghost_fsdp"])
def test_deferred_norms_give_the_same_model(few, tmp_path, mode):
    paths = []
    for flag in ("deferred", "no-deferred"):
        paths.append(tmp_path / f"{flag}")
        more = {flag: True, "grad-sample-mode": mode, "no-baseline": True}
        script.main(options(few, checkpoint=paths[-1], **more))
    assert_equal_weights(*paths)


@pytest.mark.parametrize(
    ("flags", "variable", "deferred"),
    [
        (["--deferred"], "0", True),
        (["--no-deferred"], "1", False),
        ([], "1", True),
        ([], "0", False),
    ],
)
def test_the_flag_wins_over_the_environment(few, monkeypatch, flags, variable, deferred):
    monkeypatch.setenv("OPACUS_USE_DEFERRED_NORM", variable)
    args = parse_arguments([*options(few), *flags])
    problem, model = script.prepare(args)
    with running() as runtime:
        private = script.make_private(args, problem, runtime, model)
    assert private.model._use_deferred_norm is deferred


def test_seeds_are_what_makes_runs_differ(few, tmp_path):
    paths = [tmp_path / name for name in ("a", "b", "c")]
    for path, seed in zip(paths, (1, 1, 2), strict=True):
        script.main(options(few, checkpoint=path, seed=seed, epochs=1, **{"no-baseline": True}))
    assert_equal_weights(*paths[:2], rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_equal_weights(*paths[1:])


def test_other_settings_are_no_resumption(few, tmp_path, capsys):
    path = tmp_path / "a"
    script.main(options(few, checkpoint=path, epochs=1, **{"no-baseline": True}))
    with pytest.raises(SystemExit):
        script.main(options(few, resume=path, epochs=2, epsilon=3))
    error = capsys.readouterr().err
    assert "epochs was 1, is 2" in error and "epsilon was 8.0, is 3.0" in error


def test_a_checkpoint_of_another_shape_is_refused(few, tmp_path, monkeypatch, capsys):
    path = tmp_path / "a"
    script.main(options(few, checkpoint=path, epochs=1, **{"no-baseline": True}))
    monkeypatch.setitem(SHAPES, "tiny", {**SHAPES["tiny"], "intermediate_size": 32})
    with pytest.raises(SystemExit):
        script.main(options(few, resume=path, epochs=1, **{"no-baseline": True}))
    assert "checkpoint of another model" in capsys.readouterr().err


def test_a_language_model_is_trained_on_plain_text(tmp_path, capsys):
    path = tmp_path / "data.txt"
    path.write_text("\n".join("ab" * (i % 9 + 1) for i in range(80)))
    script.main(options(path, task="lm", lr=0.01))
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    perplexity = {
        name: float(lines[name][column])
        for name, column in (("private", -3), ("not private", -2), ("token frequencies", -1))
    }
    assert 1 <= perplexity["not private"] < perplexity["private"] < 259


def test_adapters_are_trained_saved_and_merged(data, tmp_path, capsys):
    folder = tmp_path / "model"
    more = {"lora": 2, "save": folder, "no-baseline": True, "grad-sample-mode": "auto", "lr": 0.03}
    script.main(options(data, **more))
    assert f"saved in {folder}; loaded from there it says" in capsys.readouterr().out
    loaded = load_classifier(folder)
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    args = parse_arguments(options(data, **more))
    problem = load_problem(args)
    start = {
        n.replace(".base_layer", ""): p for n, p in new_model(args, problem).named_parameters()
    }
    changed = {
        name
        for name, value in loaded.named_parameters()
        if not torch.equal(
            value, start.get(name, start.get(f"backbone.base_model.model.{name[9:]}"))
        )
    }
    # What adapters were merged into, and the head; embeddings and norms stay as they were.
    assert changed and all("proj" in name or "score" in name for name in changed)
    alone = Runtime(0, 1, torch.device("cpu"))
    assert evaluate(loaded, problem.test, problem.task, alone, 8) > 0.9
    assert (folder / "adapters" / "adapter_config.json").is_file()


def test_ctrl_c_ends_after_a_step_and_the_run_goes_on(data, tmp_path, monkeypatch, capsys):
    folder = tmp_path / "a"
    given = options(data, checkpoint=folder, **{"no-baseline": True})
    plain_call, calls = AfterStep.__call__, []

    def pressed(self, loss, samples):
        calls.append(samples)
        if len(calls) == 4:
            os.kill(os.getpid(), signal.SIGINT)
        plain_call(self, loss, samples)

    monkeypatch.setattr(AfterStep, "__call__", pressed)
    with pytest.raises(SystemExit) as end:
        script.main(given)
    assert end.value.code == 130
    said = capsys.readouterr().out.strip().splitlines()
    assert "and saved; go on with:" in said[-2] and f"--resume {folder}" in said[-1]
    assert 0 < read_manifest(latest_checkpoint(folder))["step"] <= 4
    monkeypatch.undo()
    script.main([*given, f"--resume={folder}"])
    assert "(8.00, 1.0e-03)-differentially private" in capsys.readouterr().out


# --- two processes ---


def many_runs(rank, world_size, data, folder):
    """Runs that are compared by their checkpoints."""
    monkeypatch = pytest.MonkeyPatch()
    keep_every_checkpoint(monkeypatch)
    runs = {
        "immediate": {"no-deferred": True},
        "deferred": {"deferred": True},
        "resumed": {"deferred": True, "resume": "first epoch"},
        "ddp": {"grad-sample-mode": "ghost"},
    }
    for name, more in runs.items():
        path = Path(folder, name)
        if "resume" in more:
            more = {**more, "resume": ends_of_epochs(Path(folder, "deferred"))[0]}
        script.main(options(data, checkpoint=path, **{"no-baseline": True}, **more))
    script.main(options(data, epochs=1))  # with the baseline
    monkeypatch.undo()
    return scores(rank, world_size)


def scores(rank, world_size):
    """Of five rows, in batches of two: the second process runs out of rows first."""
    texts = Texts([chr(97 + i) * (i + 1) for i in range(5)], [0, 1, 1, 0, 1])
    rows = EncodedTexts(texts, make_tokenizer("words", []), 8)
    task, cpu = Task.of("classify", 0), torch.device("cpu")
    model = build_model("tiny", task="classify", vocab_size=4097, classes=2)
    alone = evaluate(model, rows, task, Runtime(0, 1, cpu), 7)
    sharded = FSDP2Wrapper(model)
    return alone, evaluate(sharded, rows, task, Runtime(rank, world_size, cpu), 2)


@pytest.mark.slow
def test_two_processes(data, tmp_path, capsys):
    for alone, together in run_distributed(many_runs, 2, data, tmp_path):
        assert alone == together
        assert 0 < alone < 1
    assert_equal_weights(tmp_path / "immediate", tmp_path / "deferred")
    assert_equal_weights(tmp_path / "deferred", tmp_path / "resumed", rtol=0, atol=0)
    with pytest.raises(AssertionError):
        assert_equal_weights(tmp_path / "deferred", ends_of_epochs(tmp_path / "deferred")[0])
    assert len(ends_of_epochs(tmp_path / "ddp")) == EPOCHS
    # A checkpoint of two processes goes on in one.
    capsys.readouterr()
    script.main(
        options(data, resume=ends_of_epochs(tmp_path / "deferred")[0], **{"no-baseline": True})
    )
    lines = capsys.readouterr().out.splitlines()
    assert [line[:9] for line in lines if "tokens/s" in line] == ["epoch 2/3", "epoch 3/3"]
    assert "(8.00, 1.0e-03)-differentially private" in lines[-1]
