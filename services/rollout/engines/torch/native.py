"""Qwen2, Qwen3 and Llama as plain functions over fused weights: the fast path of the embedded engine."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from penstock.services.modeling import head
from penstock.services.rollout.engines.torch.cache import SlotCache, row_of_each

FAMILIES = {"llama", "qwen2", "qwen3"}

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, queries ``[R, T, heads, dim]``, keys and values ``[R, T, kv heads, dim]``) → ``[R, T, heads * dim]``"""


def supports(config: Any) -> bool:
    """The family is written here, with a rotary embedding that does not change with the length."""
    return (
        config.model_type in FAMILIES
        and config.hidden_act == "silu"
        and _rope(config).get("rope_type", "default") in ("default", "linear", "llama3", "yarn")
        and not getattr(config, "use_sliding_window", False)
    )


@dataclass(slots=True)
class Layer:
    """One decoder layer, with query, key and value in one matrix, and gate and up in one."""

    norm: torch.Tensor
    qkv: torch.Tensor
    qkv_bias: torch.Tensor | None
    qk_norm: torch.Tensor | None
    """Weights of the norms of queries and keys, ``[heads + kv heads, dim]``."""
    out: torch.Tensor
    out_bias: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    gate_up_bias: torch.Tensor | None
    down: torch.Tensor
    down_bias: torch.Tensor | None


@dataclass(slots=True, weakref_slot=True)
class Weights:
    """A whole version."""

    embedding: torch.Tensor
    layers: list[Layer]
    norm: torch.Tensor
    head: torch.Tensor


