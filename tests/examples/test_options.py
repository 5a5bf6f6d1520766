"""What the command line refuses: with one line that says why, before anything is changed."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import train_text_fsdp as script
from models import build_model
from options import parse_arguments

ROWS = "text\tlabel\n" + "".join(f"text {i}\t{i % 2}\n" for i in range(60))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "data.tsv").write_text(ROWS)
    (tmp_path / "one_class.tsv").write_text(ROWS.replace("\t1\n", "\t0\n"))
    (tmp_path / "data.txt").write_text(ROWS)
    (tmp_path / "used" / "step-00000004-end").mkdir(parents=True)
    (tmp_path / "bad.tsv").write_bytes(ROWS.encode() + b"\xff\t1\n")
    for name, manifest in (("garbage", "{"), ("other", '{"format": 1, "files": {}}')):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(manifest)
    build_model("tiny", task="lm", vocab_size=7, classes=0).model.config.save_pretrained(
        tmp_path / "small_vocabulary"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def never(*_, **__):
    raise AssertionError("a process group was set up")


CASES = [
    # argparse
    ("--task sing", "--task: invalid choice"),
    ("--grad-sample-mode magic", "--grad-sample-mode: invalid choice: 'magic'"),
    ("--epsilon 0", "--epsilon: must be above 0"),
    ("--epsilon nan", "--epsilon: must be above 0"),
    ("--epsilon much", "--epsilon: invalid float value"),
    ("--delta 1", "--delta: must be between 0 and 1"),
    ("--max-grad-norm inf", "--max-grad-norm: must be above 0 and finite"),
    ("--batch-size 0", "--batch-size: must be above 0"),
    ("--batch-size 1.5", "--batch-size: invalid int value"),
    ("--max-physical-batch-size -1", "--max-physical-batch-size: must be above 0"),
    ("--epochs 0", "--epochs: must be above 0"),
    ("--lr -1", "--lr: must be above 0"),
    ("--seq-length 1", "--seq-length: must be 2 or more"),
    ("--seed -1", "--seed: must be 0 or more"),
    # files
    ("--data gone.tsv", "gone.tsv: cannot be read"),
    ("--data bad.tsv", "bad.tsv, line 62: byte 0xff"),
    ("--data one_class.tsv", "one_class.tsv: all 60 rows have the label 0"),
    ("--data data.txt", "--task lm"),
    ("--model huge", "--model huge: neither a built-in shape"),
    ("--model small_vocabulary", "--model small_vocabulary has 7 tokens"),
    ("--resume gone", "--resume gone: there is no complete checkpoint"),
    ("--resume garbage", "--resume garbage: not a checkpoint of this script; garbage is damaged"),
    ("--resume other", "--resume other: not a checkpoint"),
    ("--checkpoint nowhere/a", "--checkpoint nowhere/a: its folder"),
    ("--checkpoint data.tsv", "--checkpoint data.tsv: a file"),
    ("--checkpoint used", "--checkpoint used: holds step-00000004-end of another run; go on"),
    ("--save small_vocabulary", "--save small_vocabulary: exists already"),
    ("--save data.tsv/a", "--save data.tsv/a: the folder it is in"),
    ("--text-column body", "no column 'body' in the header, which has ['text', 'label']"),
    ("--label-column kind", "data.tsv, line 2: no column 'kind'; there are ['text', 'label']"),
    ("--test-data gone.tsv", "gone.tsv: cannot be read"),
    ("--lora 0", "--lora: must be above 0"),
    ("--log-clipped --grad-sample-mode hooks", "--log-clipped: the mode hooks"),
    ("--checkpoint-every 0", "--checkpoint-every: must be above 0"),
    ("--logdir data.tsv", "--logdir data.tsv: not a folder"),
    # what does not fit together
    ("--batch-size 1000", "--batch-size 1000: there are"),
    ("--delta 0.5", "--delta 0.5 protects nobody"),
    ("--grad-sample-mode hooks --deferred", "--deferred"),
    ("--secure-mode --seed 1", "--seed"),
    ("--tokenizer model", "--tokenizer model needs --model"),
    ("--tokenizer words --task lm", "--tokenizer words"),
]  # fmt: skip


@pytest.mark.parametrize(("options", "says"), CASES)
def test_it_is_refused(folder, monkeypatch, capsys, options, says):
    monkeypatch.setattr(dist, "init_process_group", never)
    argv = ["--batch-size", "8", "--checkpoint", "new", "--logdir", "curves"]
    argv += [] if "--data" in options else ["--data", "data.tsv"]
    before = sorted(folder.rglob("*"))
    with pytest.raises(SystemExit) as stop:
        script.main([*argv, *options.split()])
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert stop.value.code == 2
    assert says in error
    assert sorted(folder.rglob("*")) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_named(folder, capsys):
    with pytest.raises(SystemExit):
        script.main(["--data", "data.tsv", "--device", "cuda"])
    assert "--device cuda: 1 processes on this host, but 0 GPUs" in capsys.readouterr().err


def test_the_good_options_of_the_refusals_are_accepted(folder, monkeypatch):
    # Otherwise the cases above could fail for a reason that they do not name.
    monkeypatch.setattr(dist, "init_process_group", never)
    with pytest.raises(AssertionError, match="process group"):
        script.main(["--batch-size", "8", "--data", "data.tsv", "--checkpoint", "new"])


def test_an_epsilon_out_of_reach_is_said_in_terms_of_options(folder):
    args = parse_arguments(["--epsilon", "0.001"])
    with pytest.raises(ValueError, match=r"--epsilon 0\.001: no noise is enough"):  # noqa: SIM117
        with script.plain_epsilon_error(args):
            raise ValueError("target_epsilon = 0.001 is too low: even ... another accountant")


def test_delta_is_below_one_in_the_number_of_rows(folder):
    args = parse_arguments(["--data", "data.tsv", "--batch-size", "8"])
    rows = len(script.load_problem(args).train)
    assert 0 < args.delta < 1 / rows
