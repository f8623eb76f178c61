"""Any other causal language model: every sequence is run whole for each of its tokens. Slow, and right whatever the
model keeps between two tokens."""

from __future__ import annotations

from typing import Any

import torch

from penstock.services.rollout.engines.torch.transformers_model import TransformersModel, logit_rows


class RecomputedModel(TransformersModel):
    """The interface of `native.NativeModel`; what it keeps of a slot are its tokens."""

    def __init__(
        self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device,
        head_dtype: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, dtype, device, head_dtype)
        self._tokens = torch.zeros((slots, length), dtype=torch.long, device=device)
        self._vocabulary = config.get_text_config().vocab_size

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
        """As `NativeModel.prefill`."""
        for row, mine in enumerate(slots):
            self._tokens[mine, : tokens.shape[1]] = tokens[row]
        return self._last(tokens, lengths)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """As `NativeModel.decode`."""
        rows = torch.arange(len(tokens), device=tokens.device)
        self._tokens[rows, positions] = tokens
        return self._last(self._tokens[: len(tokens), :span], positions + 1)

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """As `NativeModel.move`."""
        self._tokens[target, :length] = self._tokens[source, :length]

    @property
    def cached(self) -> list[torch.Tensor]:
        """Nothing."""
        return []

    def _last(self, tokens: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Logits after the last of the first ``lengths`` tokens of each row, ``[rows, vocabulary]``. What stands behind
        them no causal model looks at."""
        size = logit_rows(self._vocabulary, tokens.shape[1])
        steps = torch.arange(tokens.shape[1], device=tokens.device)[None]
        found = []
        for part, sizes in zip(tokens.split(size), lengths.split(size), strict=True):
            out = self.weights(input_ids=part, attention_mask=(steps < sizes[:, None]).long(), use_cache=False)
            found.append(out.logits[torch.arange(len(part), device=part.device), sizes - 1].float())
        return torch.cat(found)
