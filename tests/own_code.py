"""A tiny model with code of its own, in a folder as its author would have written it."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

CONFIGURATION = """
from transformers import PretrainedConfig


class OwnConfig(PretrainedConfig):
    model_type = "{kind}"

    def __init__(self, vocab_size=51, hidden_size=16, num_hidden_layers=2, **more):
        self.vocab_size, self.hidden_size, self.num_hidden_layers = vocab_size, hidden_size, num_hidden_layers
        super().__init__(**more)
"""
MODELING = '''
import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from .configuration_own import OwnConfig


class Layer(nn.Module):
    """Each token sees the mean of those before it, faded by a table that the code computes."""

    def __init__(self, config):
        super().__init__()
        self.mix = nn.Linear(config.hidden_size, config.hidden_size)
        self.register_buffer("fade", 1 / (1 + torch.arange(config.hidden_size).float()), persistent=False)

    def forward(self, hidden, mask):
        seen = (hidden * mask[..., None]).cumsum(1) / mask.cumsum(1).clamp(min=1)[..., None]
        return hidden + torch.tanh(self.mix((seen * self.fade).to(hidden.dtype)))


class OwnForCausalLM(PreTrainedModel):
    config_class = OwnConfig
    base_model_prefix = "transformer"

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self):
        return self.embed

    def get_output_embeddings(self):
        return self.head

    def forward(self, input_ids=None, attention_mask=None, {takes}):
        hidden = self.embed(input_ids)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        for layer in self.layers:
            hidden = layer(hidden, mask.to(hidden.dtype))
        return CausalLMOutput(logits=self.head(hidden))
'''


def write(folder: Path, takes: str = "position_ids=None, use_cache=False", kind: str = "of_its_own") -> Path:
    """The model, in ``folder``; its forward ``takes`` these beside ids and mask."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    shapes = {"embed.weight": (51, 16), "head.weight": (51, 16)}
    shapes |= {f"layers.{n}.mix.weight": (16, 16) for n in range(2)} | {f"layers.{n}.mix.bias": (16,) for n in range(2)}
    weights = {name: torch.randn(shape) / 4 for name, shape in shapes.items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    named = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    about = {"model_type": kind, "auto_map": named, "architectures": ["OwnForCausalLM"], "eos_token_id": 1}
    (folder / "config.json").write_text(json.dumps(about | {"max_position_embeddings": 64}))
    (folder / "configuration_own.py").write_text(CONFIGURATION.replace("{kind}", kind))
    (folder / "modeling_own.py").write_text(MODELING.replace("{takes}", takes))
    return folder
