"""Prompts to token ids, token ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.modeling.load import load_tokenizer
from penstock.services.rollout.engines.base import RequestError

_ANSWER = "penstock answers"
"""Stands for an answer, to see what a template puts behind one."""


class Tokenizer:
    """The tokenizer of a model, as a rollout uses it."""

    def __init__(self, path: str) -> None:
        self._tokenizer = load_tokenizer(path)

    def encode(self, prompt: Prompt, tools: list[dict[str, Any]] | None = None) -> np.ndarray:
        """int32 ``[tokens]``. Chats go through the chat template, with the JSON schemas of ``tools``; without one,
        their contents are joined by blank lines. Raises `RequestError` where tools cannot be told of."""
        if tools and (prompt.messages is None or not self._tokenizer.chat_template):
            raise RequestError(
                "tools are told by a chat template: the prompt must be messages (chat: true), and the tokenizer must "
                "have one"
            )
        if prompt.text is not None:
            ids = self._tokenizer(prompt.text)["input_ids"]
        elif self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template(
                prompt.messages, tools=tools, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = self._tokenizer(prompt.as_text())["input_ids"]
        return np.array(ids, np.int32)

    def observe(self, observation: str | list[dict[str, str]], chat: bool, ended_with: int) -> np.ndarray:
        """int32 ``[tokens]``: what stands between an answer, whose last token is ``ended_with``, and the next one. In
        a ``chat`` it is what the template puts there, less the end of the answer where that was sampled; else the
        observation alone. Tokens that were sampled are never made again from text."""
        messages = [{"role": "user", "content": observation}] if isinstance(observation, str) else observation
        if not chat or not self._tokenizer.chat_template:
            text = "\n\n".join(message["content"] for message in messages)
        else:
            around = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _ANSWER}, *messages]
            whole = self._tokenizer.apply_chat_template(around, add_generation_prompt=True, tokenize=False)
            _, found, text = whole.partition(_ANSWER)
            if not found:
                raise RequestError("the chat template leaves out what the assistant said; it cannot be used in turns")
            text = text.removeprefix(self._tokenizer.decode([ended_with]))
        return np.array(self._tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text of each row, special tokens left out."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is not None:  # one call into the tokenizer's own threads instead of one a row
            return backend.decode_batch([list(row) for row in rows], skip_special_tokens=True)
        return [self._tokenizer.decode(row, skip_special_tokens=True) for row in rows]

    def stop_ids(self, generation_config: Any) -> set[int]:
        """The ids that end a response: the tokenizer's end of sequence and the model's own list."""
        stops = getattr(generation_config, "eos_token_id", None)
        listed = stops if isinstance(stops, list) else [stops]
        return {int(i) for i in (*listed, self._tokenizer.eos_token_id) if i is not None}
