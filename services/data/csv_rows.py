"""Rows of CSV files, whose cells are text: what is a number is told of a whole column, and not of a part of it."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.services.data import DataError
from penstock.services.data.json_rows import texts_of, words_of

FITS = -(2**63), 2**64 - 1
"""Integers that have a place in a message."""
INTEGER, NUMBER = re.compile(r"[+-]?\d+"), re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")


class CsvRows:
    """Rows of ``files``, the first line of each of which names the columns. A cell without anything in it is None, any
    other is its text, ``NA`` and ``None`` too; in a column where all of them are numbers (and none an integer of more
    than 64 bits) it is that number. Lies in the cache of ``datasets``. Raises `DataError`, with ``key``, for a file
    that cannot be read, or has a line with more cells than columns; one more that is empty, behind each line's last
    comma, is none."""

    def __init__(self, files: Sequence[Path], key: str, wanted: Sequence[str] | None = None) -> None:
        """``wanted``: the columns that will be asked for; None: all."""
        import datasets
        import pandas

        try:
            names = [str(name) for name in pandas.read_csv(files[0], nrows=0, index_col=False).columns]
            with warnings.catch_warnings():
                warnings.simplefilter("error", pandas.errors.ParserWarning)  # a cell without a column would be lost
                self._rows = datasets.load_dataset(
                    "csv", data_files=list(map(str, files)), split="train", keep_default_na=False, na_values=[""],
                    features=datasets.Features({name: datasets.Value("string") for name in names}),
                    index_col=False,  # or the first column would be an index where a line has a comma at its end
                )  # fmt: skip
        except Exception as error:  # both raise many unrelated types
            raise DataError(f"{key}: cannot read {', '.join(map(str, files))}: {words_of(error)}") from error
        self.column_names = names
        self._read: dict[str, Callable[[str], Any]] = {
            name: kind for name in wanted or names if name in names and (kind := self._kind(name))
        }
        """How the cells of columns are read that have numbers alone."""

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        row: dict[str, Any] = self._rows[index]
        read = {name: kind(row[name]) for name, kind in self._read.items() if row[name] is not None}
        return row | read

    def text(self, index: int, column: str) -> str | None:
        """What a cell says, though its column has numbers alone; None where nothing is in it."""
        found: str | None = self._rows[index][column]
        return found

    def _kind(self, name: str) -> Callable[[str], Any] | None:
        whole, empty = True, True
        for text in texts_of(self._rows, name):
            whole, empty = whole and bool(INTEGER.fullmatch(text)), False
            if not whole and not NUMBER.fullmatch(text):
                return None
        if whole and any(not FITS[0] <= int(text) <= FITS[1] for text in texts_of(self._rows, name)):
            return None  # as text each is what it was
        return None if empty else int if whole else float
