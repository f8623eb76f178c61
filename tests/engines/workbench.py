"""Two models of the same shape, an engine that serves them, and what transformers says of its tokens."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import TypeAdapter
from transformers import AutoModelForCausalLM, Qwen3Config

from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.experience import Sampling
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import EngineConfig, RolloutConfig, SamplingConfig
from penstock.services.rollout.engines.base import Completion, Engine, Request
from penstock.services.rollout.service import make_engine
from penstock.services.turns.tokenizer import Tokenizer

LETTERS = [chr(0x4E00 + i) for i in range(297)]
CLOSE = 2e-4
"""Largest difference of a float32 log-probability from transformers'."""


def make_models(folder: Path, config: type[Qwen3Config] = Qwen3Config, **more: Any) -> list[Any]:
    """Two models of the same shape; the first lies in ``folder``, with a tokenizer. ``more``: of their config."""
    tokenizer = make_tokenizer(set(LETTERS))
    tokenizer.save_pretrained(folder)
    models = [_model(config, {"vocab_size": len(tokenizer), **more}, seed) for seed in (0, 1)]
    models[0].save_pretrained(folder)
    return models


class Workbench:
    """``engine`` and the two ``models`` whose weights it can serve; ``publish`` swaps one of them in."""

    def __init__(
        self, folder: Path, models: list[Any], options: Mapping[str, Any], sampling: SamplingConfig,
        adapter_rank: int = 0, dtype: str = "float32", head_dtype: str | None = None,
    ) -> None:  # fmt: skip
        self.models = models
        config: Any = TypeAdapter(EngineConfig).validate_python(options)
        self.text = Tokenizer(str(folder))
        rollout = RolloutConfig(engine=config, sampling=sampling)
        self.engine: Engine = make_engine(
            rollout, str(folder), dtype, self.text, adapter_rank=adapter_rank, head_dtype=head_dtype
        )
        self.stop_ids = {1, *sampling.stop_token_ids}
        self.vocabulary = models[0].config.vocab_size
        self.version = -1
        self._served: dict[int, Any] = {}
        self._numbers = 0

    def publish(self, which: int) -> int:
        """Serves model ``which`` from now on; returns the version."""
        model = self.models[which]
        return self.serve(version_of(model), model)

    def serve(self, weights: Mapping[str, torch.Tensor], model: Any) -> int:
        """The same of ``weights`` that make ``model``."""
        self.version += 1
        self._served[self.version] = model
        self.engine.swap(self.engine.prepare(weights), self.version)
        assert self.engine.version == self.version
        return self.version

    def request(self, random: np.random.Generator, tokens: np.ndarray | None = None, seed: int = 7, **sampling: Any):
        """A request with a number of its own; random prompt, unless ``tokens`` are given."""
        self._numbers += 1
        if tokens is None:
            tokens = random.integers(2, self.vocabulary, random.integers(1, 40)).astype(np.int32)
        return Request(self._numbers, seed, tokens, Sampling(**{"n": 2, "max_new_tokens": 20, **sampling}))

    def drain(self, seconds: float = 120) -> list[Completion]:
        """Everything that is pending, finished."""
        done, deadline = [], time.monotonic() + seconds
        while self.engine.pending():
            assert time.monotonic() < deadline, f"{self.engine.pending()} continuations are still pending"
            done += self.engine.step()
        return sorted(done, key=lambda c: (c.number, c.sample))

    def run(self, *requests: Request) -> list[Completion]:
        """Submits and drains."""
        for request in requests:
            self.engine.submit(request)
        return self.drain()

    def step_until(self, condition: Any, seconds: float = 60) -> list[Completion]:
        """Steps until ``condition()``."""
        done, deadline = [], time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, "the engine does not get there"
            done += self.engine.step()
        return done

    def expected(
        self, prompt: np.ndarray, completion: Completion, version: int, temperature: float = 1.0
    ) -> np.ndarray:
        """transformers' log-probabilities of a completion's tokens under ``version``."""
        ids = torch.from_numpy(np.concatenate([prompt, completion.tokens]).astype(np.int64))[None]
        with torch.no_grad():
            logs = (self._served[version](ids).logits[0].float() / temperature).log_softmax(-1)
        return logs[len(prompt) - 1 : -1].gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).numpy()

    def generated(self) -> float:
        """Tokens sampled so far, as the engine counts them."""
        return self.engine.gauges()["generated_tokens"]


SHAPE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 128, "tie_word_embeddings": True,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": None,
}  # fmt: skip


def _model(config: type[Qwen3Config], more: dict[str, Any], seed: int) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(**SHAPE, **more), dtype=torch.float32).eval()
    for parameter in model.parameters():  # norms away from 1, and logits far from uniform: a wrong weight shows
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return model
