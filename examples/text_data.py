"""Texts, with labels or without, split into training and test rows.

A row is the privacy unit. Whether it is a test row depends on its number and on a seed alone, so
that adding a row moves no other one.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conversations import Conversation, as_text, turns_in
from text_files import DataError, rows_of, wanted

SHIPPED = Path(__file__).parent / "data" / "movie_review_snippets.tsv"
TASKS = ("classify", "lm")
Label = int | str
Text = str | Conversation


@dataclass(frozen=True)
class Columns:
    """Where a row's text and label are.

    Attributes:
        text: Name of the column; ``None``: ``text``, else ``messages``, else ``prompt`` and
            ``completion``.
        label: Name of the column; ``None``: ``label``, else ``score``, whose label is
            ``score > 0``.
    """

    text: str | None = None
    label: str | None = None

    @property
    def needed(self) -> tuple[tuple[str, ...], ...]:
        """Groups of columns, one of which holds the text."""
        return ((self.text,),) if self.text else (("text",), ("messages",), _PAIR)


_PAIR = ("prompt", "completion")
_USUAL = Columns()


@dataclass(frozen=True)
class Texts:
    """Rows of one split.

    Attributes:
        texts: N texts, none blank; or conversations.
        labels: N class numbers from 0; all 0 for the task ``"lm"``.
    """

    texts: list[Text]
    labels: list[int]

    def __len__(self) -> int:
        return len(self.texts)

    @property
    def plain(self) -> list[str]:
        """The texts; conversations as text."""
        return [text if isinstance(text, str) else as_text(text) for text in self.texts]


@dataclass(frozen=True)
class TextSplits:
    """What :func:`load_text` gives.

    Attributes:
        classes: The labels as the file has them, in order of their class numbers.
    """

    train: Texts
    test: Texts
    classes: list[Label]


def load_text(
    path: str | Path = SHIPPED,
    *,
    task: str,
    test_fraction: float = 0.1,
    seed: int = 0,
    columns: Columns = _USUAL,
    test_path: str | Path | None = None,
) -> TextSplits:
    """Read a file and split its rows.

    Args:
        path: A ``.jsonl``, ``.json``, ``.csv`` or ``.tsv`` file in UTF-8 with a column ``text``
            (or ``messages``, or ``prompt`` and ``completion``) and, for ``"classify"``, a column
            ``label`` (integers, or texts) or ``score`` (a number; the label is whether it is
            positive); or, for ``"lm"``, a ``.txt`` file with one document a line.
        task: ``"classify"`` or ``"lm"``.
        test_fraction: Expected share of test rows, in (0, 1).
        seed: Seed of the split.
        columns: Other names of the columns.
        test_path: A file with the test rows: then all rows of ``path`` are trained on.

    Raises:
        DataError: A file is missing, empty or malformed, or has rows of one class only.
        ValueError: Another argument is out of range.
    """
    path = Path(path)
    if task not in TASKS:
        raise ValueError(f"task must be one of {TASKS}, got {task!r}")
    if not 0 < test_fraction < 1:
        raise ValueError(f"test_fraction must be between 0 and 1, got {test_fraction}")
    texts, labels = _parse(path, task, columns)
    classes = sorted(set(labels))
    if task == "classify" and len(classes) < 2:
        raise DataError(
            f"{path}: all {len(texts)} rows have the label {classes[0]}; a classifier needs rows "
            "of two classes or more"
        )
    number = {label: index for index, label in enumerate(classes)}
    if test_path is not None:
        test = _test_rows(Path(test_path), task, columns, number)
        return TextSplits(Texts(texts, [number[label] for label in labels]), test, classes)
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


def _test_rows(path: Path, task: str, columns: Columns, number: dict[Label, int]) -> Texts:
    texts, labels = _parse(path, task, columns)
    unknown = sorted({repr(label) for label in labels if label not in number})
    if unknown:
        raise DataError(
            f"{path}: labels {', '.join(unknown)}, but the training rows have {list(number)}"
        )
    return Texts(texts, [number[label] for label in labels])


def _parse(path: Path, task: str, columns: Columns) -> tuple[list[Text], list[Label]]:
    if path.suffix.lower() == ".txt" and task == "classify":
        raise DataError(
            f"{path}: a .txt file has no labels; use --task lm, or a .jsonl, .csv or .tsv file"
        )
    texts: list[Text] = []
    labels: list[Label] = []
    for where, row in rows_of(path, columns.needed):
        try:
            text = _text(row, columns)
            texts.append(
                as_text(text) if task == "classify" and not isinstance(text, str) else text
            )
            labels.append(_label(row, columns.label, labels) if task == "classify" else 0)
        except ValueError as error:
            raise DataError(f"{path}, {where}: {error}") from None
    if not texts:
        raise DataError(f"{path}: the file has no rows")
    return texts, labels


def _text(row: dict[str, Any], columns: Columns) -> Text:
    for group in columns.needed:
        if all(name in row for name in group):
            break
    else:
        hint = "" if columns.text else "; name one with --text-column"
        raise ValueError(f"no column {wanted(columns.needed)}; there are {list(row)}{hint}")
    if group in (("messages",), _PAIR):
        return turns_in(row)
    text = row[group[0]]
    if not isinstance(text, str):
        raise ValueError(f"the {group[0]} is {'null' if text is None else repr(text)}, not a text")
    if not text.strip():
        raise ValueError(f"the {group[0]} is blank")
    return text


def _label(row: dict[str, Any], column: str | None, before: list[Label]) -> Label:
    name = column or ("label" if "label" in row else "score")
    value = row.get(name)
    if value is None:
        if column:
            raise ValueError(f"no column {column!r}; there are {list(row)}")
        raise ValueError(
            f"no column 'label' or 'score'; there are {list(row)}; name one with --label-column"
        )
    if column is None and name == "score":
        return int(_number(value, "the score") > 0)
    label = _integer_or_text(value, name)
    if before and type(before[0]) is not type(label):
        kind = "an integer" if isinstance(before[0], int) else "a text"
        raise ValueError(f"the {name} is {value!r}, not {kind} like those before it")
    return label


def _number(value: Any, what: str) -> float:
    try:
        number = math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if math.isnan(number):
        raise ValueError(f"{what} is {value!r}, not a number")
    return number


def _integer_or_text(value: Any, name: str) -> Label:
    """A label. What looks like a number has to be an integer."""
    try:
        number = _number(value, name)
    except ValueError:
        if isinstance(value, str) and value.strip() and value.strip().lower() != "nan":
            return value
        number = math.nan
    if not number.is_integer():
        raise ValueError(f"the {name} is {value!r}, neither an integer nor a text")
    return int(number)
