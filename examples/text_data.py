"""Reads texts, with labels or without, and splits them into training and test rows.

A row is the privacy unit. Whether it is a test row depends on its number and on a seed alone, so
that adding a row moves no other one.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SHIPPED = Path(__file__).parent / "data" / "movie_review_snippets.tsv"
TASKS = ("classify", "lm")

# A row of a file: the line where it ends, and its columns.
Row = tuple[int, dict[str, Any]]


class DataError(ValueError):
    """A data file cannot be used; the message names the file, and the line if there is one."""


@dataclass(frozen=True)
class Texts:
    """Rows of one split.

    Attributes:
        texts: N texts, none blank.
        labels: N class numbers from 0; all 0 for the task ``"lm"``.
    """

    texts: list[str]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TextSplits:
    """What :func:`load_text` gives.

    Attributes:
        classes: The labels as the file has them, in order of their class numbers.
    """

    train: Texts
    test: Texts
    classes: list[int]


def load_text(
    path: str | Path = SHIPPED, *, task: str, test_fraction: float = 0.1, seed: int = 0
) -> TextSplits:
    """Read a file and split its rows.

    Args:
        path: A ``.jsonl``, ``.csv`` or ``.tsv`` file in UTF-8 with a column ``text`` and, for
            ``"classify"``, a column ``label`` (an integer) or ``score`` (a number; the label is
            whether it is positive); or, for ``"lm"``, a ``.txt`` file with one document a line.
        task: ``"classify"`` or ``"lm"``.
        test_fraction: Expected share of test rows, in (0, 1).
        seed: Seed of the split.

    Raises:
        DataError: The file is missing, empty or malformed, or has rows of one class only.
        ValueError: Another argument is out of range.
    """
    path = Path(path)
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    texts, labels = _parse(path, task)
    classes = sorted(set(labels))
    if task == "classify" and len(classes) < 2:
        raise DataError(
            f"{path}: all {len(texts)} rows have the label {classes[0]}; a classifier needs rows "
            "of two classes or more"
        )
    number = {label: index for index, label in enumerate(classes)}
    sides: tuple[list[int], list[int]] = ([], [])
    for row in range(len(texts)):
        sides[_is_test(row, test_fraction, seed)].append(row)
    if not all(sides):
        raise DataError(f"{path}: {len(texts)} rows are too few for a training and a test split")
    train, test = (
        Texts([texts[row] for row in rows], [number[labels[row]] for row in rows]) for rows in sides
    )
    return TextSplits(train, test, classes)


def _is_test(row: int, fraction: float, seed: int) -> bool:
    digest = hashlib.sha256(f"{seed}:{row}".encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def _parse(path: Path, task: str) -> tuple[list[str], list[int]]:
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: the name must end in {', '.join(_READERS)}")
    if reader is _read_txt and task == "classify":
        raise DataError(
            f"{path}: a .txt file has no labels; use --task lm, or a .jsonl, .csv or .tsv file"
        )
    texts, labels = [], []
    for line, columns in reader(path, _decode(path)):
        texts.append(_text(path, line, columns))
        labels.append(_label(path, line, columns) if task == "classify" else 0)
    if not texts:
        raise DataError(f"{path}: the file has no rows")
    return texts, labels


def _decode(path: Path) -> str:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror})") from error
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        byte = error.object[error.start]
        raise DataError(
            f"{path}, line {line}: byte 0x{byte:02x} is not valid UTF-8; convert the file to UTF-8"
        ) from error


# --- columns ---


def _text(path: Path, line: int, columns: dict[str, Any]) -> str:
    text = columns.get("text")
    if not isinstance(text, str):
        raise DataError(f"{path}, line {line}: no column 'text'")
    if not text.strip():
        raise DataError(f"{path}, line {line}: the text is blank")
    return text


def _label(path: Path, line: int, columns: dict[str, Any]) -> int:
    name = "label" if "label" in columns else "score"
    value = columns.get(name)
    if value is None:
        raise DataError(f"{path}, line {line}: no column 'label' or 'score'")
    try:
        if isinstance(value, bool):
            raise ValueError
        number = float(value)
        label = int(number) if name == "label" else int(number > 0)
        if number != number or (name == "label" and label != number):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        kind = "an integer" if name == "label" else "a number"
        raise DataError(f"{path}, line {line}: the {name} is {value!r}, not {kind}") from None
    return label


# --- formats ---


def _read_txt(path: Path, content: str) -> Iterator[Row]:
    for line, text in enumerate(content.split("\n"), start=1):
        if text.strip():
            yield line, {"text": text.removesuffix("\r")}


def _read_jsonl(path: Path, content: str) -> Iterator[Row]:
    for line, text in enumerate(content.split("\n"), start=1):
        if not text.strip():
            continue
        try:
            columns = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {line}: not JSON ({error.msg})") from error
        if not isinstance(columns, dict):
            raise DataError(f"{path}, line {line}: not a JSON object")
        yield line, columns


def _read_csv(path: Path, content: str) -> Iterator[Row]:
    yield from _read_table(path, content, strict=True)


def _read_tsv(path: Path, content: str) -> Iterator[Row]:
    yield from _read_table(path, content, delimiter="\t", quoting=csv.QUOTE_NONE)


def _read_table(path: Path, content: str, **form: Any) -> Iterator[Row]:
    # newline="" keeps line ends, so that quoted fields may span lines.
    reader = csv.reader(io.StringIO(content, newline=""), **form)
    header: list[str] = []
    try:
        for fields in reader:
            if not fields:
                continue
            if not header:
                header = fields
                _check_header(path, reader.line_num, header)
            elif len(fields) != len(header):
                raise DataError(
                    f"{path}, line {reader.line_num}: {len(fields)} columns, but the header has "
                    f"{len(header)}"
                )
            else:
                yield reader.line_num, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _check_header(path: Path, line: int, header: list[str]) -> None:
    if "text" not in header:
        raise DataError(f"{path}, line {line}: no column 'text' in the header, which has {header}")


_READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_txt,
}
