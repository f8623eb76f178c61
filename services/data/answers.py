"""The right answer to a prompt, where its row has one."""

from __future__ import annotations

from typing import Any

from penstock.protocols.experience import Prompt


def own_answer(prompt: Prompt) -> Any:
    """What the row gives as its answer: `Prompt.answer`, or else its truth, of reasoning-gym the one of its entry. Text
    or messages where it is an answer; anything else, None too, where the row has none."""
    if prompt.answer is not None:
        return prompt.answer
    truth = prompt.truth
    return truth["entry"].get("answer") if isinstance(truth, dict) and isinstance(truth.get("entry"), dict) else truth


def answer_of(prompt: Prompt) -> str:
    """The right answer, as the warm start teaches it. Raises `ValueError` where the data has none."""
    answer = own_answer(prompt)
    if not isinstance(answer, str):
        raise ValueError(
            f"model.warm_start: the truth of prompt {prompt.index} is {type(answer).__name__}, not text, so there is "
            "no answer to teach; name a column of text as truth_key, or set model.warm_start.steps=0"
        )
    return answer
