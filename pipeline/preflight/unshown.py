"""Rows that speak of pictures, and show none: a model would be trained on them blind."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.pipeline.preflight.report import Report
from penstock.protocols.experience import PICTURE, Prompt
from penstock.services.data.config import CustomData, DataConfig, MixData
from penstock.services.data.mixture import Mixture
from penstock.services.data.source import PromptSource


def look_at_rows(
    source: DataConfig, key: str, prompts: Sequence[Prompt], usable: Sequence[Prompt], report: Report
) -> None:
    """Adds to ``report`` what is found in the ``usable`` ones of the first of ``prompts``, which are those of the
    ``source`` at ``key``, of a mixture in those of each part: where most speak of pictures, the run cannot work; of
    a user's own function it may."""
    if isinstance(source, MixData) and isinstance(prompts, Mixture):
        for name, part in source.sources.items():
            own = [prompt for prompt in usable if prompts.is_of(name, prompt)]
            look_at_rows(part, f"{key}.sources.{name}", prompts.sources[name], own, report)
        return
    remedy = f"name the column of their pictures as {key}.images_key"
    word = f"; where {PICTURE} is but a word, give them by a function of yours (type: custom)"
    if isinstance(source, CustomData):
        remedy, word = "give them as penstock.Prompt(…, pictures=(bytes, …)), and set pictures: true", ""
    if blind := [prompt for prompt in usable if prompt.marks and not prompt.pictures]:
        words = (
            f"{key}: {len(blind)} of the first {len(usable)} rows have {PICTURE} in their words and show no picture, "
            f"e.g. row {blind[0].index}; {remedy}"
        )
        if 2 * len(blind) > len(usable) and word:
            report.problems.append(words + word)
        else:
            report.notes.append(words)
    elif isinstance(prompts, PromptSource) and (columns := prompts.unshown()):
        report.notes.append(
            f"{key}: nothing names the pictures of {', '.join(columns)}; for prompts that show them, {remedy}"
        )
