"""`--processes N`: torchrun without its traceback."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator
from pathlib import Path

import launching
import pytest
from stopping import FILE, StopRequest, short_errors
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure


@pytest.fixture(autouse=True)
def logging_afterwards() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def test_ctrl_c_ends_without_a_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    given = []

    def main(words: list[str]) -> None:
        given.append(words)
        raise SignalException("Process 1 got signal: 2", signal.SIGINT)

    monkeypatch.setattr(launching.run, "main", main)
    monkeypatch.setattr("sys.argv", ["train.py", "--processes", "2"])
    with pytest.raises(SystemExit) as end:
        launching.launch(2, ["--epochs", "3"])
    assert end.value.code == 130
    assert given == [["--standalone", "--nproc_per_node=2", "train.py", "--epochs", "3"]]


@pytest.mark.parametrize(("status", "reported"), [(2, False), (1, True)])
def test_torchruns_report_is_left_out_where_an_argument_was_refused(
    status: int,
    reported: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def main(words: list[str]) -> None:
        failure = ProcessFailure(local_rank=0, pid=1, exitcode=status, error_file="<N/A>")
        raise ChildFailedError("train.py", {0: failure})

    monkeypatch.setattr(launching.run, "main", main)
    with pytest.raises(SystemExit) as end:
        launching.launch(2, [])
    assert end.value.code == status
    assert ("FAILED" in capsys.readouterr().err) == reported


@pytest.mark.parametrize(
    ("words", "command"),
    [
        (["--processes", "2"], "python train.py --processes 2 --resume here"),
        ([], "torchrun --nproc_per_node=2 train.py --resume here"),
        (["--resume", "old"], "torchrun --nproc_per_node=2 train.py --resume here"),
    ],
)
def test_the_command_that_goes_on(
    monkeypatch: pytest.MonkeyPatch, words: list[str], command: str
) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", *words])
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert StopRequest.command("here") == command


@pytest.mark.parametrize(
    ("says", "shown"), [("disk full\nat once", True), ("gloo: Connection closed by peer", False)]
)
def test_an_error_of_one_process_ends_short_under_torchrun(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    says: str,
    shown: bool,
) -> None:
    monkeypatch.setenv(FILE, str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as end, short_errors("train.py"):
        raise RuntimeError(says)
    assert end.value.code == 1
    assert ("Traceback" in capsys.readouterr().err) is shown
    told = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert told == f"RuntimeError: {says}".replace("\n", " ")
    monkeypatch.delenv(FILE)
    with pytest.raises(RuntimeError), short_errors("train.py"):
        raise RuntimeError(says)
