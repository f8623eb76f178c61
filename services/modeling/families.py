"""What families of models are known for."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

PLAIN = {"llama", "qwen2", "qwen3", "qwen3_moe"}
"""Families whose FLOPs are counted, and whose logits are the output embedding of the hidden state, nothing more."""
PACKED = PLAIN | {
    "mistral", "ministral3", "gemma2", "gemma3_text", "gpt_oss", "gemma4_text", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2", "olmoe", "phi3", "smollm3",
    "granite", "olmo2", "olmo3", "seed_oss", "exaone4", "cohere2", "ernie4_5", "hunyuan_v1_dense", "starcoder2", "lfm2",
    "granitemoehybrid", "falcon_h1", "nemotron_h", "opt", "gpt_neox", "gpt2", "qwen3_5", "qwen3_5_moe", "qwen2_vl",
    "qwen2_5_vl", "glm4v", "glm46v", "internvl", "qwen3_vl", "qwen3_vl_moe", "gemma3", "gemma4", "mistral3",
}  # fmt: skip
"""Families that take positions and `attention.Segments` of ours."""
BOTH_WAYS = {"gemma3", "gemma4"}
"""Of these, those in which the parts of a picture attend to each other both ways, which segments cannot say."""
STAGED = PLAIN | {
    "mistral", "ministral3", "gemma", "gemma2", "gemma3_text", "gpt_oss", "qwen3_next", "qwen3_5_text",
    "qwen3_5_moe_text", "glm4", "glm4_moe", "glm4_moe_lite", "deepseek_v3", "minimax_m2", "olmoe", "phi3", "smollm3",
    "olmo2", "olmo3", "seed_oss", "exaone4", "cohere2", "ernie4_5", "hunyuan_v1_dense", "starcoder2",
}  # fmt: skip
"""Families whose layers are all there is between the embedding and the last norm: they can be cut into stages. Not so
Granite, which scales what is embedded, and Gemma 4, some of whose layers read ids too."""
TENSOR = PLAIN | {
    "mistral", "ministral3", "gemma2", "gemma3_text", "gemma4_text", "glm4_moe", "smollm3", "granite",
    "seed_oss", "exaone4", "cohere2", "ernie4_5", "starcoder2", "qwen2_vl", "qwen2_5_vl", "internvl", "qwen3_vl",
    "qwen3_vl_moe", "gemma3", "gemma4", "mistral3",
}  # fmt: skip
"""Families whose matrices tensor parallelism cuts, and with them what is kept of each token."""
TENSOR_WHOLE = {
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "glm4", "olmo2", "olmo3", "phi3", "olmoe", "minimax_m2",
    "qwen3_5", "qwen3_5_moe", "deepseek_v3", "glm4_moe_lite", "glm4v", "glm46v",
}  # fmt: skip
"""Families of which it cuts matrices, and each rank keeps all that some of them give."""
TIED = {"cohere", "cohere2", "ernie4_5", "gemma", "gemma2", "gemma3_text", "smollm3", "vaultgemma"}
"""Families of which a head is the embedding where a config.json does not say ``tie_word_embeddings``."""
OUR_ATTENTION = "penstock"
"""By which transformers' models are told to use `attention.attend` (``attn_implementation``)."""
IN_MATRICES = {
    "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "olmoe", "glm4_moe", "deepseek_v3",
    "glm4_moe_lite",
}  # fmt: skip
"""Families whose files have a matrix for each expert, by the names of `experts`."""
TURNED = {"qwen3_vl_moe"}
"""Families whose files have one tensor of all experts, as memory does, but turned: ``[experts, inputs, outputs]``."""
MIXTURES = IN_MATRICES - {"qwen2_moe"} | TURNED | {"gpt_oss", "minimax_m2", "granitemoehybrid"}
"""Mixtures whose experts may be dealt out over ranks, and whose routing is noted and replayed."""
UNFILLED = {"gpt_oss", "minimax_m2", "granitemoehybrid"}
"""Mixtures whose whole versions vLLM 0.32 cannot be filled with: gpt-oss' experts are copied past what catches them as
they come, the others' files have them by other names than transformers'."""
BALANCED = {
    "qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_vl_moe", "olmoe", "gpt_oss",
}  # fmt: skip
"""Mixtures of which transformers has a loss that balances what their routers choose by; MiniMax-M2's choose by
something else than that loss reads."""
LINEAR = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}
"""Families some of whose layers have linear attention (Gated DeltaNet), and others a gate behind theirs."""
LATENT = {"deepseek_v3", "glm4_moe_lite"}
"""Families whose keys and values are made of fewer numbers, which alone are kept (MLA)."""
NORMS_HEADS = {"qwen3", "qwen3_moe", "qwen3_vl_text", "qwen3_vl_moe_text"}
"""Families that normalise queries and keys, head by head."""
UNCOUNTED = {"falcon_h1", "nemotron_h", "lfm2", "granitemoehybrid", "gemma4_text", "gpt_neox", "starcoder2"}
"""Families whose config.json reads like that of a plain decoder, which they are not."""
COUNTED_MIXTURES = MIXTURES - {"granitemoehybrid", "qwen3_5_moe", "qwen3_vl_moe"} | {"qwen3_vl_moe_text"}
"""Mixtures whose sizes are counted; of one that sees its decoder's."""


def keeps_state(kinds: Iterable[str]) -> bool:
    """Some of a model's layers, by their ``kinds`` in transformers' config, keep a state instead of keys and values:
    linear attention, Mamba, short convolutions."""
    return any(kind.startswith(("linear", "mamba", "conv", "recurrent", "hybrid")) for kind in kinds)


def window_of(text_config: Any) -> int | None:
    """Tokens that sliding layers look back on, in a model with transformers' config; None: none slides."""
    used = getattr(text_config, "use_sliding_window", True)
    found: int | None = getattr(text_config, "sliding_window", None) if used else None
    return found


def soft_cap(text_config: Any) -> float | None:
    """Below which the scores of attention are drawn, in a model with transformers' config (Gemma 2)."""
    found: float | None = getattr(text_config, "attn_logit_softcapping", None)
    return found


def is_recurrent(text_config: Any) -> bool:
    """`keeps_state`, of the layers of a model with transformers' config."""
    kinds = [kind for name in ("layer_types", "layers_block_type") for kind in getattr(text_config, name, None) or ()]
    return keeps_state(kinds)
