"""Prompts that a script has given, and that were written down beside its run's config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.protocols.experience import Prompt
from penstock.services.data.hub import make_prompt
from penstock.services.data.source import PromptSource


def line(row: Mapping[str, Any] | Prompt) -> str:
    """A prompt as it is, or a row with ``prompt`` (text of a user, or messages) and perhaps ``truth`` and ``answer``,
    as JSON. Raises `KeyError` where it has no prompt, and `TypeError` for what JSON has not."""
    if isinstance(row, Prompt):
        return json.dumps(row.model_dump()) + "\n"
    own = {"answer": row["answer"]} if row.get("answer") is not None else {}
    return json.dumps({"prompt": row["prompt"], "truth": row.get("truth"), **own}) + "\n"


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
            return make_prompt(index, row["prompt"], row["truth"], chat=True, system=None, answer=row.get("answer"))
        return Prompt.model_validate(row)
