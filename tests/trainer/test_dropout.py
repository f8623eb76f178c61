"""By whatever name a family has its dropout: none is trained with, and a checkpoint has what the model said of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.load import attention_of
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY
from tests.trainer.steps import Tokenizer, a_step

FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {"embd_pdrop": 0.3, "resid_pdrop": 0.3},
    "starcoder2": {"residual_dropout": 0.3, "embedding_dropout": 0.3},
    "opt": {"dropout": 0.3, "layerdrop": 0.5, "ffn_dim": 64, "word_embed_proj_dim": 64},
    "phimoe": {"router_jitter_noise": 0.3, "num_local_experts": 4},
    "persimmon": {"hidden_dropout": 0.3, "attention_dropout": 0.3},
}
"""With modules of torch's, numbers of its own modules, layers that are left out, and what is read of the config."""


@pytest.mark.parametrize("family", FAMILIES)
def test_no_family_trains_with_dropout(family: str, tmp_path: Path) -> None:
    config = AutoConfig.for_model(family, **(TINY | FAMILIES[family]))
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention_of(config))
    learner, step = Learner(model, TrainerConfig(), 1.0), a_step(0)

    def logprobs() -> np.ndarray:
        return np.concatenate(learner.evaluate(step, lambda rows: forward(model, rows, 1.0)))

    trained = logprobs()
    model.eval()
    np.testing.assert_allclose(trained, logprobs(), atol=1e-6)
    path = checkpoint.Saver(learner, Tokenizer(), tmp_path, CheckpointConfig(keep=1)).begin().result()
    saved = AutoConfig.from_pretrained(path)
    assert {name: getattr(saved, name) for name in FAMILIES[family]} == FAMILIES[family]
