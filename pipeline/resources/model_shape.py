"""A dense decoder's sizes, from its config.json. Imports no torch."""

from __future__ import annotations

from collections.abc import Sequence
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
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each of a layer's, by the name of its module."""
        hidden, inner = self.hidden, self.intermediate
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden),
            "gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden),
        }  # fmt: skip

    @property
    def layer(self) -> int:
        """Parameters of one layer's matrices."""
        return sum(inputs * outputs for inputs, outputs in self.matrices.values())

    def adapter(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Parameters of a LoRA adapter; none of ``targets``: all of a layer's matrices are."""
        chosen = [size for name, size in self.matrices.items() if not targets or name in targets]
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in chosen)

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
