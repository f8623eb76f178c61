"""Hugging Face datasets: by hub name, or local JSONL, JSON, CSV and parquet files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from glob import has_magic
from itertools import chain
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from penstock.protocols.chat import as_chat
from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.data import DataError, need
from penstock.services.data.config import HubData
from penstock.services.data.csv_rows import CsvRows
from penstock.services.data.json_rows import JsonRows, kind_of, words_of
from penstock.services.data.pictures import fitted, marked, marked_chat, picture_columns, read_pictures, undecoded
from penstock.services.data.source import PromptSource
from penstock.services.data.template import telling, with_template
from penstock.services.runtime.hub_names import named
from penstock.services.runtime.user_folders import find_files, folders

FORMATS = {".json": "json", ".jsonl": "json", ".csv": "csv", ".parquet": "parquet"}
"""Of local files, by the ending of their names."""
OTHERS = ("source_key", "answer_key", "rejected_key", "images_key", "tools_key", "chat_template_kwargs_key")
"""What names a column, beside the prompt's and the truth's."""
TOLD = ("tools", "chat_template_kwargs")
"""What a chat template is told beside messages: names of columns in TRL's data, and with ``_key`` the options here."""
NAMED = ("answer", "rejected", "chat_template_kwargs")
"""Of a prompt, what an error is told with the name of."""


class HubSource(PromptSource):
    """Rows of a dataset as prompts. A row that is no prompt raises `DataError` when it is drawn."""

    def __init__(self, config: HubData, key: str) -> None:
        need("datasets", "data", key)
        self._config = config
        found = _files(config, key)
        self._beside = list({file.parent: file for files in reversed(found) for file in reversed(files)}.values())
        rows = _load(config, key, found)
        if not len(rows):
            raise DataError(f"{key}: {_what(config)} has no rows")
        places = _places(config.split, len(rows), key) if config.files else range(len(rows))
        if not places:
            raise DataError(f"{key}.split: {config.split!r} has none of the {len(rows)} rows of {_what(config)}")
        for option in ("prompt_key", "truth_key", *OTHERS):
            column = getattr(config, option)
            if column and column not in rows.column_names and not (option == "truth_key" and _part_of(column, rows)):
                there = ", ".join(rows.column_names)
                raise DataError(f"{key}.{option}: no column {column!r} in {_what(config)}; it has {there}")
        self._truth_in = _part_of(config.truth_key, rows) if config.truth_key else ""
        """The column of maps that have the truth; empty: it is a column itself."""
        self._untold = [name for name in TOLD if name in rows.column_names and not getattr(config, f"{name}_key")]
        self._unshown: list[str] = []
        if not isinstance(rows, JsonRows | CsvRows):
            self._unshown = [name for name in picture_columns(rows) if name != config.images_key]
            if config.truth_key:  # what else there is, pictures say, need not be decoded
                truth = self._truth_in or config.truth_key
                others = (getattr(config, option) for option in OTHERS)
                rows = rows.select_columns(list(dict.fromkeys(filter(None, (config.prompt_key, truth, *others)))))
            _check_dates(rows, config, key)
            if config.images_key:
                rows = undecoded(rows, config.images_key)
        self._rows, self._places = rows, places[: config.limit]

    def __len__(self) -> int:
        return len(self._places)

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        place = self._places[index]
        row = dict(self._rows[place])
        images = row[self._config.images_key] if self._config.images_key else None
        if self._config.images_key and not self._config.truth_key:
            del row[self._config.images_key]  # no reward is handed them with the row
        truth = self._truth(row) if self._config.truth_key else row
        if truth is None:
            raise DataError(f"row {index}: {self._config.truth_key!r} is missing or null, so no reward can judge it")
        content, whole = self._chat(row[self._config.prompt_key]), self._config.answer_key == self._config.prompt_key
        answer, rejected = (self._answer(index, row, option) for option in ("answer_key", "rejected_key"))
        if whole:
            content, answer = _parted(index, content, "answer_key")
            if rejected is not None:
                other, rejected = _parted(index, rejected, "rejected_key")
                if not _alike(other, content):
                    raise DataError(f"row {index}: its two conversations (answer_key, rejected_key) begin otherwise")
        where, sizes = f"row {index}: {self._config.images_key}", (self._config.min_pixels, self._config.max_pixels)
        pictures = fitted(read_pictures(images, self._beside, where), *sizes, where)
        told = {name: getattr(self._config, f"{name}_key") for name in TOLD}
        own: dict[str, Any] = {name: self._chat(row[key]) if key else None for name, key in told.items()}
        chat, system = self._config.chat, self._config.system
        prompt = make_prompt(index, content, truth, chat, system, answer, pictures, rejected, **own)
        if self._config.source_key:
            prompt = prompt.model_copy(update={"source": _named(index, self._config.source_key, row)})
        if self._config.images_key:
            not_blind(prompt, f"{self._config.images_key!r} has no picture")
        return telling(with_template(prompt, self._config.template), self._config.chat_template_kwargs)

    def _answer(self, index: int, row: dict[str, Any], option: str) -> Any:
        """Of the column that the config's ``option`` names; None: it names none. Raises `DataError` where that has
        none."""
        key: str | None = getattr(self._config, option)
        if not key:
            return None
        found = self._chat(row[key])
        if isinstance(self._rows, CsvRows):  # an answer of digits is text, whatever a reward is handed
            found = self._rows.text(self._places[index], key)
        if found is None:
            raise DataError(f"row {index}: {key!r} is missing or null, so there is no answer to give ({option})")
        if not isinstance(found, str | list):
            words = f"{key!r} ({option}) is {kind_of(found)}, not text or a list of messages; write it as text"
            raise DataError(f"row {index}: {words}: {str(found)[:80]}")
        return found

    def _chat(self, found: Any) -> Any:
        """Of messages or tools, what the row has said: a table has in each map every key that any row has, and null."""
        return found if isinstance(self._rows, JsonRows) else without_nulls(found)

    def _truth(self, row: dict[str, Any]) -> Any:
        found: Any = row[self._truth_in or str(self._config.truth_key)]
        for name in (self._config.truth_key or "")[len(self._truth_in) + 1 :].split(".") if self._truth_in else ():
            found = found.get(name) if isinstance(found, dict) else None
        return found

    def untold(self) -> list[str]:
        """See `PromptSource`."""
        return self._untold

    def unshown(self) -> list[str]:
        """See `PromptSource`."""
        return self._unshown


