"""Sizes of what a decoder's layer is made of. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

ATTENTION, LINEAR = "self_attn", "linear_attn"


@dataclass(frozen=True)
class Matrix:
    """One of a layer's."""

    inputs: int
    outputs: int
    within: str = "mlp"
    """What part of its layer it is in."""
    share: float = 1.0
    """Of the layers, how many have it."""

    @property
    def size(self) -> int:
        """Its numbers."""
        return self.inputs * self.outputs

    @property
    def numbers(self) -> float:
        """Of a layer, on average."""
        return self.share * self.size


@dataclass(frozen=True)
class Linear:
    """Linear attention: a state of each value head in the place of keys and values (Gated DeltaNet)."""

    heads: int
    """Of values."""
    key_heads: int
    size: int
    """Numbers of a value in one head."""
    key_size: int
    kernel: int
    """Tokens that the convolution before it sees."""

    @property
    def values(self) -> int:
        """Numbers of a token's value, over all heads."""
        return self.heads * self.size

    @property
    def mixed(self) -> int:
        """Numbers of a token that the convolution mixes: query, key and value."""
        return 2 * self.key_heads * self.key_size + self.values

    @property
    def state_bytes(self) -> int:
        """Of a sequence, in one layer: fp32, and the last tokens before the convolution in 16 bits."""
        return 4 * self.heads * self.key_size * self.size + 2 * (self.kernel - 1) * self.mixed

    def matrices(self, hidden: int, share: float) -> dict[str, Matrix]:
        """Of a layer, by the name of the module; a ``share`` of the layers has them."""
        sizes = {"qkv": self.mixed, "z": self.values, "b": self.heads, "a": self.heads}
        found = {f"in_proj_{name}": Matrix(hidden, size, LINEAR, share) for name, size in sizes.items()}
        return found | {"out_proj": Matrix(self.values, hidden, LINEAR, share)}


@dataclass(frozen=True)
class Latent:
    """Attention whose keys and values are made of few numbers, which alone are kept (MLA: DeepSeek-V2, 2024,
    arXiv:2405.04434, section 2.1)."""

    query_rank: int
    """Numbers that a token's queries are made of; 0: they are made of its hidden state."""
    rank: int
    """Numbers that its keys and values are made of."""
    turned: int
    """Numbers of a query and a key that know their position; all heads share those of a key."""
    plain: int
    """The others."""
    value: int
    """Numbers of a value."""

    @property
    def key(self) -> int:
        """Numbers of a query, and of a key."""
        return self.plain + self.turned

    @property
    def kept(self) -> int:
        """Numbers of a token that are kept of a layer, for all heads."""
        return self.rank + self.turned

    def matrices(self, hidden: int, heads: int) -> dict[str, Matrix]:
        """Of a layer, by the name of the module."""
        queries = {"q_proj": (hidden, heads * self.key)}
        if self.query_rank:
            queries = {"q_a_proj": (hidden, self.query_rank), "q_b_proj": (self.query_rank, heads * self.key)}
        sizes = queries | {
            "kv_a_proj_with_mqa": (hidden, self.kept), "kv_b_proj": (self.rank, heads * (self.plain + self.value)),
            "o_proj": (heads * self.value, hidden),
        }  # fmt: skip
        return {name: Matrix(*size, ATTENTION) for name, size in sizes.items()}


def attention(hidden: int, queries: int, keys: int, gated: bool, share: float) -> dict[str, Matrix]:
    """The matrices of a layer that attends, by the name of the module: ``queries`` and ``keys`` are their numbers over
    all heads."""
    sizes = {
        "q_proj": (hidden, queries * (1 + gated)), "k_proj": (hidden, keys), "v_proj": (hidden, keys),
        "o_proj": (queries, hidden),
    }  # fmt: skip
    return {name: Matrix(*size, ATTENTION, share) for name, size in sizes.items()}


def feed_forward(hidden: int, inner: int, within: str, share: float) -> dict[str, Matrix]:
    """The matrices of a layer's feed-forward part that is ``inner`` numbers wide, by the name of the module."""
    before, behind = Matrix(hidden, inner, within, share), Matrix(inner, hidden, within, share)
    found = {"gate_proj": before, "up_proj": before, "down_proj": behind}
    return found if within == "mlp" else {f"{within}.{name}": matrix for name, matrix in found.items()}
