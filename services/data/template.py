"""What stands around every question of a source, in its words and in what the chat template is told."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.protocols.experience import PICTURE, Prompt

PLACE = "{prompt}"
"""Where the question stands; other braces are a template's own."""


def a_template(value: str | None) -> str | None:
    """``value``, a config's. Raises `ValueError` where it is none."""
    if value is None:
        return None
    if PLACE not in value:
        raise ValueError(
            f"{value[:60]!r} has no {PLACE}, where the question is to stand; say it, e.g. '{PLACE} Answer briefly.'"
        )
    if PICTURE in value:
        raise ValueError(f"it says {PICTURE}, which stands for a picture of a row; leave it out")
    if "\b" in value or "\f" in value:
        raise ValueError(
            r"it has a control character: between double quotes YAML makes one of \b and \f; write \\boxed and \\frac "
            "there"
        )
    return value


def with_template(prompt: Prompt, template: str | None) -> Prompt:
    """``prompt`` with ``template`` around its text, of a chat around the user's last words; None: as it is. Raises
    `ValueError` for a chat in which no user says anything.

    >>> with_template(Prompt(index=0, text="2+2"), "{prompt} = {x}").text
    '2+2 = {x}'
    """
    if template is None:
        return prompt
    if prompt.messages is None:
        return prompt.model_copy(update={"text": template.replace(PLACE, prompt.as_text())})
    places = [place for place, message in enumerate(prompt.messages) if message["role"] == "user"]
    if not places:
        raise ValueError("its template stands around the user's last message, and the user says nothing")
    messages = list(prompt.messages)
    last = messages[places[-1]]
    messages[places[-1]] = {**last, "content": template.replace(PLACE, last["content"])}
    return prompt.model_copy(update={"messages": messages})


def telling(prompt: Prompt, template: Mapping[str, Any]) -> Prompt:
    """``prompt``, which has the chat template told ``template`` too, where it does not say otherwise itself.

    >>> asked = Prompt(index=0, messages=[{"role": "user", "content": "2+2"}], chat_template_kwargs={"level": "high"})
    >>> telling(asked, {"level": "low", "enable_thinking": False}).chat_template_kwargs
    {'level': 'high', 'enable_thinking': False}
    """
    if not template:
        return prompt
    return prompt.model_copy(update={"chat_template_kwargs": {**template, **(prompt.chat_template_kwargs or {})}})
