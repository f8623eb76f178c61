"""Hugging Face datasets: by hub name, or local JSONL, JSON, CSV and parquet files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, need
from penstock.services.data.config import HubData
from penstock.services.data.source import PromptSource

FORMATS = {"json", "csv", "parquet"}


class HubSource(PromptSource):
    """Rows of a dataset as prompts. A row that is no prompt raises `DataError` when it is drawn."""

    def __init__(self, config: HubData) -> None:
        need("datasets", "data")
        import datasets

        datasets.disable_progress_bars()
        self._config = config
        missing = [file for file in config.files if not Path(file).is_file()]
        if missing:
            raise DataError(f"prompts: files: no such file: {missing[0]}")
        if config.path in FORMATS and not config.files:
            raise DataError(f"prompts: path={config.path!r} reads local files; name them in `files`")
        try:
            rows = datasets.load_dataset(
                config.path,
                config.name,
                data_files=config.files or None,
                split="train" if config.files else config.split,
            )
        except Exception as error:  # datasets raises many unrelated types
            raise DataError(f"prompts: cannot load {config.path!r}: {type(error).__name__}: {error}") from error
        for key in filter(None, (config.prompt_key, config.truth_key)):
            if key not in rows.column_names:
                raise DataError(f"prompts: no column {key!r} in {config.path!r}; it has {', '.join(rows.column_names)}")
        self._rows = rows.select(range(min(config.limit, len(rows)))) if config.limit else rows

    def __len__(self) -> int:
        return len(self._rows)

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        row = dict(self._rows[index])
        truth = row[self._config.truth_key] if self._config.truth_key else row
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
        raise DataError(f"row {index}: not chat messages with role and content: {error}") from None