def _part_of(key: str, rows: Any) -> str:
    """The column, of maps, of which ``key`` names a part; empty where it is a column itself, or nothing."""
    column = key.partition(".")[0]
    return column if key not in rows.column_names and column in rows.column_names else ""


def _named(index: int, key: str, row: dict[str, Any]) -> str:
    if not isinstance(name := row[key], str) or not name:
        raise DataError(f"row {index}: {key!r} (source_key) is {name!r}, which names no source; write it as text")
    return name


def not_blind(prompt: Prompt, lacks: str) -> Prompt:
    """``prompt``. Raises `DataError` where its words have `PICTURE` and it shows none, since its row ``lacks`` them."""
    if prompt.marks and not prompt.pictures:
        raise DataError(f"row {prompt.index}: its words have {PICTURE}, and {lacks}")
    return prompt


def make_prompt(
    index: int, content: Any, truth: Any, chat: bool, system: str | None, answer: Any = None,
    pictures: tuple[bytes, ...] = (), rejected: Any = None, **own: Any,
) -> Prompt:  # fmt: skip
    """A prompt from text or from a list of chat messages, and so its own ``answer``, where it has one, and the one that
    is ``rejected``; which shows ``pictures``, before its words where these do not say where. ``own``: what else a
    `Prompt` of this row has, such as ``tools``. Raises `DataError` for anything else."""
    for name, given in (("answer", answer), ("rejected", rejected)):
        if given is not None and not isinstance(given, str | list):
            raise DataError(f"row {index}: {name} is neither text nor a list of messages: {str(given)[:80]!r}")
    own |= {"truth": truth, "rejected": rejected, "pictures": pictures}
    if isinstance(content, str):
        if not content:
            raise DataError(f"row {index}: the prompt is empty")
        if not chat and not system:
            return _prompt(index, answer, text=marked(content, pictures), **own)
        content = [{"role": "user", "content": content}]
    if not isinstance(content, list) or not content:
        raise DataError(f"row {index}: the prompt is neither text nor a list of messages: {str(content)[:80]!r}")
    if pictures:
        content = marked_chat(content, pictures)
    messages = [{"role": "system", "content": system}, *content] if system else content
    prompt = _prompt(index, answer, messages=messages, **own)
    if content[-1]["role"] == "assistant" and answer is None:
        raise DataError(
            f"row {index}: the conversation ends with the assistant's words, which the policy would be shown; name its "
            "column as answer_key too, which takes them off, or let it end with the user's"
        )
    if system and any(message["role"] == "system" for message in content):
        raise DataError(
            f"row {index}: it has a system message of its own, and `system` gives another; leave one of them out"
        )
    return prompt


def _prompt(index: int, answer: str | list[Any] | None, **said: Any) -> Prompt:
    try:
        return Prompt(index=index, answer=answer, **said)
    except ValidationError as error:
        first = error.errors()[0]
        where = f"its {first['loc'][0]}: " if first["loc"] and first["loc"][0] in NAMED else ""
        raise DataError(f"row {index}: {where}{first['msg'].removeprefix('Value error, ')}") from None


