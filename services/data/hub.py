"""Hugging Face datasets: by hub name, or local JSONL, JSON, CSV and parquet files."""

from __future__ import annotations

import json
import os
from itertools import islice
from pathlib import Path
from typing import Any

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, need
from penstock.services.data.config import HubData
from penstock.services.data.source import PromptSource
from penstock.services.runtime.user_folders import find_file, folders

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Of local files, by the ending of their names."""
COMPRESSED = (".gz", ".bz2", ".xz", ".zst", ".zip", ".lz4")
"""Endings of files whose lines `datasets` alone can read."""
LOOKED_AT = 10_000
"""Lines of each JSONL file that are looked at before it is read."""


class HubSource(PromptSource):
    """Rows of a dataset as prompts. A row that is no prompt raises `DataError` when it is drawn."""

    def __init__(self, config: HubData, key: str) -> None:
        need("datasets", "data", key)
        self._config, self._key = config, key
        _check_files(config, key)
        rows = _load(config, key)
        for option in ("prompt_key", "truth_key"):
            column = getattr(config, option)
            if column and column not in rows.column_names:
                there = ", ".join(rows.column_names)
                raise DataError(f"{key}.{option}: no column {column!r} in {_what(config)}; it has {there}")
        if not len(rows):
            raise DataError(f"{key}: {_what(config)} has no rows")
        if config.truth_key:  # what else there is, pictures say, need not be decoded
            rows = rows.select_columns(list(dict.fromkeys((config.prompt_key, config.truth_key))))
        self._rows = rows.select(range(min(config.limit, len(rows)))) if config.limit else rows

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        row = dict(self._rows[index])
        truth = row[self._config.truth_key] if self._config.truth_key else row
        if truth is None:
            raise DataError(f"row {index}: {self._config.truth_key!r} is missing or null, so no reward can judge it")
        return make_prompt(index, row[self._config.prompt_key], truth, self._config.chat, self._config.system)


def make_prompt(index: int, content: Any, truth: Any, chat: bool, system: str | None) -> Prompt:
    """A prompt from text or from a list of chat messages. Raises `DataError` for anything else."""
    if isinstance(content, str):
        if not content:
            raise DataError(f"row {index}: the prompt is empty")
        if not chat and not system:
            return Prompt(index=index, text=content, truth=truth)
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise DataError(f"row {index}: the prompt is neither text nor a list of messages: {str(content)[:80]!r}")
    messages = [{"role": "system", "content": system}, *content] if system else content
    try:
        return Prompt(index=index, messages=messages, truth=truth)
    except ValueError as error:
        raise DataError(f"row {index}: {_unlike_chat(messages, error)}") from None


def _unlike_chat(messages: list[Any], error: ValueError) -> str:
    """What keeps ``messages`` from being a chat, in a line."""
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"message {number} is no map with role and content: {str(message)[:80]}"
        for part in ("role", "content"):
            if not isinstance(message[part], str):
                kind = _kind(message[part])
                return f"{part} of message {number} is {kind}, not text (images and other parts cannot be used yet)"
    return " ".join(str(error).split())


def _what(config: HubData) -> str:
    return ", ".join(config.files) if config.files else repr(config.path)


def _check_files(config: HubData, key: str) -> None:
    """Raises `DataError` where local files are not there, empty, or named in the wrong place."""
    path = Path(config.path)
    if not config.files and path.suffix in FORMATS:
        right = f"path: {FORMATS[path.suffix]}, files: [{config.path}]"
        raise DataError(f"{key}.path: {config.path!r} is a local file; say {right}")
    if config.path in FORMATS.values() and not config.files:
        raise DataError(
            f"{key}.files: path={config.path!r} reads local files; name them here, e.g. files: [rows.jsonl]"
        )
    if config.files and config.path not in FORMATS.values():
        kind = FORMATS.get(Path(config.files[0]).suffix, "json")
        raise DataError(
            f"{key}.path: with `files` it is a format, one of {', '.join(sorted(set(FORMATS.values())))}, not "
            f"{config.path!r}; say path: {kind}"
        )
    for number, name in enumerate(config.files):
        file = find_file(name)
        if file is None:
            looked = "" if Path(name).is_absolute() else f"; looked in {', '.join(map(str, folders()))}"
            raise DataError(f"{key}.files.{number}: no such file: {name}{looked}")
        if not file.stat().st_size:
            raise DataError(f"{key}.files.{number}: {name} is empty")


def _load(config: HubData, key: str) -> Any:
    import datasets

    datasets.disable_progress_bars()
    if config.path == "json":
        _check_lines(config, key, LOOKED_AT)
    try:
        return datasets.load_dataset(
            config.path,
            config.name,
            data_files=[str(find_file(name)) for name in config.files] or None,
            split="train" if config.files else config.split,
        )
    except Exception as error:  # datasets raises many unrelated types
        if config.path == "json":
            _check_lines(config, key, None)
        if config.files:
            raise DataError(f"{key}.files: cannot read {_what(config)}: {_words(error)}") from error
        hint = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise DataError(
            f"{key}.path: cannot load {config.path!r} from the Hugging Face hub{hint}: {_words(error)}; local files: "
            f"path: json, files: [rows.jsonl]"
        ) from error


def _check_lines(config: HubData, key: str, limit: int | None) -> None:
    """The first ``limit`` lines of every file, or all. Some mistakes `datasets` would not tell of: in a column of two
    types, the text "2" becomes a number."""
    for number, name in enumerate(config.files):
        _find_broken_line(find_file(name) or Path(name), f"{key}.files.{number}", limit)


def _find_broken_line(file: Path, key: str, limit: int | None) -> None:
    """Raises `DataError` with the first line that is not JSON, or whose columns have other types than before; returns
    where the file is one JSON value, or nothing is wrong with its lines."""
    if file.suffix in COMPRESSED:
        return
    try:
        with file.open(encoding="utf-8-sig") as lines:
            if next((line.lstrip() for line in lines if line.strip()), "").startswith("["):
                return
        kinds: dict[str, tuple[str, int]] = {}
        with file.open(encoding="utf-8-sig") as lines:
            for number, line in enumerate(islice(lines, limit), 1):
                if line.strip():
                    _check_line(json.loads(line), number, kinds, f"{key}: {file}")
    except json.JSONDecodeError as error:
        raise DataError(f"{key}: {file}, line {number}: not JSON: {error.msg} at column {error.colno}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{key}: {file} is not UTF-8 text: {error.reason} at byte {error.start}") from None


def _check_line(row: Any, number: int, kinds: dict[str, tuple[str, int]], where: str) -> None:
    if not isinstance(row, dict):
        raise DataError(f"{where}, line {number}: a {type(row).__name__}; each line must be a map of columns")
    for column, value in row.items():
        if value is None:
            continue
        kind, first = kinds.setdefault(column, (_kind(value), number))
        if kind != _kind(value):
            raise DataError(
                f"{where}, line {number}: {column!r} is {_kind(value)}, and {kind} in line {first}; a column has one "
                "type"
            )


def _kind(value: Any) -> str:
    names = {bool: "a truth value", int: "a number", float: "a number", str: "text", list: "a list", dict: "a map"}
    return names.get(type(value), type(value).__name__)


def _words(error: BaseException) -> str:
    """The root of ``error``, in one line: datasets wraps what really happened."""
    root = error
    while root.__cause__ is not None:
        root = root.__cause__
    return f"{type(root).__name__}: {' '.join(str(root).split())[:300]}"
