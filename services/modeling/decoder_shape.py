"""A decoder's sizes, from what its config.json says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from penstock.protocols.versions import DTYPE_BYTES, Dtype
from penstock.services.modeling.families import (
    BOTH_WAYS,
    COUNTED_MIXTURES,
    LATENT,
    LINEAR,
    NORMS_HEADS,
    PACKED,
    PLAIN,
    STAGED,
    TENSOR,
    TENSOR_WHOLE,
    TIED,
    UNCOUNTED,
    keeps_state,
)
from penstock.services.modeling.layer_names import is_called, is_pattern
from penstock.services.modeling.layer_sizes import Latent, Linear, Matrix, attention, feed_forward
from penstock.services.modeling.lengths import stretched
from penstock.services.modeling.parallel.stage_layers import stage_layers

SEEN_BYTES = 512 << 20
"""Of what towers that stand still have found in pictures, so much is remembered on a device; the oldest is
forgotten."""


@dataclass(frozen=True)
class Shape:
    """A decoder's sizes: a dense one's, or those of a mixture of experts."""

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
    experts: int = 0
    """Of each layer, in a mixture; `intermediate` is the size of one."""
    chosen: int = 0
    """Experts that a token goes to."""
    beside: int = 0
    """The size of what every token meets beside a mixture's experts."""
    dense: int = 0
    """A mixture's layers that have no experts, but a plain feed-forward part, of the size `dense_inner`."""
    dense_inner: int = 0
    latent: Latent | None = None
    """What keys and values are made of, where not of the hidden state: `kv_heads` is `heads` then, and `head_dim` the
    size of a key."""
    linear: Linear | None = None
    """What layers have that attend to a state instead of all tokens."""
    attending: float = 1.0
    """The share of layers that attend to all tokens."""
    gated: bool = False
    """What these find is weighed by a gate, which is made with the queries."""
    packs: bool = True
    """Ranks may share its rows, between tokens."""
    shares: bool = True
    """Answers to a prompt follow one copy of it (`families.PACKED`)."""
    staged: bool = True
    """Ranks may share its layers (`families.STAGED`)."""
    tensor: bool = True
    """Ranks may share its matrices, and with them what is kept of each token (`families.TENSOR`)."""
    split: bool = True
    """Ranks may share its matrices at all (`families.TENSOR_WHOLE`)."""
    counted: bool = True
    """Its FLOPs are."""
    norms_heads: bool = False
    """Queries and keys are normalised, head by head."""
    begins: bool = True
    """It has the embedding; a pipeline's later stages have not."""
    ends_here: bool = True
    """It has the head; a pipeline's earlier stages have not."""
    dtype: Dtype = "bfloat16"
    """`model.dtype`: of versions, and of engines and references."""
    towers: int = 0
    """Parameters beside the decoder: of what sees or hears."""
    learned_towers: int = 0
    """Of these, those that learn (`trainer.train_towers`)."""
    sees: bool = False
    """It is shown pictures: a rank of the trainer has towers that stand still once more."""
    longest: int = 0
    """Tokens of the longest row that the run may make, which is never cut; 0: nobody knows."""
    still: tuple[int, ...] = ()
    """Parameters of each layer's matrices that do not learn (`trainer.freeze`); and of embedding and head."""
    still_ends: tuple[int, int] = (0, 0)

    def stage(self, number: int, count: int) -> Shape:
        """What a pipeline's stage ``number`` of ``count`` has."""
        if count == 1:
            return self
        first, end = stage_layers(self.layers, count)[number]
        dense = max(0, min(end, self.dense) - first)
        return replace(
            self, layers=end - first, dense=dense, begins=number == 0, ends_here=number == count - 1,
            still=self.still[first:end],
        )  # fmt: skip

    @property
    def routed_bytes(self) -> int:
        """Of one token, which experts it was sent to, in all layers."""
        return self.mixtures * self.chosen * (1 if self.experts < 256 else 2)

    @property
    def whole(self) -> bool:
        """It is no stage of a pipeline."""
        return self.begins and self.ends_here

    @cached_property
    def matrices(self) -> dict[str, Matrix]:
        """Those of a layer, by the name of its module; of a mixture, those that are no expert's."""
        hidden, inner, share = self.hidden, self.intermediate, self.attending
        if self.latent:
            found = self.latent.matrices(hidden, self.heads)
        else:
            q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
            found = attention(hidden, q, kv, self.gated, share)
        if self.linear:
            found |= self.linear.matrices(hidden, 1 - share)
        if self.beside:
            found |= feed_forward(hidden, self.beside, "mlp.shared_expert", 1 - self.dense / self.layers)
        if self.experts:
            inner, share = self.dense_inner, self.dense / self.layers
        return found | (feed_forward(hidden, inner, "mlp", share if self.experts else 1.0) if inner else {})

    @cached_property
    def shared(self) -> float:
        """Parameters of a layer that every token meets, less the router's; on average."""
        return sum(matrix.numbers for matrix in self.matrices.values())

    @cached_property
    def between(self) -> float:
        """Of these, those of its feed-forward part."""
        return sum(matrix.numbers for matrix in self.matrices.values() if matrix.within.startswith("mlp"))

    @property
    def router(self) -> int:
        """Parameters of what chooses a token's experts."""
        return self.experts * self.hidden

    @property
    def expert(self) -> int:
        """Parameters of one of a mixture's experts."""
        return 3 * self.hidden * self.intermediate if self.experts else 0

    @property
    def mixtures(self) -> int:
        """Layers that have experts."""
        return self.layers - self.dense if self.experts else 0

    @property
    def active(self) -> float:
        """Parameters of a layer that one token meets, on average."""
        return self.shared + self.mixtures / self.layers * (self.router + self.chosen * self.expert)

    def deals(self, size: int, tensor: int = 1) -> bool:
        """So many may share the heads of attention that tensor parallelism has left to each of ``tensor`` ranks; those
        of keys and values are repeated where there are fewer."""
        heads, kv_heads = self.heads // tensor, self.kv_heads // tensor
        return not heads % size and (not kv_heads % size or not size % kv_heads)

    def cuts(self, tensor: int) -> bool:
        """So many ranks of a learner may share each layer's matrices; experts are dealt out instead."""
        between = (self.beside, self.dense_inner) if self.experts else (self.intermediate,)
        return not any(size % tensor for size in (self.heads, self.kv_heads, *between))

    def adapter(self, rank: int, targets: Sequence[str] = (), exclude: Sequence[str] = ()) -> float:
        """Parameters of a LoRA adapter of the matrices that are called like one of ``targets``; none: of all of a
        layer's, but of a mixture those outside its feed-forward part. Less those that are called like one of
        ``exclude``."""
        found = self.adapted(targets, exclude)
        return self.layers * rank * sum(each.share * (each.inputs + each.outputs) for each in found)

    def adapted(self, targets: Sequence[str] = (), exclude: Sequence[str] = ()) -> list[Matrix]:
        """A layer's matrices that `adapter` adds to, each with its share of the layers."""
        every = self.matrices.items()
        if not targets:
            every = {name: m for name, m in every if not (self.experts and m.within.startswith("mlp"))}.items()
        return [
            replace(each, share=each.share * share)
            for name, each in every
            if (share := self._share(f"{each.within}.{name.rpartition('.')[2]}", targets, exclude))
        ]

    def _share(self, path: str, targets: Sequence[str], exclude: Sequence[str]) -> float:
        """Of the layers, how many have the matrix ``path`` adapted."""
        if not any(is_pattern(each) for each in (*targets, *exclude)):
            return float((not targets or is_called(path, targets)) and not is_called(path, exclude))
        found = 0
        for number in range(self.layers):
            # A model that sees has its decoder one level deeper.
            names = [f"{prefix}.layers.{number}.{path}" for prefix in ("model", "model.language_model")]
            taken = not targets or any(is_called(name, targets) for name in names)
            found += taken and not any(is_called(name, exclude) for name in names)
        return found / self.layers

    @property
    def head(self) -> int:
        """Parameters of the head."""
        return self.vocabulary * self.hidden * self.ends_here

    @property
    def ends(self) -> int:
        """Parameters of embedding and head."""
        alike = self.tied and self.whole
        return self.vocabulary * self.hidden * (self.begins + self.ends_here - alike)

    @property
    def parameters(self) -> int:
        """All, less norms, biases, convolutions, and gates of one number."""
        experts = self.mixtures * (self.router + self.experts * self.expert)
        return round(self.layers * self.shared) + experts + self.ends

    @property
    def frozen_ends(self) -> int:
        """Of embedding and head, those that do not learn."""
        begins, ends = self.still_ends
        return begins * self.begins + ends * self.ends_here * (not (self.tied and self.whole))

    @property
    def frozen(self) -> int:
        """Of all parameters, those that do not learn: they have no gradient, and no optimizer's state."""
        return sum(self.still) + self.frozen_ends

    @property
    def served(self) -> int:
        """Parameters of a version, and of who loads one: all, and the towers'."""
        return self.parameters + self.towers

    @property
    def learned(self) -> int:
        """Parameters that learn, where no adapter does."""
        return self.parameters - self.frozen + self.learned_towers

    @property
    def sight_bytes(self) -> int:
        """Of the copy of the towers that a rank of the trainer sees with; others have the model's own."""
        return self.towers * self.served_bytes * (self.sees and not self.learned_towers)

    @property
    def seen_bytes(self) -> int:
        """Of what is remembered of pictures by whoever reads these."""
        return SEEN_BYTES * (self.sees and not self.learned_towers)

    @property
    def met(self) -> float:
        """Parameters that one token meets."""
        return self.layers * self.active + self.head

    @property
    def served_bytes(self) -> int:
        """Of a parameter in a version, and of a number that engines and references compute with."""
        return DTYPE_BYTES[self.dtype]

    @property
    def learned_bytes(self) -> int:
        """Of a number that a learner computes with."""
        return DTYPE_BYTES[self.dtype]

    @property
    def kv_bytes(self) -> int:
        """KV of one token, over all layers that have it."""
        if self.latent:
            return self.layers * self.latent.kept * self.served_bytes
        return round(2 * self.layers * self.attending) * self.kv_heads * self.head_dim * self.served_bytes

    def kv_ranks(self, tensor: int) -> int:
        """Of an engine's ``tensor`` ranks, over how many the KV of one token is cut."""
        return 1 if self.latent else min(tensor, self.kv_heads)

    @property
    def pair_numbers(self) -> float:
        """Of a query and a key that it sees, numbers that are multiplied and added: of the key and of its value, over
        all heads; of a layer, on average."""
        each = self.latent.key + self.latent.value if self.latent else 2 * self.head_dim
        return self.attending * self.heads * each

    @property
    def state_bytes(self) -> int:
        """What an engine keeps of a sequence however long it is, over all layers."""
        return round(self.layers * (1 - self.attending)) * (self.linear.state_bytes if self.linear else 0)


