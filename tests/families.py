"""Tiny models of the families that users bring, each as small as its config takes, with random weights."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from penstock.services.modeling.families import TURNED

BASE = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": None,
    "eos_token_id": 1, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "n_group": 2, "topk_group": 1,
    "first_k_dense_replace": 1, "use_qk_norm": True,
}  # fmt: skip
SLIDING = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}
LINEAR = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4, "layer_types": ["linear_attention", "full_attention"] * 2,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
TEXT: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen2": {}, "qwen3": {}, "qwen3_moe": MIXTURE, "mistral": {}, "ministral3": {},
    "gemma2": {"sliding_window": 8}, "gemma3_text": SLIDING, "gpt_oss": MIXTURE | SLIDING,
    "gemma4_text": SLIDING | {
        "global_head_dim": 32, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 64,
        "num_kv_shared_layers": 0,
    },
    "qwen3_next": LINEAR | MIXTURE, "qwen3_5_text": LINEAR, "qwen3_5_moe_text": LINEAR | MIXTURE,
    "glm4": {}, "glm4_moe": MIXTURE, "deepseek_v3": MIXTURE | LATENT,
    "glm4_moe_lite": MIXTURE | LATENT, "minimax_m2": MIXTURE,
    "olmoe": MIXTURE | {"head_dim": 8},
    "phi3": {"sliding_window": None}, "smollm3": {}, "granite": {
        "embedding_multiplier": 3.0, "residual_multiplier": 0.5, "attention_multiplier": 0.2, "logits_scaling": 2.0,
    }, "olmo2": {}, "olmo3": SLIDING, "seed_oss": {},
    "exaone4": SLIDING, "cohere2": SLIDING, "ernie4_5": {}, "hunyuan_v1_dense": {}, "starcoder2": {},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_ff_dim": 48, "block_auto_adjust_ff_dim": False},
    "granitemoehybrid": MIXTURE | {
        "layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1,
        "mamba_d_state": 8, "shared_intermediate_size": 16,
    },
    "falcon_h1": {
        "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
        "lm_head_multiplier": 0.5,
    },
    "nemotron_h": {
        "hybrid_override_pattern": "M*M-", "mamba_num_heads": 4, "mamba_head_dim": 8, "n_groups": 1,
        "ssm_state_size": 8,
    },
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 32}, "gpt_neox": {},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
}  # fmt: skip
PARTLY = {
    "Moonlight": ("deepseek_v3", TEXT["deepseek_v3"] | {"q_lora_rank": None}),
    "Gemma 4 E2B": ("gemma4_text", TEXT["gemma4_text"] | {"num_kv_shared_layers": 2}),
    "Gemma 4 31B": ("gemma4_text", TEXT["gemma4_text"] | {"attention_k_eq_v": True}),
}
"""Models some of whose layers lack a projection that others of their family have."""
_TURNS: dict[str, Any] = {"rope_parameters": {"rope_type": "default", "mrope_section": [4, 2, 2], "rope_theta": 1e4}}
_NARROW = {"head_dim": 8, "rope_parameters": {**_TURNS["rope_parameters"], "mrope_section": [2, 1, 1]}}
SEEING = {
    "qwen2_5_vl": ("qwen2_5_vl_text", _NARROW),
    "qwen2_vl": ("qwen2_vl_text", _NARROW), "glm4v": ("glm4v_text", _NARROW), "glm46v": ("glm4v_text", _NARROW),
    "internvl": ("qwen3", {}),
    "qwen3_5": ("qwen3_5_text", LINEAR), "qwen3_5_moe": ("qwen3_5_moe_text", LINEAR | MIXTURE),
    "qwen3_vl": ("qwen3_vl_text", _TURNS),
    "qwen3_vl_moe": (
        "qwen3_vl_moe_text", _TURNS | MIXTURE | {"moe_intermediate_size": 24, "norm_topk_prob": True},
    ),
    "gemma3": ("gemma3_text", SLIDING), "gemma4": ("gemma4_text", TEXT["gemma4_text"]), "mistral3": ("ministral3", {}),
}  # fmt: skip
"""Of words and pictures, each with its decoder."""
PATCH = 8
"""Pixels at each side of what towers begin with."""
_EYES = {
    "depth": 1, "num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 32,
    "num_position_embeddings": 16, "image_size": 32, "patch_size": PATCH,
    "fullatt_block_indexes": [0], "embed_dim": 32, "mlp_ratio": 2,
}  # fmt: skip
_SEES_BY = {"gemma4": "gemma4_vision"}
"""Whose config has no tower unless it is given one."""


_ROW = re.compile(r"^\| `(\w+)` \|[^|]*\| (\w+) \| ([TSPE ]*) \| (\w+) \| (\w+) \|$", re.M)
SAID = {row[1]: row.groups()[1:] for row in _ROW.finditer((Path(__file__).parents[1] / "docs/models.md").read_text())}
"""What docs/models.md says of each family: whether it takes ranks and 16 bits, how else ranks may share it, whether it
takes an adapter, and how the torch engine runs it."""


def config_of(family: str, vocab_size: int = 64, **more: Any) -> Any:
    """transformers' config of a tiny model; ``more``: what else that of one that sees is told."""
    from transformers import AutoConfig

    if family in PARTLY:
        return _text(*PARTLY[family])
    if family not in SEEING:
        return _text(family, TEXT[family])
    kind, own = SEEING[family]
    eyes = AutoConfig.for_model(_SEES_BY[family]) if family in _SEES_BY else AutoConfig.for_model(family).vision_config
    return AutoConfig.for_model(
        family, text_config=_text(kind, own | {"vocab_size": vocab_size}).to_dict(),
        vision_config=eyes.to_dict() | _EYES | _deep(family), pad_token_id=0, eos_token_id=1,
        tie_word_embeddings=False, **more,
    )  # fmt: skip


def _deep(family: str) -> dict[str, Any]:
    """Layers of the towers that the decoder is shown too."""
    return {"deepstack_visual_indexes": [0] if family.startswith("qwen3_vl") else []}


def write(family: str, folder: Path, **told: Any) -> Any:
    """Makes the model, and writes it as transformers does; its config is ``told`` more."""
    from penstock.services.modeling.buffers import persistent_buffers
    from penstock.services.modeling.load import with_head

    torch.manual_seed(0)
    config = config_of(family, **told)
    model = with_head(config, "language").from_config(config, dtype=torch.float32)
    for buffer in persistent_buffers(model).values():  # as trained ones have it: who forgets them computes otherwise
        buffer.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    if family in TURNED:  # as those on the hub are; transformers reads both
        saved = {name: part.mT.contiguous() if part.ndim == 3 else part for name, part in model.state_dict().items()}
        save_file(saved, folder / "model.safetensors", {"format": "pt"})
    return model


def _text(family: str, more: dict[str, Any]) -> Any:
    from transformers import AutoConfig

    known = AutoConfig.for_model(family)
    fields = known.to_dict() | known.attribute_map
    mine = {name: value for name, value in BASE.items() if name in fields or name == "head_dim"}
    return AutoConfig.for_model(family, **mine | {n: v for n, v in more.items() if n not in MIXTURE or n in fields})