class NativeModel:
    """The network over a `SlotCache`. ``weights`` may be replaced between two calls."""

    def __init__(
        self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device,
        head_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self._config = config
        self._multiply = head.linear if head_dtype else F.linear
        """How hidden states become logits."""
        self._dtype, self._device = dtype, device
        self._heads = config.num_attention_heads
        self._kv_heads = config.num_key_value_heads
        self._dim = head_dim(config)
        self._cache = SlotCache(config.num_hidden_layers, slots, self._kv_heads, length, self._dim, dtype, device)
        self.weights: Weights | None = None
        self._prepared: Callable[[], Weights | None] = lambda: None
        """The last version that was, as long as anybody wants it."""
        cos, sin = _rotary(config, self._dim, length, device)
        self._cos, self._sin = cos.to(dtype), sin.to(dtype)

    def prepare(self, named: Mapping[str, torch.Tensor]) -> Weights:
        """Fuses a version's tensors: side by side in memory they are one matrix already, else they are copied."""

        def put(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self._device, self._dtype)

        def get(name: str) -> torch.Tensor:
            return put(named[name])

        def maybe(name: str) -> torch.Tensor | None:
            return get(name) if name in named else None

        def fuse(names: list[str]) -> torch.Tensor | None:
            # Fused before they are put there: the device would have the parts beside the whole, of all layers.
            return put(_joined([named[name] for name in names])) if any(name in named for name in names) else None

        layers = []
        for index in range(self._config.num_hidden_layers):
            prefix = f"model.layers.{index}."
            attention = prefix + "self_attn."
            qkv = [attention + name for name in ("q_proj", "k_proj", "v_proj")]
            mlp = [prefix + "mlp." + name for name in ("gate_proj", "up_proj")]
            qkv_weight, gate_up = fuse([f"{n}.weight" for n in qkv]), fuse([f"{n}.weight" for n in mlp])
            assert qkv_weight is not None and gate_up is not None
            layers.append(
                Layer(
                    norm=get(prefix + "input_layernorm.weight"),
                    qkv=qkv_weight,
                    qkv_bias=fuse([f"{n}.bias" for n in qkv]),
                    qk_norm=self._of_heads(maybe(attention + "q_norm.weight"), maybe(attention + "k_norm.weight")),
                    out=get(attention + "o_proj.weight"),
                    out_bias=maybe(attention + "o_proj.bias"),
                    mlp_norm=get(prefix + "post_attention_layernorm.weight"),
                    gate_up=gate_up,
                    gate_up_bias=fuse([f"{n}.bias" for n in mlp]),
                    down=get(prefix + "mlp.down_proj.weight"),
                    down_bias=maybe(prefix + "mlp.down_proj.bias"),
                )
            )
        embedding = get("model.embed_tokens.weight")
        head = maybe("lm_head.weight")
        found = Weights(embedding, layers, get("model.norm.weight"), embedding if head is None else head)
        self._prepared = weakref.ref(found)
        return found

    def _of_heads(self, q_norm: torch.Tensor | None, k_norm: torch.Tensor | None) -> torch.Tensor | None:
        if q_norm is None or k_norm is None:
            return None
        return torch.cat([q_norm.expand(self._heads, self._dim), k_norm.expand(self._kv_heads, self._dim)])

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
        """Runs right-padded prompts (int64 ``[P, T]``) and fills, for each, all its ``slots``. Returns the logits
        after each prompt's last token, ``[P, vocabulary]``."""
        every = torch.cat(slots)
        of_slot = row_of_each(slots, tokens.device)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            of_slots = (each.transpose(1, 2).index_select(0, of_slot) for each in (k, v))
            self._cache.fill(layer, every, *of_slots)
            return self._attend_before(layer, q, k, v)

        assert self.weights is not None
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        hidden = self._layers(self.weights, tokens, positions, attend)
        last = hidden[torch.arange(len(tokens), device=tokens.device), lengths - 1]
        return self._logits(self.weights, last)

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """One token (int64 ``[A]``) for each of the first A slots, at its position; ``span`` is the highest position
        plus one. Returns logits ``[A, vocabulary]``."""
        count = len(tokens)
        rows = torch.arange(count, device=tokens.device)
        hidden_from = torch.arange(span, device=tokens.device)[None] > positions[:, None]
        mask = torch.zeros((count, 1, 1, span), dtype=self._dtype, device=tokens.device)
        mask.masked_fill_(hidden_from[:, None, None], float("-inf"))
        shape = (count, self._kv_heads, self._heads // self._kv_heads, self._dim)

        def attend(layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self._cache.append(layer, rows, positions, k[:, 0], v[:, 0])
            keys, values = self._cache.keys[layer][:count, :, :span], self._cache.values[layer][:count, :, :span]
            # The queries that share a key head stand as if they were positions: no key is copied for them.
            out = F.scaled_dot_product_attention(q.view(shape), keys, values, attn_mask=mask)
            return out.reshape(count, 1, -1)

        assert self.weights is not None
        hidden = self._layers(self.weights, tokens[:, None], positions[:, None], attend)
        return self._logits(self.weights, hidden[:, 0])

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """The first ``length`` tokens of the ``source`` slots take the places of those of the ``target`` slots."""
        self._cache.move(source, target, length)

    @property
    def kept(self) -> list[torch.Tensor]:
        """The weights that serve, and those that are about to."""
        every = [w for w in (self.weights, self._prepared()) if w is not None]
        found = [getattr(layer, name) for w in every for layer in w.layers for name in Layer.__slots__]
        return [t for t in (*found, *(end for w in every for end in (w.embedding, w.norm, w.head))) if t is not None]

    @property
    def cached(self) -> list[torch.Tensor]:
        """Keys and values of the slots."""
        return self._cache.tensors

    def logits(self, weights: Weights, tokens: torch.Tensor) -> torch.Tensor:
        """Logits ``[T, vocabulary]`` after every one of ``tokens`` (int64 ``[T]``) under ``weights``, which need not be
        those that serve; touches no slot."""
        positions = torch.arange(len(tokens), device=tokens.device)[None]
        return self._logits(weights, self._layers(weights, tokens[None], positions, self._attend_before)[0])

    def _attend_before(self, _layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """Of each token to what is before it, and to itself."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        gqa = self._heads != self._kv_heads
        if gqa and q.is_cuda and q.dtype == torch.float32:  # torch's only kernel that shares heads makes all scores
            k, v = (each.repeat_interleave(self._heads // self._kv_heads, 1) for each in (k, v))
            gqa = False
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        return out.transpose(1, 2).flatten(2)

    def _layers(self, weights: Weights, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        eps = self._config.rms_norm_eps
        heads, kv, dim = self._heads, self._kv_heads, self._dim
        cos, sin = self._cos[positions][:, :, None], self._sin[positions][:, :, None]
        x = F.embedding(tokens, weights.embedding)
        for index, w in enumerate(weights.layers):
            fused = F.linear(_norm(x, w.norm, eps), w.qkv, w.qkv_bias)
            fused = fused.view(*tokens.shape, heads + 2 * kv, dim)
            qk, v = fused[:, :, : heads + kv], fused[:, :, heads + kv :]
            if w.qk_norm is not None:
                qk = _norm(qk, None, eps) * w.qk_norm
            qk = qk * cos + _rotate_half(qk) * sin
            attended = attend(index, qk[:, :, :heads], qk[:, :, heads:], v)
            x = x + F.linear(attended, w.out, w.out_bias)
            gate, up = F.linear(_norm(x, w.mlp_norm, eps), w.gate_up, w.gate_up_bias).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, w.down, w.down_bias)
        return x

    def _logits(self, weights: Weights, x: torch.Tensor) -> torch.Tensor:
        return self._multiply(_norm(x, weights.norm, self._config.rms_norm_eps), weights.head).float()


def head_dim(config: Any) -> int:
    """Size of one attention head."""
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def kv_numbers(config: Any) -> int:
    """Numbers that all layers keep of one token, keys and values, which may differ from layer to layer."""
    heads = (getattr(each, "num_key_value_heads", None) or each.num_attention_heads for each in config.per_layer_config)
    sizes = (head_dim(each) for each in config.per_layer_config)
    return sum(2 * count * size for count, size in zip(heads, sizes, strict=True))


def _norm(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    return F.rms_norm(x, (x.shape[-1],), weight, eps)


def _joined(parts: list[torch.Tensor]) -> torch.Tensor:
    """``parts`` as one tensor, without a copy where each begins where the one before ends."""
    first, end = parts[0], parts[0].data_ptr()
    for part in parts:
        if not part.is_contiguous() or part.data_ptr() != end:
            return torch.cat(parts)
        end += part.numel() * part.element_size()
    if len({part.untyped_storage().data_ptr() for part in parts}) > 1:
        return torch.cat(parts)
    rows = sum(part.shape[0] for part in parts)
    return first.as_strided((rows, *first.shape[1:]), first.stride())


def _rotate_half(x: torch.Tensor) -> torch.Tensor:
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def _rope(config: Any) -> dict[str, Any]:
    return getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}


def _rotary(config: Any, dim: int, length: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tables of cosine and sine, float32 ``[length, dim]``."""
    rope = _rope(config)
    kind, scaling = rope.get("rope_type", "default"), 1.0
    if kind == "default":
        base = rope.get("rope_theta") or getattr(config, "rope_theta", 10000.0)
        frequencies = 1.0 / base ** (torch.arange(0, dim, 2, dtype=torch.float32, device=device) / dim)
    else:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](config, device)
    angles = torch.arange(length, dtype=torch.float32, device=device)[:, None] * frequencies.float()
    angles = torch.cat((angles, angles), -1)
    return angles.cos() * scaling, angles.sin() * scaling
