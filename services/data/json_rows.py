"""Rows of JSON files just as they are written: what reads them into tables makes dates of texts that look like some."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock.services.data import DataError
from penstock.services.data.known_files import KnownFile

Columns = dict[str, tuple[str | None, str]]
"""Of each column of a file the type, in words, and the place in it that has it first; None: it has no value."""


class JsonRows:
    """Rows of ``files`` that have one object a line, or one list of them. All are looked at; then lines lie in the
    cache of ``datasets``, a list in memory, and each row is parsed when it is asked for. A file of lines that has not
    changed since it was looked at is not looked at again: of millions of rows that takes minutes. Raises `DataError`,
    with ``key`` and the line, for a file that cannot be read, a row that is no object, and a column that has had
    another type."""

    def __init__(self, files: Sequence[Path], key: str, numbers: Sequence[int] | None = None) -> None:
        """``numbers``: which of those at ``key`` each file is of, as patterns name several; None: each of its own."""
        import datasets

        self._kinds: dict[str, tuple[str, str]] = {}
        """Of columns: the type, and where it is first."""
        self._names: dict[str, None] = {}
        self._lines = datasets.concatenate_datasets(
            [self._rows(file, f"{key}.{n}") for n, file in zip(numbers or range(len(files)), files, strict=True)]
        )

    @property
    def column_names(self) -> list[str]:
        """Of all rows."""
        return list(self._names)

    def __len__(self) -> int:
        return len(self._lines)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """With None for the columns that it has not."""
        return dict.fromkeys(self._names) | json.loads(self._lines[index]["text"])

    def _rows(self, file: Path, key: str) -> Any:
        """Of one file, as lines in a dataset."""
        lines, columns = _looked_at(file, key)
        self._names |= dict.fromkeys(columns)
        for column, (kind, place) in columns.items():
            if kind is None:
                continue
            other, where = self._kinds.setdefault(column, (kind, f"{file}, {place}"))
            if kind != other:
                raise DataError(_two_types(column, kind, file, place, other, where, key))
        return lines


def _looked_at(file: Path, key: str) -> tuple[Any, Columns]:
    """Its rows as lines, in a dataset, and what columns these have."""
    import datasets

    lines, place, columns = _lines_of(file, key), "line", Columns()
    known = KnownFile(file)
    if found := known.read():
        return lines, {column: (kind, where) for column, (kind, where) in found.items()}
    if next((line for line in texts_of(lines) if line.strip()), "").lstrip().startswith("["):
        rows, place = _parsed("\n".join(texts_of(lines)), file, key), "row"
        kinds = datasets.Features({"text": datasets.Value("string")})
        lines = datasets.Dataset.from_dict({"text": [json.dumps(row) for row in rows]}, features=kinds)
    full = []
    for number, line in enumerate(texts_of(lines)):
        if line.strip():
            full.append(number)
            _note(columns, _parsed(line, file, key, number), file, f"{place} {number + 1}", key)
    if len(full) < len(lines):
        return lines.select(full), columns
    if place == "line":
        known.keep(columns)
    return lines, columns


def _note(columns: Columns, row: Any, file: Path, place: str, key: str) -> None:
    """Those of one more row."""
    if not isinstance(row, dict):
        raise DataError(f"{key}: {file}, {place}: a {type(row).__name__}; each must be a map of columns")
    for column, value in row.items():
        if type(value) is int and not -(2**63) <= value < 2**64:
            raise DataError(
                f"{key}: {file}, {place}: {column!r} is an integer of more than 64 bits; put it into quotes"
            )
        kind, first = columns.get(column, (None, place))
        found = None if value is None else kind_of(value)
        if kind is None:
            columns[column] = found, place
        elif found not in (None, kind):
            raise DataError(_two_types(column, str(found), file, place, kind, first, key))


def _two_types(column: str, kind: str, file: Path, place: str, other: str, where: str, key: str) -> str:
    return f"{key}: {file}, {place}: {column!r} is {kind}, and {other} in {where}; a column has one type"


def kind_of(value: Any) -> str:
    """In words."""
    names = {
        bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "a map",
        type(None): "null",
    }  # fmt: skip
    return names.get(type(value), type(value).__name__)


def words_of(error: BaseException) -> str:
    """The root of ``error``, in one line: datasets wraps what really happened."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return f"{type(root).__name__}: {' '.join(str(root).split())[:300]}"


def _lines_of(file: Path, key: str) -> Any:
    """All of its lines as a dataset, whatever it is compressed by."""
    import datasets

    try:
        return datasets.load_dataset("text", data_files=[str(file)], split="train", encoding="utf-8-sig")
    except Exception as error:  # datasets raises many unrelated types
        raise DataError(f"{key}: cannot read {file}: {words_of(error)}; it must be UTF-8 text") from error


def texts_of(rows: Any, column: str = "text") -> Iterator[str]:
    """Of a dataset's ``column`` of texts, those that are there."""
    for batch in rows.select_columns([column]).iter(1000):
        yield from (text for text in batch[column] if text is not None)


def _parsed(text: str, file: Path, key: str, before: int = 0) -> Any:
    """``before``: lines of the file that stand before it."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = before + error.lineno
        raise DataError(f"{key}: {file}, line {line}: not JSON: {error.msg} at column {error.colno}") from None
    except RecursionError:
        raise DataError(f"{key}: {file}, line {before + 1}: it is nested too deeply") from None
