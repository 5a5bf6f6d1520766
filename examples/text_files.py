"""Reads rows from files of text: where each is, for messages, and its columns."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Where a row ends, such as "line 3", and its columns.
Row = tuple[str, dict[str, Any]]


class DataError(ValueError):
    """A data file cannot be used; the message names the file, and the line if there is one."""


def rows_of(path: Path, needed: tuple[tuple[str, ...], ...]) -> Iterator[Row]:
    """The rows of a file, in order.

    Args:
        path: A ``.jsonl``, ``.json``, ``.csv``, ``.tsv`` or ``.txt`` file in UTF-8.
        needed: Groups of columns, one of which a table's header must hold completely.

    Raises:
        DataError: The file cannot be read, or a row of it.
    """
    reader = READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(f"{path}: the name must end in {', '.join(READERS)}")
    for number, (where, columns) in enumerate(reader(path, _decode(path))):
        if number == 0 and isinstance(columns, _Header):
            _check_header(path, where, list(columns), needed)
        else:
            yield where, columns


class _Header(dict[str, Any]):
    """The first row of a table: its columns' names."""


def _check_header(
    path: Path, where: str, header: list[str], needed: tuple[tuple[str, ...], ...]
) -> None:
    if not any(set(group) <= set(header) for group in needed):
        hint = "; name one with --text-column" if len(needed) > 1 else ""
        raise DataError(
            f"{path}, {where}: no column {wanted(needed)} in the header, which has {header}{hint}"
        )


def wanted(needed: tuple[tuple[str, ...], ...]) -> str:
    """Groups of columns in words."""
    return " or ".join(" and ".join(map(repr, group)) for group in needed)


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


# --- formats ---


def _read_txt(path: Path, content: str) -> Iterator[Row]:
    for line, text in enumerate(content.split("\n"), start=1):
        if text.strip():
            yield f"line {line}", {"text": text.removesuffix("\r")}


def _read_json(path: Path, content: str) -> Iterator[Row]:
    """A list of objects, or an object a line."""
    if not content.lstrip().startswith("["):
        yield from _read_jsonl(path, content)
        return
    try:
        items = json.loads(content)
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}: not JSON ({error.msg})") from error
    for number, item in enumerate(items, start=1):
        yield _object(path, f"item {number}", item)


def _read_jsonl(path: Path, content: str) -> Iterator[Row]:
    for line, text in enumerate(content.split("\n"), start=1):
        if not text.strip():
            continue
        try:
            item = json.loads(text)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {line}: not JSON ({error.msg})") from error
        yield _object(path, f"line {line}", item)


def _object(path: Path, where: str, item: Any) -> Row:
    if not isinstance(item, dict):
        raise DataError(f"{path}, {where}: not a JSON object")
    return where, item


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
            where = f"line {reader.line_num}"
            if not header:
                header = fields
                yield where, _Header.fromkeys(header)
            elif len(fields) != len(header):
                raise DataError(
                    f"{path}, {where}: {len(fields)} columns, but the header has {len(header)}"
                )
            else:
                yield where, dict(zip(header, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error


READERS: dict[str, Callable[[Path, str], Iterator[Row]]] = {
    ".jsonl": _read_jsonl,
    ".json": _read_json,
    ".csv": _read_csv,
    ".tsv": _read_tsv,
    ".txt": _read_txt,
}
