"""Prompts that a script has given, and that were written down beside its run's config."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.data.hub import make_prompt, not_blind, without_nulls
from penstock.services.data.pictures import read_pictures
from penstock.services.data.source import PromptSource

OWN = ("answer", "rejected", "tools", "chat_template_kwargs")
"""Columns that a row need not have."""
READ = ("prompt", "truth", *OWN, "images", "image")
"""Columns of a row."""


def line(row: Mapping[str, Any] | Prompt, table: bool = False) -> str:
    """A prompt as it is, or a row with ``prompt`` (text of a user, or messages) and perhaps ``truth``,
    ``images`` (or ``image``) and what `OWN` names, as JSON; NaN, a gap in a table, is none. Of a
    ``table``, a `datasets.Dataset` or polars' own, nulls that it has put into messages and tools are left out. Raises
    `KeyError` where it has no prompt, `TypeError` for what JSON has not and for columns that nobody reads beside a
    missing truth, and `DataError` for images that are none."""
    if isinstance(row, Prompt):
        return json.dumps({**row.model_dump(), "pictures": _as_text(row.pictures)}) + "\n"
    row = {name: None if isinstance(value, float) and math.isnan(value) else value for name, value in row.items()}
    if table:
        row |= {name: without_nulls(row[name]) for name in ("prompt", *OWN) if name in row}
    own = {name: row[name] for name in OWN if row.get(name) is not None}
    images = row.get("images", row.get("image"))
    if images is not None:
        own["images"] = _as_text(read_pictures(images, [], "images"))
    prompt, truth = row["prompt"], row.get("truth")
    if "truth" not in row and (unread := [name for name in row if name not in READ]):
        raise TypeError(
            f"it has no truth, and {', '.join(map(str, unread))} would be read by nobody; call the column with the "
            "right answer truth, or give truth: None"
        )
    return json.dumps({"prompt": prompt, "truth": truth, **own}, default=_plain) + "\n"


def _plain(value: Any) -> Any:
    """A number of NumPy, say. Raises `TypeError` for what JSON has not."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON")


def shows(line: str) -> bool:
    """One of `line` has pictures."""
    row = json.loads(line)
    return bool(row.get("images") or row.get("pictures"))


def _as_text(pictures: Sequence[bytes]) -> list[str]:
    return [base64.b64encode(picture).decode() for picture in pictures]


def _as_files(texts: Sequence[str]) -> tuple[bytes, ...]:
    return tuple(map(base64.b64decode, texts))


class Written(PromptSource):
    """The prompts of a file of such lines, each made when it is asked for."""

    def __init__(self, file: str) -> None:
        self._lines = Path(file).read_bytes().splitlines()

    def __len__(self) -> int:
        return len(self._lines)

    def prompt(self, index: int) -> Prompt:
        """See `PromptSource`."""
        row = json.loads(self._lines[index])
        if "prompt" in row:
            pictures = _as_files(row.get("images", ()))
            own = {name: row.get(name) for name in OWN}
            prompt = make_prompt(index, row["prompt"], row["truth"], True, None, pictures=pictures, **own)
            return not_blind(prompt, "it has no images")
        return Prompt.model_validate({**row, "pictures": _as_files(row.get("pictures", ()))})
