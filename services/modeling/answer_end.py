"""Which tokens end an answer: those that the tokenizer and the model list, and the one that the chat template puts
behind an answer, which of a base model need be none of these."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.services.runtime.hub_names import named

MARK = "penstock answers"
"""Stands for an answer, to see what a template puts behind one."""


@dataclass(frozen=True)
class TemplateEnd:
    """What a chat template puts behind an answer that nothing follows."""

    whole: str = ""
    text: str = ""
    """Of that, up to its first special token: behind it nobody would sample."""
    token: int | None = None
    """That one; None: there is none."""


def special_tokens(tokenizer: Any) -> dict[int, str]:
    """Tokens that are no text, by their ids: the library's own list has not all of them."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    named = zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True)
    return {id: token.content for id, token in added.items() if token.special} | dict(named)


def template_end(tokenizer: Any, template: Mapping[str, Any] | None = None) -> TemplateEnd:
    """Of the tokenizer's chat template, which is told ``template`` beside the messages; nothing where it has none, or
    does not take a chat of a question and an answer."""
    if not tokenizer.chat_template:
        return TemplateEnd()
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": MARK}]
    try:
        told = tokenizer.apply_chat_template(asked, tokenize=False, **(template or {}))
    except Exception:  # a template may raise anything; whoever tells it a real chat hears of it
        return TemplateEnd()
    whole = told.partition(MARK)[2]
    found = [(at, -len(text), id) for id, text in special_tokens(tokenizer).items() if (at := whole.find(text)) >= 0]
    if not found:
        return TemplateEnd(whole, whole)
    at, size, token = min(found)
    return TemplateEnd(whole, whole[: at - size], token)


def end_between(tokenizer: Any, template: Mapping[str, Any] | None = None) -> str:
    """The special token that the chat template puts behind an answer whatever follows it, which need not be the one
    behind the last (gpt-oss). Empty where it has none, or does not take such chats."""
    found = set[str]()
    for follows in ("user", "assistant"):
        chat = [("user", "?"), ("assistant", MARK), (follows, "?")]
        try:
            told = tokenizer.apply_chat_template(
                [{"role": role, "content": said} for role, said in chat], tokenize=False, **(template or {})
            )
        except Exception:  # see `template_end`
            return ""
        behind = told.partition(MARK)[2]
        found.add(next((text for text in special_tokens(tokenizer).values() if text and behind.startswith(text)), ""))
    return found.pop() if len(found) == 1 else ""


def stop_ids(tokenizer: Any, listed: Any, end: TemplateEnd) -> set[int]:
    """The ids that end an answer. ``listed``: a model's own, as its config or transformers' GenerationConfig has them,
    or None; ``end``: the chat template's."""
    own = getattr(listed, "eos_token_id", None)
    ends = own if isinstance(own, list) else [own]
    return {int(i) for i in (*ends, tokenizer.eos_token_id, end.token) if i is not None}


def listed_ends(path: str) -> Any:
    """Where the model at ``path`` lists the tokens that end what it says; None: nowhere."""
    from transformers import GenerationConfig

    from penstock.services.modeling.load import ModelError, load_config

    try:
        name, revision = named(path)
        return GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:  # it has no such file
        pass
    try:
        return load_config(path).get_text_config()
    except ModelError:
        return None
