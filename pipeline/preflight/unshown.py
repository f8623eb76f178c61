"""Rows that speak of pictures, and show none: a model would be trained on them blind."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.data.config import CustomData, DataConfig
from penstock.services.data.source import PromptSource


def look_at_rows(
    source: DataConfig, key: str, prompts: Sequence[Prompt], usable: Sequence[Prompt], report: Report
) -> None:
    """Adds to ``report`` what is found in the ``usable`` ones of the first of ``prompts``, which are those of the
    ``source`` at ``key``: where all speak of pictures, the run cannot work; of a user's own function it may."""
    remedy = f"name the column of their pictures as {_keys(key, usable)}"
    word = f"; where {PICTURE} is but a word, give them by a function of yours (type: custom)"
    if isinstance(source, CustomData):
        remedy = "give them as penstock.Prompt(…, pictures=(bytes, …)), and set pictures: true"
    if blind := [prompt for prompt in usable if prompt.marks and not prompt.pictures]:
        words = (
            f"{key}: {len(blind)} of the first {len(usable)} rows have {PICTURE} in their words and show no picture, "
            f"e.g. row {blind[0].index}; {remedy}"
        )
        every = len(blind) == len(usable) and not isinstance(source, CustomData)
        words += word * every
        (report.problems if every else report.notes).append(words)
    elif isinstance(prompts, PromptSource) and (columns := prompts.unshown()):
        report.notes.append(
            f"{key}: nothing names the pictures of {', '.join(columns)}; for prompts that show them, {remedy}"
        )


def _keys(key: str, usable: Sequence[Prompt]) -> str:
    names = sorted({prompt.source for prompt in usable if prompt.source and prompt.marks and not prompt.pictures})
    return " and ".join(f"{key}.sources.{name}.images_key" for name in names) or f"{key}.images_key"
