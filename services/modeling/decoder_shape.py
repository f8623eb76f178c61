"""A decoder's sizes, from what its config.json says. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.protocols.versions import DTYPE_BYTES, Dtype
from penstock.services.modeling.families import COUNTED_MIXTURES, PACKED, PLAIN, STAGED, TIED, keeps_state
from penstock.services.modeling.lengths import stretched
from penstock.services.modeling.parallel.stage_layers import stage_layers

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


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
    packs: bool = True
    """Ranks may share its rows, between tokens."""
    staged: bool = True
    """Ranks may share its layers (`families.STAGED`)."""
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
    """Parameters beside the decoder, which stand still: of what sees or hears."""
    sees: bool = False
    """Prompts show pictures: whoever computes has the towers once more."""

    def stage(self, number: int, count: int) -> Shape:
        """What a pipeline's stage ``number`` of ``count`` has."""
        first, end = stage_layers(self.layers, count)[number]
        return replace(self, layers=end - first, begins=number == 0, ends_here=number == count - 1)

    @property
    def whole(self) -> bool:
        """It is no stage of a pipeline."""
        return self.begins and self.ends_here

    @property
    def matrices(self) -> dict[str, tuple[int, int]]:
        """Inputs and outputs of each of a layer's, by the name of its module; of a mixture, those that are no
        expert's."""
        hidden, inner = self.hidden, self.intermediate
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention = {"q_proj": (hidden, q), "k_proj": (hidden, kv), "v_proj": (hidden, kv), "o_proj": (q, hidden)}
        if self.experts:
            return attention
        return attention | {"gate_proj": (hidden, inner), "up_proj": (hidden, inner), "down_proj": (inner, hidden)}

    @property
    def shared(self) -> int:
        """Parameters of a layer that every token meets, less the router's."""
        return sum(inputs * outputs for inputs, outputs in self.matrices.values())

    @property
    def router(self) -> int:
        """Parameters of what chooses a token's experts."""
        return self.experts * self.hidden

    @property
    def expert(self) -> int:
        """Parameters of one of a mixture's experts."""
        return 3 * self.hidden * self.intermediate if self.experts else 0

    @property
    def layer(self) -> int:
        """Parameters of one layer's matrices."""
        return self.shared + self.router + self.experts * self.expert

    @property
    def active(self) -> int:
        """Parameters of a layer that one token meets."""
        return self.shared + self.router + self.chosen * self.expert

    def deals(self, size: int, tensor: int = 1) -> bool:
        """So many may share the heads of attention that tensor parallelism has left to each of ``tensor`` ranks; those
        of keys and values are repeated where there are fewer."""
        heads, kv_heads = self.heads // tensor, self.kv_heads // tensor
        return not heads % size and (not kv_heads % size or not size % kv_heads)

    def cuts(self, tensor: int) -> bool:
        """So many ranks of a learner may share each layer's matrices; experts are dealt out instead."""
        between = 0 if self.experts else self.intermediate
        return not (self.heads % tensor or self.kv_heads % tensor or between % tensor)

    def adapter(self, rank: int, targets: Sequence[str] = ()) -> int:
        """Parameters of a LoRA adapter of the matrices whose full names end in one of ``targets``; none: of all of a
        layer's."""
        return self.layers * rank * sum(inputs + outputs for inputs, outputs in self.adapted(targets))

    def adapted(self, targets: Sequence[str] = ()) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's matrices that `adapter` adds to."""
        paths = {f".{'self_attn' if name in ATTENTION else 'mlp'}.{name}": name for name in self.matrices}
        return [self.matrices[name] for path, name in paths.items() if not targets or _ends(path, targets)]

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
        """All, less norms and biases."""
        return self.layers * self.layer + self.ends

    @property
    def served(self) -> int:
        """Parameters of a version, and of who loads one: all, and the towers'."""
        return self.parameters + self.towers

    @property
    def sight_bytes(self) -> int:
        """Of the towers that a process of ours has to see with; vLLM has its version's."""
        return self.towers * self.served_bytes * self.sees

    @property
    def met(self) -> int:
        """Parameters that one token meets."""
        return self.layers * self.active + self.head

    @property
    def served_bytes(self) -> int:
        """Of a parameter in a version, and of a number that engines and references compute with."""
        return DTYPE_BYTES[self.dtype]

    @property
    def learned_bytes(self) -> int:
        """Of a number that a learner computes with: bf16 is all that FSDP casts to."""
        return 2 if self.dtype == "bfloat16" else 4

    @property
    def kv_bytes(self) -> int:
        """KV of one token, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.served_bytes


def _ends(path: str, targets: Sequence[str]) -> bool:
    return any(path.endswith(f".{target}") for target in targets)


def described_by(name: str, data: Mapping[str, Any]) -> Shape | None:
    """The sizes in a config.json, of a model that sees those of its decoder; None where it describes no plain decoder:
    layers that keep a state, a mixture that is not counted."""
    alone = "hidden_size" in data
    if not alone and isinstance(text := data.get("text_config"), Mapping):
        data = {**text} | {key: data[key] for key in ("tie_word_embeddings",) if key in data}
    if keeps_state(data.get("layer_types") or ()):
        return None
    family = data.get("model_type")
    experts = any("experts" in key for key in data)
    plain = data.get("mlp_only_layers") or data.get("decoder_sparse_step", 1) != 1
    if experts and (family not in COUNTED_MIXTURES or plain):
        return None
    rope = data.get("rope_scaling") or data.get("rope_parameters") or {}
    original = {"original_max_position_embeddings": data.get("original_max_position_embeddings")}  # as Phi-3 has it
    positions = stretched(data.get("max_position_embeddings"), original | rope)
    tied = data.get("tie_word_embeddings", family in TIED)
    try:
        heads = data["num_attention_heads"]
        inner = data["moe_intermediate_size" if experts else "intermediate_size"]
        return Shape(
            name, data["hidden_size"], inner, data["num_hidden_layers"], heads,
            data.get("num_key_value_heads") or heads, data.get("head_dim") or data["hidden_size"] // heads,
            data["vocab_size"], bool(tied), positions or 1 << 20,
            data.get("num_experts") or data.get("num_local_experts") or 0, data.get("num_experts_per_tok") or 0,
            alone and family in PACKED, alone and family in STAGED,
            family in PLAIN and not data.get("use_sliding_window"), family in ("qwen3", "qwen3_moe"),
        )  # fmt: skip
    except KeyError:
        return None