def _alike(one: list[Any], other: list[Any]) -> bool:
    """They say the same, in whatever form."""
    try:
        return one == other or as_chat(one) == as_chat(other)
    except ValueError:  # of pictures, say
        return False


def _parted(index: int, talk: Any, option: str) -> tuple[list[Any], list[Any]]:
    """A conversation as what is asked and the assistant's last message; the config's ``option`` names its column.
    Raises `DataError` where there is none."""
    said = [isinstance(message, dict) and message.get("role") == "assistant" for message in talk or ()]
    if not isinstance(talk, list) or not any(said):
        words = f"no conversation in which the assistant says something ({option})"
        raise DataError(f"row {index}: {words}: {str(talk)[:80]!r}")
    last = len(said) - 1 - said[::-1].index(True)
    return talk[:last], [talk[last]]


def without_nulls(found: Any) -> Any:
    """Messages or tools from a table, as they were before it: it has in each map every key that any row has."""
    if isinstance(found, list):
        return [without_nulls(each) for each in found]
    if not isinstance(found, dict):
        return found
    kept = {"content"} if "role" in found else set()  # of a message; elsewhere it is an argument that a table added
    return {name: without_nulls(value) for name, value in found.items() if value is not None or name in kept}


def _what(config: HubData) -> str:
    return ", ".join(config.files) if config.files else repr(config.path)


def _files(config: HubData, key: str) -> list[list[Path]]:
    """The local files, by the names that the config has for them. Raises `DataError` where these are not there, empty,
    or named in the wrong place."""
    path = Path(config.path)
    if not config.files and path.suffix in FORMATS:
        right = f"path: {FORMATS[path.suffix]}, files: [{config.path}]"
        raise DataError(f"{key}.path: {config.path!r} is a local file; say {right}")
    if config.files and config.name:
        raise DataError(f"{key}.name: {config.name!r} is of a dataset on the hub, and `files` have none; leave it out")
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
    every = [find_files(name) for name in config.files]
    for number, (name, found) in enumerate(zip(config.files, every, strict=True)):
        if not found:
            looked = "" if Path(name).is_absolute() else f"; looked in {', '.join(map(str, folders()))}"
            missing = "no file matches" if has_magic(name) else "no such file:"
            raise DataError(f"{key}.files.{number}: {missing} {name}{looked}")
        if empty := [file for file in found if not file.stat().st_size]:
            raise DataError(f"{key}.files.{number}: {empty[0] if has_magic(name) else name} is empty")
    return every


def _load(config: HubData, key: str, found: Sequence[Sequence[Path]]) -> Any:
    import datasets

    datasets.disable_progress_bars()
    files = [file for of_name in found for file in of_name]
    numbers = [number for number, of_name in enumerate(found) for _ in of_name]
    if config.path == "json":
        return JsonRows(files, f"{key}.files", numbers)
    if config.path == "csv":
        return CsvRows(files, f"{key}.files", [config.prompt_key, config.truth_key] if config.truth_key else None)
    name, revision = named(config.path)
    try:
        return datasets.load_dataset(
            name,
            config.name,
            revision=revision,
            data_files=list(map(str, files)) or None,
            split="train" if files else config.split,  # of files `_places` has a part
        )
    except Exception as error:  # datasets raises many unrelated types
        if files:
            raise DataError(f"{key}.files: cannot read {_what(config)}: {words_of(error)}") from error
        hint = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
        raise DataError(
            f"{key}.path: cannot load {config.path!r} from the Hugging Face hub{hint}: {words_of(error)}; local files: "
            f"path: json, files: [rows.jsonl]"
        ) from error


def _places(split: str, count: int, key: str) -> Sequence[int]:
    """Which of the ``count`` rows of local files are of ``split``, as `datasets` reads it. Raises `DataError`."""
    from datasets import ReadInstruction

    try:
        parts = [range(part.from_, part.to) for part in ReadInstruction.from_spec(split).to_absolute({"train": count})]
    except (ValueError, AssertionError) as error:
        raise DataError(
            f"{key}.split: {split!r}: {words_of(error)}; local files are one split, train: name it, or a part of it "
            "such as train[:90%]"
        ) from None
    return parts[0] if len(parts) == 1 else [*chain(*parts)]


def _check_dates(rows: Any, config: HubData, key: str) -> None:
    """Raises `DataError` for a column of dates: a reward is told of numbers, text, lists and maps."""
    for column in rows.features.arrow_schema:
        if _is_dated(column.type):
            raise DataError(
                f"{key}.truth_key: the column {column.name!r} of {_what(config)} has dates ({column.type}), which no "
                "reward can be handed; write them as text, or name here the column that the reward compares with"
            )


def _is_dated(kind: Any) -> bool:
    import pyarrow

    return pyarrow.types.is_temporal(kind) or any(_is_dated(kind.field(i).type) for i in range(kind.num_fields))
