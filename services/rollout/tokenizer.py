"""Prompts to token ids, token ids to text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.protocols.experience import Prompt
from penstock.services.modeling.load import load_tokenizer


class Tokenizer:
    """The tokenizer of a model, as a rollout uses it."""

    def __init__(self, path: str) -> None:
        self._tokenizer = load_tokenizer(path)

    def encode(self, prompt: Prompt) -> np.ndarray:
        """int32 ``[tokens]``. Chats go through the chat template; without one, their contents are joined by blank
        lines."""
        if prompt.text is not None:
            ids = self._tokenizer(prompt.text)["input_ids"]
        elif self._tokenizer.chat_template:
            ids = self._tokenizer.apply_chat_template(
                prompt.messages, add_generation_prompt=True, tokenize=True, return_dict=False
            )
        else:
            ids = self._tokenizer(prompt.as_text())["input_ids"]
        return np.array(ids, np.int32)

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
