"""The right answer to a prompt, where its data has one."""

from __future__ import annotations

from penstock.protocols.experience import Prompt


def answer_of(prompt: Prompt) -> str:
    """The right answer, as the warm start teaches it. Raises `ValueError` where the data has none."""
    truth = prompt.truth
    if isinstance(truth, dict) and "entry" in truth:
        truth = truth["entry"].get("answer")
    if not isinstance(truth, str):
        raise ValueError(
            f"model.warm_start: the truth of prompt {prompt.index} is {type(truth).__name__}, not text, so there is no "
            "answer to teach; name a column of text as truth_key, or set model.warm_start.steps=0"
        )
    return truth
