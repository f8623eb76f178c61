"""Tools of rows, and calls in their conversations: whether the chat template tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import Prompt

if TYPE_CHECKING:
    from penstock.services.turns.tokenizer import Tokenizer


def look_at_tiny(rows: Sequence[Prompt], report: Report) -> None:
    """Adds to ``report`` where the first ``rows`` have any, of a tiny model, which has no chat template."""
    if found := next((prompt for prompt in rows if prompt.tools or _calls(prompt)), None):
        report.problems.append(
            f"prompts.train: row {found.index} has tools, or calls of them, which a chat template tells of, and a tiny "
            "model has none; take a pretrained model, or leave tools_key out and write calls into the contents"
        )


def look_at_rows(path: str, tokenizer: Tokenizer, rows: Sequence[Prompt], report: Report) -> None:
    """Adds to ``report`` where the chat template of the model at ``path`` leaves out what the first ``rows`` have."""
    for prompt in rows:
        silent = bool(prompt.tools) and np.array_equal(
            tokenizer.encode(prompt), tokenizer.encode(prompt.model_copy(update={"tools": None}))
        )
        lost = next((name for message in _calls(prompt) if (name := tokenizer.lost_call(message, prompt.tools))), "")
        if silent or lost:
            what = "its tools" if silent else f"the call of {lost} in its conversation"
            report.problems.append(
                f"prompts.train: row {prompt.index}: the chat template of {path} does not tell of {what}; take a model "
                "whose template does, give model.chat_template, or leave tools_key out and write them into the contents"
            )
            return


def _calls(prompt: Prompt) -> list[dict[str, object]]:
    return [message for message in prompt.messages or () if message.get("tool_calls")]
