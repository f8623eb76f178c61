"""The right answer to a prompt, where its row has one."""

from __future__ import annotations

from typing import Any, TypeGuard

from penstock.protocols.chat import as_chat
from penstock.protocols.experience import Prompt
from penstock.services.data.json_rows import kind_of


def own_answer(prompt: Prompt) -> Any:
    """What the row gives as its answer: `Prompt.answer`, or else its truth, of reasoning-gym the one of its entry. Text
    or messages where it is an answer, which `is_answer` tells; anything else, None too, where the row has none."""
    if prompt.answer is not None:
        return prompt.answer
    truth = prompt.truth
    found = truth["entry"].get("answer") if isinstance(truth, dict) and isinstance(truth.get("entry"), dict) else truth
    try:
        return as_chat(found) if isinstance(found, list) else found
    except ValueError:
        return found


def is_answer(found: Any) -> TypeGuard[str | list[dict[str, Any]]]:
    """Whether what `own_answer` has found is text or messages: a truth may be anything, lists of other things too."""
    if isinstance(found, list):
        try:
            return bool(found) and bool(as_chat(found))
        except ValueError:
            return False
    return isinstance(found, str) and bool(found)


def not_answer(found: Any) -> str:
    """What else it is, in words."""
    if isinstance(found, list) and found:
        return "a list of something else"
    return kind_of(found) if found else "nothing"


def answer_of(prompt: Prompt) -> str:
    """The right answer, as the warm start teaches it. Raises `ValueError` where the data has none."""
    answer = own_answer(prompt)
    if not isinstance(answer, str):
        raise ValueError(
            f"model.warm_start: the truth of prompt {prompt.index} is {type(answer).__name__}, not text, so there is "
            "no answer to teach; set model.warm_start.steps=0, or, of files and the hub, name a column of text as "
            "truth_key"
        )
    return answer
