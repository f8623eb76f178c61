"""Beside TRL's own loss, from PyPI, on a tiny model and random answers: `make test-peers`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.services.learning.kl_penalty import kl_penalty
from penstock.services.modeling.taught import Taught, Top
from penstock.services.trainer.algorithms.agg_loss import agg_loss
from penstock.services.trainer.algorithms.divergence import divergence
from penstock.services.trainer.algorithms.losses.cispo import cispo
from penstock.services.trainer.algorithms.losses.gspo import gspo
from penstock.services.trainer.algorithms.losses.ppo_clip import ppo_clip
from penstock.services.trainer.algorithms.losses.sapo import sapo
from penstock.services.trainer.algorithms.losses.vespo import vespo
from penstock.services.trainer.undecided import most_undecided
from tests.trainer.rank_program import a_model

pytestmark = pytest.mark.peers
trl = pytest.importorskip("trl", reason="TRL is not installed: make test-peers")

ROWS, PROMPT, LENGTH = 6, 3, 8
CLIP = {"clip_low": 0.2, "clip_high": 0.28}
UNBOUNDED = 1e9
"""TRL has no dual clip unless it is asked for."""
LOSSES: dict[str, tuple[dict[str, Any], Any, dict[str, Any], str]] = {
    "grpo": ({}, ppo_clip, {**CLIP, "dual_clip": UNBOUNDED}, "seq-mean-token-mean"),
    "bnpo": ({}, ppo_clip, {**CLIP, "dual_clip": UNBOUNDED}, "token-mean"),
    "dapo": ({}, ppo_clip, {**CLIP, "dual_clip": UNBOUNDED}, "token-mean"),
    "dr_grpo": ({}, ppo_clip, {**CLIP, "dual_clip": UNBOUNDED}, "seq-mean-token-sum-norm"),
    "grpo by sequence": ({"importance_sampling_level": "sequence"}, gspo, CLIP, "seq-mean-token-mean"),
    "dapo by sequence": ({"importance_sampling_level": "sequence"}, gspo, CLIP, "token-mean"),
    "cispo": ({"epsilon_high": 2.0}, cispo, {"clip_low": 1.0, "clip_high": 1.0}, "token-mean"),
    "sapo": (
        {"sapo_temperature_pos": 1.2, "sapo_temperature_neg": 1.4},
        sapo,
        {"tau_pos": 1.2, "tau_neg": 1.4},
        "seq-mean-token-mean",
    ),
    "luspo": ({"importance_sampling_level": "sequence"}, gspo, CLIP, "seq-mean-token-sum"),
    "vespo": ({}, vespo, {}, "token-mean"),
    "dapo of some": ({"top_entropy_quantile": 0.3}, ppo_clip, {**CLIP, "dual_clip": UNBOUNDED}, "token-mean"),
}


def their_trainer(folder: Path, name: str, given: dict[str, Any], unbiased: bool) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    from penstock.pipeline.models.tiny import make_tokenizer

    chosen = {"epsilon": 0.2, "epsilon_high": 0.28, "beta": 0.1, **given}
    config = GRPOConfig(
        output_dir=str(folder), loss_type=name.split()[0], max_completion_length=LENGTH, num_generations=ROWS,
        per_device_train_batch_size=ROWS, gradient_accumulation_steps=1, use_cpu=True, bf16=False, report_to=[],
        temperature=1.0, use_bias_correction_kl=unbiased, model_init_kwargs={"dtype": "float32"}, **chosen,
    )  # fmt: skip
    model = folder / "model"  # by its path: TRL loads the reference from there
    a_model().save_pretrained(model)
    rows = Dataset.from_list([{"prompt": "a"}] * ROWS)
    return GRPOTrainer(
        model=str(model), args=config, reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        train_dataset=rows, processing_class=make_tokenizer(set("abc")),
    )  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("seed", range(3))
def test_a_loss_and_the_models_gradient_are_trls(name: str, seed: int, tmp_path: Path) -> None:
    given, function, options, aggregation = LOSSES[name]
    by_token = given.get("importance_sampling_level") != "sequence"
    unbiased = seed == 0 and by_token  # TRL's of a sequence is another one
    trainer = their_trainer(tmp_path, name, given, unbiased)
    model = trainer.model
    torch.manual_seed(seed)
    size = model.config.vocab_size
    ids, answers = (torch.randint(3, size, (ROWS, length)) for length in (PROMPT, LENGTH))
    mask = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (ROWS,))[:, None]).long()
    whole, there = torch.cat([ids, answers], 1), torch.cat([torch.ones_like(ids), mask], 1)

    logits = model(input_ids=whole, attention_mask=there).logits[:, PROMPT - 1 : -1].float()
    logs = logits.log_softmax(-1)
    now = logs.gather(-1, answers[..., None])[..., 0]
    old = (now.detach() + 0.4 * torch.randn_like(now)).clamp(max=-1e-3)
    reference, advantages = old - 0.3 * torch.rand_like(old), torch.randn(ROWS)
    inputs = {
        "prompt_ids": ids, "prompt_mask": torch.ones_like(ids), "completion_ids": answers, "completion_mask": mask,
        "advantages": advantages, "old_per_token_logps": old, "ref_per_token_logps": reference,
        "num_items_in_batch": mask.sum(),
    }  # fmt: skip
    trainer.current_gradient_accumulation_steps = 1
    wanted = trainer._compute_loss(model, inputs)
    gradient = torch.autograd.grad(wanted, list(model.parameters()))

    losses, _ = function(old, now, advantages[:, None].expand_as(now), mask, None, **options)
    if share := given.get("top_entropy_quantile"):
        entropies = -(logs.exp() * logs).sum(-1).detach().numpy()
        losses = losses * torch.from_numpy(np.stack(most_undecided([*entropies], [*mask.numpy()], share)))
    kl = kl_penalty(now, reference, "k3", "unbiased" if unbiased else "own", old)
    found = agg_loss(losses + 0.1 * kl, mask, aggregation, LENGTH if aggregation.endswith("norm") else None)
    if name == "dapo by sequence":  # which the preset's aggregation is not
        assert abs(agg_loss(losses + 0.1 * kl, mask, "seq-mean-token-mean") - wanted) > 1e-3
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(torch.autograd.grad(found, list(model.parameters())), gradient, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "beta", "theirs"), [("forward_kl", 0.5, 0), ("reverse_kl", 0.5, 1), ("jsd", 0.3, 0.3)]
)
def test_a_divergence_from_a_teacher_and_its_gradient_are_trls(kind: str, beta: float, theirs: float) -> None:
    gkd = pytest.importorskip("trl.experimental.gkd", reason="this TRL has no GKDTrainer")
    torch.manual_seed(0)
    logits, scores = torch.randn(ROWS, LENGTH, 51, requires_grad=True), 2 * torch.randn(ROWS, LENGTH, 51)
    wanted = gkd.GKDTrainer.generalized_jsd_loss(logits, scores, beta=theirs, temperature=0.7, reduction="sum")
    policy = logits.flatten(0, 1) / 0.7
    said = (scores.flatten(0, 1) / 0.7).log_softmax(-1)
    ids = torch.arange(51, dtype=torch.int32).expand_as(said)
    none_left = torch.full_like(said[:, :1], torch.finfo(torch.float16).min)
    taught = Taught((Top(ids, torch.cat([said, none_left], -1), 1.0),), partial(divergence, kind=kind, beta=beta))
    found = taught.divergence(policy, policy.logsumexp(-1)).sum()
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    mine, its = (torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in (found, wanted))
    torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-6)
