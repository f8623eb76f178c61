"""What the policy said, as the message that its agent reads."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.protocols.messages import Lease
from penstock.services.turns.answers import Answer
from penstock.services.turns.library_parsers import parser_of
from penstock.services.turns.tokenizer import Tokenizer
from penstock.services.turns.tool_calls import TEMPLATE, THINK, UNTHINK, Call, Said, behind_thoughts

KEY = "gateway.tool_calls"
THOUGHTS = "reasoning_content"
"""Of a message: what was only thought, where agents are told that apart."""


class Replies:
    """Makes an assistant's message, as OpenAI's chat completions have it, of a turn's tokens."""

    def __init__(self, text: Tokenizer, tool_calls: str, apart: bool = False) -> None:
        """``apart``: what an answer begins with and is only thought is no part of its content (`THOUGHTS`)."""
        self._text, self._parser, self._apart = text, parser_of(tool_calls, text, KEY), apart
        self._reads_before = tool_calls == TEMPLATE

    def message(
        self,
        lease: Lease,
        place: int,
        turn: int,
        answer: Answer,
        tools: str,
        stops: Sequence[str] = (),
        given: np.ndarray | None = None,
        chat: bool = True,
    ) -> tuple[dict[str, Any], str]:
        """With the calls that the policy asks for, where it was told of ``tools`` (JSON); their ids follow from the
        turn. Its text ends before the first of ``stops``, which is told too; empty: there was none. ``given``: what
        stands before the answer; it may be the text of no ``chat``, which has no thoughts apart."""
        tokens = answer.tokens.tolist()
        content = self._text.decode([tokens])[0]
        calls: list[Call] = []
        apart = self._apart and chat
        thinking = (apart or bool(tools)) and given is not None and self._text.begins_thought(given)
        before = behind_thoughts(content, thinking)[0] if apart else ""
        if tools:
            before_it = self._text.decode_whole(given) if self._reads_before and given is not None else ""
            marked, cut = self._text.decode_marked(tokens), answer.finish == "length"
            content, calls = self._parser(Said(content, marked, tools, thinking, cut, before_it))
        stop = min((each for each in stops if each in content), key=content.index, default="")
        content = content.partition(stop)[0] if stop else content
        message: dict[str, Any] = {"role": "assistant", "content": content}
        if apart:
            if thoughts := before.strip().removeprefix(THINK).removesuffix(UNTHINK).strip():
                message |= {THOUGHTS: thoughts}
            within = stop and before.startswith(content)  # it ended in its thoughts
            behind = "" if within else content.lstrip().removeprefix(before.strip())  # a parser may have left them out
            message["content"] = behind.lstrip() if before else content
        if calls:
            message["tool_calls"] = [
                {
                    "id": _call_id(lease, place, turn, index),
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for index, call in enumerate(calls)
            ]
        return message, stop or self._ended_by(tokens, stops)

    def _ended_by(self, tokens: Sequence[int], stops: Sequence[str]) -> str:
        """The one of ``stops`` that is the last token, and a special one; empty: none is."""
        return next((stop for stop in stops if not self._text.special_ids([stop]).isdisjoint(tokens[-1:])), "")

    def logprobs(self, answer: Answer) -> list[dict[str, Any]]:
        """Of each token, as chat completions tell them."""
        spelled = self._text.spelled(answer.tokens.tolist())
        return [
            {
                "token": text,
                "logprob": float(value),
                "bytes": None if added is None else list(added),
                "top_logprobs": [],
            }
            for (text, added), value in zip(spelled, answer.logprobs, strict=True)
        ]


def _call_id(lease: Lease, place: int, turn: int, index: int) -> str:
    """Nine letters and digits: Mistral's templates take no other."""
    return hashlib.sha256(f"{lease.purpose}-{lease.number}-{place}-{turn}-{index}".encode()).hexdigest()[:9]
