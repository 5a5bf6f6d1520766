"""Folders of checkpoints: complete or not there, checked when read, the last few kept.

A checkpoint is written to a folder whose name starts with ``.unfinished-`` and gets its own name
when everything is on disk. A rename is atomic, so whatever is killed when, a folder named
``step-...`` is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

MANIFEST = "manifest.json"
_UNFINISHED = ".unfinished-"
_NAME = re.compile(r"step-(\d+)(-end)?")
_BLOCK = 1 << 20

# Size in bytes and SHA-256 of a file.
Seal = tuple[int, str]


class Mark(tuple[int, bool]):
    """The point in training of a checkpoint: steps taken, and whether an epoch has ended there.

    Marks are ordered as training passes them.
    """

    __slots__ = ()

    def __new__(cls, steps: int, epoch_ended: bool) -> Mark:
        return super().__new__(cls, (steps, epoch_ended))

    def __str__(self) -> str:
        return f"step-{self[0]:08d}" + ("-end" if self[1] else "")

    @classmethod
    def of(cls, path: Path) -> Mark | None:
        """The mark in a folder's name, `None` if the name is not one of ours."""
        match = _NAME.fullmatch(path.name)
        return cls(int(match[1]), match[2] is not None) if match else None


# --- ranks ---


def rank_and_size() -> tuple[int, int]:
    """Rank and size of the default process group; `(0, 1)` without one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def gathered(value: Any) -> list[Any]:
    """The values that all ranks passed, in rank order."""
    size = rank_and_size()[1]
    every: list[Any] = [value] * size
    if size > 1:
        dist.all_gather_object(every, value)
    return every


@contextmanager
def all_or_none(doing: str) -> Iterator[None]:
    """Every rank raises the same if the body raised on one. The body must not communicate.

    Args:
        doing: what was tried, for the message.

    Raises:
        ValueError: Every rank that failed did so with a ValueError.
        RuntimeError: A rank failed otherwise.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:
        error = caught
    said = None if error is None else (isinstance(error, ValueError), _text(error))
    refusals = [(rank, *one) for rank, one in enumerate(gathered(said)) if one is not None]
    if not refusals:
        return
    texts = dict.fromkeys(text for _, _, text in refusals)
    ranks = ", ".join(str(rank) for rank, _, _ in refusals)
    where = f" on rank {ranks}" if rank_and_size()[1] > 1 else ""
    kind = ValueError if all(value_error for _, value_error, _ in refusals) else RuntimeError
    raise kind(f"{doing} failed{where}: {'; '.join(texts)}") from error


def _text(error: Exception) -> str:
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


# --- which checkpoints there are ---


def checkpoints_in(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    found = [path for path in folder.iterdir() if Mark.of(path)] if folder.is_dir() else []
    return sorted(found, key=lambda path: Mark.of(path) or Mark(-1, False))


def latest_checkpoint(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in ``folder``, ``None`` if there is none."""
    found = checkpoints_in(Path(folder))
    return found[-1] if found else None


# --- writing, on rank 0 but for `seals` ---


def begin(folder: Path, mark: Mark) -> Path:
    """Remove leftovers of killed runs; return a new folder to write the checkpoint to."""
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f"{_UNFINISHED}*"):
        shutil.rmtree(left, ignore_errors=True)
    # A unique name: a stray process of an earlier run may still write to its own folder.
    unfinished = folder / f"{_UNFINISHED}{mark}-{os.urandom(4).hex()}"
    unfinished.mkdir(mode=0o700)  # the random state in it is secret
    return unfinished


def seals(paths: Sequence[Path]) -> dict[str, Seal]:
    """Name, size and digest of files that this rank has written."""
    return {path.name: _seal(path) for path in paths}


def finish(unfinished: Path, mark: Mark, files: dict[str, Seal], about: dict[str, Any]) -> Path:
    """Seal the files and give the checkpoint its name.

    Args:
        unfinished: The folder that :func:`begin` made.
        mark: The point in training.
        files: The :func:`seals` of all ranks.
        about: Further entries of the manifest, plain types.

    Raises:
        RuntimeError: Files of other ranks are not there.
    """
    missing = sorted(name for name in files if not (unfinished / name).is_file())
    if missing:
        raise RuntimeError(
            f"{unfinished} lacks {missing}, which other ranks have written: the folder must be on "
            "storage that all nodes share"
        )
    with open(unfinished / MANIFEST, "w", encoding="utf-8") as file:
        json.dump({**about, "files": files}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_folder(unfinished)
    complete = unfinished.parent / str(mark)
    os.rename(unfinished, complete)
    _sync_folder(complete.parent)
    return complete


def keep_newest(folder: Path, number: int) -> None:
    """Delete all but the newest ``number`` checkpoints."""
    for path in checkpoints_in(folder)[:-number]:
        doomed = folder / f"{_UNFINISHED}{path.name}-{os.urandom(4).hex()}"
        os.rename(path, doomed)  # half-deleted, it must not look complete
        shutil.rmtree(doomed, ignore_errors=True)


# --- reading ---


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint.

    Raises:
        ValueError: There is none, or it is damaged.
    """
    try:
        manifest: dict[str, Any] = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        manifest["files"] = {name: tuple(seal) for name, seal in manifest["files"].items()}
    except FileNotFoundError as error:
        raise ValueError(f"{path} is not a complete checkpoint: it has no {MANIFEST}") from error
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {MANIFEST} cannot be read") from error
    return manifest


def verify(path: Path, files: dict[str, Seal], rank: int, size: int) -> None:
    """Compare this rank's share of the files with their seals.

    Raises:
        ValueError: A file is missing or has other content.
    """
    for name in sorted(files)[rank::size]:
        file = path / name
        if not file.is_file():
            raise ValueError(f"{path} is damaged: {name} is missing. {_way_out(path)}")
        if _seal(file) != tuple(files[name]):
            raise ValueError(f"{path} is damaged: {name} is not what was written. {_way_out(path)}")


def _way_out(path: Path) -> str:
    return f"Delete {path.name} to go on from the checkpoint before it"


def _seal(path: Path) -> Seal:
    digest = hashlib.sha256()
    size = 0
    with open(path, "rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
            size += len(block)
        os.fsync(file.fileno())
    return size, digest.hexdigest()


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