def described_by(name: str, data: Mapping[str, Any]) -> Shape | None:
    """The sizes in a config.json, of a model that sees those of its decoder; None where they are not known: of other
    layers that keep a state, of other mixtures."""
    whole = data.get("model_type")
    if "hidden_size" not in data and isinstance(text := data.get("text_config"), Mapping):
        data = {**text} | {key: data[key] for key in ("tie_word_embeddings",) if key in data}
    family = data.get("model_type")
    hybrid, mixture = family in LINEAR, any("experts" in key for key in data)
    if family in UNCOUNTED or (keeps_state(data.get("layer_types") or ()) and not hybrid):
        return None
    uneven = data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1
    if mixture and (family not in COUNTED_MIXTURES or uneven):
        return None
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    original = {"original_max_position_embeddings": data.get("original_max_position_embeddings")}  # as Phi-3 has it
    positions = stretched(data.get("max_position_embeddings"), original | rope)
    tied = data.get("tie_word_embeddings", family in TIED)
    try:
        heads, latent = data["num_attention_heads"], _latent(data) if family in LATENT else None
        found = Shape(
            name, data["hidden_size"], 0 if mixture else data["intermediate_size"], data["num_hidden_layers"], heads,
            heads if latent else data.get("num_key_value_heads") or heads,
            latent.key if latent else data.get("head_dim") or data["hidden_size"] // heads,
            data["vocab_size"], bool(tied), positions or 1 << 20,
            packs=whole in PACKED - BOTH_WAYS and not hybrid, shares=whole in PACKED, staged=whole in STAGED,
            tensor=whole in TENSOR, split=whole in TENSOR | TENSOR_WHOLE,
            counted=family in PLAIN and not data.get("use_sliding_window"),
            norms_heads=hybrid or family in NORMS_HEADS, latent=latent,
        )  # fmt: skip
        found = replace(found, **_mixture(data)) if mixture else found
        return replace(found, **_linear(data)) if hybrid else found
    except KeyError:
        return None


