"""A tiny character-level model, warm-started on the run's own prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from penstock.pipeline.config import TinyModel
from penstock.pipeline.models.characters import UNKNOWN, characters_of, usable
from penstock.protocols.experience import Prompt
from penstock.services.data.answers import answer_of
from penstock.services.runtime.files import let_read

PAD, EOS = "<pad>", "<eos>"


def make_tokenizer(characters: set[str]) -> Any:
    """One token a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate([PAD, EOS, UNKNOWN, *sorted(characters)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token=UNKNOWN, padding_side="left"
    )


def build(
    config: TinyModel,
    source: Sequence[Prompt],
    folder: Path,
    seed: int,
    progress: Callable[[int, int, float], None] = lambda step, steps, loss: None,
    given: bool = False,
) -> None:
    """Makes tokenizer and model, warm-starts it on ``source`` and saves both in ``folder``. ``progress`` is told step,
    steps and loss. ``given``: the run learns from the rows' own answers."""
    from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    random = np.random.default_rng([seed, 1])
    tokenizer = make_tokenizer(characters_of(source, config.warm_start.steps > 0, given))
    mixture = {
        "num_experts": config.experts,
        "num_experts_per_tok": config.experts_per_token,
        "moe_intermediate_size": config.intermediate_size,
        "norm_topk_prob": True,
    }
    kind, made, more = (
        (Qwen3MoeForCausalLM, Qwen3MoeConfig, mixture) if config.experts else (Qwen3ForCausalLM, Qwen3Config, {})
    )
    model = kind(
        made(
            vocab_size=len(tokenizer),
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_length,
            initializer_range=0.05,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
            **more,
        )
    )
    warm = config.warm_start
    optimizer = torch.optim.AdamW(model.parameters(), lr=warm.lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.1 + 0.45 * (1 + np.cos(np.pi * step / max(1, warm.steps)))
    )
    for step in range(warm.steps):
        chosen = usable(source, random.integers(len(source), size=warm.batch))
        tokens, wanted = _examples(tokenizer, chosen, warm.corrupted, random)
        hidden = model(input_ids=tokens, attention_mask=(tokens != tokenizer.pad_token_id).long()).logits
        loss = F.cross_entropy(hidden[:, :-1].flatten(0, 1), wanted[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        progress(step + 1, warm.steps, float(loss.detach()))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(folder)
    model.save_pretrained(folder)
    let_read(folder)


def _examples(
    tokenizer: Any, prompts: Sequence[Prompt], corrupted: float, random: np.random.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded tokens and targets (-100 where nothing is taught), int64 ``[batch, length]``."""
    rows = []
    for prompt in prompts:
        answer = answer_of(prompt)
        if random.random() < corrupted:
            answer = "".join(random.permutation(list(answer)))
        question = tokenizer(prompt.as_text())["input_ids"]
        rows.append((question, [*tokenizer(answer)["input_ids"], tokenizer.eos_token_id]))
    length = max(len(before) + len(taught) for before, taught in rows)
    tokens = torch.full((len(rows), length), tokenizer.pad_token_id)
    wanted = torch.full((len(rows), length), -100)
    for row, (before, taught) in enumerate(rows):
        end = len(before) + len(taught)
        tokens[row, :end] = torch.tensor(before + taught)
        wanted[row, len(before) : end] = torch.tensor(taught)
    return tokens, wanted
