"""A dense decoder's sizes, from its config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.resources.model_files import read_config
from penstock.protocols.versions import DTYPE_BYTES


@dataclass(frozen=True)
class Shape:
    """A dense decoder's sizes."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    max_length: int

    @property
    def layer(self) -> int:
        """Parameters of one layer's matrices."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        return attention + 3 * self.hidden * self.intermediate

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.vocabulary * self.hidden

    @property
    def ends(self) -> int:
        """Parameters of embedding and head."""
        return self.head * (1 if self.tied else 2)

    @property
    def parameters(self) -> int:
        """All, less norms and biases."""
        return self.layers * self.layer + self.ends

    def kv_bytes(self, dtype: str) -> int:
        """KV of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * DTYPE_BYTES[dtype]


def shape_of(config: Config) -> Shape | None:
    """The model's sizes; None where its config.json is not on this machine, or describes no plain decoder."""
    data = read_config(config)
    if data is None:
        return None
    assert isinstance(config.model, PretrainedModel)
    return _shape(Path(config.model.path).name, data)


def _shape(name: str, data: dict[str, Any]) -> Shape | None:
    if any("experts" in key for key in data):
        return None  # a mixture of experts is not counted yet
    try:
        heads = data["num_attention_heads"]
        return Shape(
            name, data["hidden_size"], data["intermediate_size"], data["num_hidden_layers"], heads,
            data.get("num_key_value_heads") or heads, data.get("head_dim") or data["hidden_size"] // heads,
            data["vocab_size"], bool(data.get("tie_word_embeddings")), data.get("max_position_embeddings") or 1 << 20,
        )  # fmt: skip
    except KeyError:
        return None