def _mixture(data: Mapping[str, Any]) -> dict[str, Any]:
    """Of a `Shape`, what a mixture's config.json says of its experts."""
    inner = data.get("moe_intermediate_size") or data["intermediate_size"]
    counts = (data.get(name) for name in ("num_experts", "num_local_experts", "n_routed_experts"))
    kinds = data.get("mlp_layer_types")
    dense = kinds.count("dense") if kinds else data.get("first_k_dense_replace") or 0
    return {
        "intermediate": inner, "experts": next(filter(None, counts)), "chosen": data["num_experts_per_tok"],
        "beside": data.get("shared_expert_intermediate_size") or inner * (data.get("n_shared_experts") or 0),
        "dense": dense, "dense_inner": data["intermediate_size"] if dense else 0,
    }  # fmt: skip


def _latent(data: Mapping[str, Any]) -> Latent:
    """Of a `Shape`, what keys and values are made of."""
    return Latent(
        data.get("q_lora_rank") or 0, data["kv_lora_rank"], data["qk_rope_head_dim"], data["qk_nope_head_dim"],
        data["v_head_dim"],
    )  # fmt: skip


def _linear(data: Mapping[str, Any]) -> dict[str, Any]:
    """Of a `Shape`, what is said of layers of linear attention beside those that attend."""
    layers, every = data["num_hidden_layers"], data.get("full_attention_interval", 4)
    kinds = data.get("layer_types") or ["linear" if (i + 1) % every else "full_attention" for i in range(layers)]
    linear = Linear(
        data["linear_num_value_heads"], data["linear_num_key_heads"], data["linear_value_head_dim"],
        data["linear_key_head_dim"], data["linear_conv_kernel_dim"],
    )  # fmt: skip
    return {"linear": linear, "attending": kinds.count("full_attention") / len(kinds), "gated": True}
