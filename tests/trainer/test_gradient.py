"""One GRPO step against a plain computation that shares no code with the trainer's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from penstock.protocols.experience import Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.learning.model_learner import learning_rate
from penstock.services.learning.optimizer_config import OptimizerConfig
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from tests.conftest import TINY, make_group

GROUPS, N = 6, 4


def make_model() -> Any:
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.ndim == 1 else 0.0, 0.1)
    return model.double()


def make_step(model: Any) -> TrainingBatch:
    """Groups of several versions, with behaviour log-probabilities near the model's and one reward missing."""
    random = np.random.default_rng(3)
    trajectories: list[Trajectory] = []
    for number in range(GROUPS):
        trajectories += make_group(random, number, N, versions=(5, 6, 7)).trajectories
    near = []
    for t in trajectories:
        with torch.no_grad():
            logs = model(torch.from_numpy(t.tokens.astype(np.int64))[None]).logits[0].log_softmax(-1)
        own = np.zeros(len(t.tokens))
        for i in range(1, len(t.tokens)):
            own[i] = float(logs[i - 1, int(t.tokens[i])])
        noisy = np.minimum(own + random.normal(0, 0.4, len(own)), 0) * t.loss_mask
        near.append(Trajectory(t.tokens, t.loss_mask, noisy.astype(np.float32), t.versions, t.text, t.finish))
    rewards = random.integers(0, 2, len(near)).astype(np.float32)
    rewards[5] = np.nan
    reference = [np.minimum(t.logprobs + random.normal(0, 0.4, len(t.tokens)), 0) * t.loss_mask for t in near]
    reference = [values.astype(np.float32) for values in reference]
    return TrainingBatch(
        near, np.repeat(np.arange(GROUPS), N), np.arange(len(near)), {"reward": rewards}, {"reference": reference}
    )


def plain_gradient(model: Any, step: TrainingBatch, ratio: str, correction: bool, kl: float) -> dict[str, torch.Tensor]:
    """The same loss, one trajectory and one token at a time."""
    model.zero_grad()
    valid = [i for i in range(len(step.trajectories)) if not np.isnan(step.rewards[i])]
    tokens = sum(int(step.trajectories[i].loss_mask.sum()) for i in valid)
    total = torch.zeros((), dtype=torch.float64)
    for i in valid:
        t = step.trajectories[i]
        peers = np.array([step.rewards[j] for j in valid if step.groups[j] == step.groups[i]], np.float64)
        advantage = (float(step.rewards[i]) - peers.mean()) / (peers.std(ddof=1) + 1e-6)
        logs = torch.log_softmax(model(torch.from_numpy(t.tokens.astype(np.int64))[None]).logits[0], -1)
        for p in range(1, len(t.tokens)):
            if not t.loss_mask[p]:
                continue
            log_prob = logs[p - 1, int(t.tokens[p])]
            behaviour = float(t.logprobs[p])
            r = torch.exp(log_prob - (behaviour if ratio == "behaviour" else log_prob.detach()))
            loss = torch.maximum(-advantage * r, -advantage * torch.clamp(r, 0.8, 1.28))
            if advantage < 0:
                loss = torch.minimum(loss, torch.tensor(-advantage * 3.0, dtype=torch.float64))
            if correction:
                loss = loss * min(float(torch.exp(log_prob.detach() - behaviour)), 2.0)
            d = log_prob - float(step.token_values["reference"][i][p])
            total = total + (loss + kl * (torch.exp(-d) + d - 1)) / tokens
    total.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize(("ratio", "correction"), [("behaviour", False), ("behaviour", True), ("proximal", True)])
def test_the_gradient_is_the_plain_one_whatever_the_micro_batches(ratio: str, correction: bool) -> None:
    model = make_model()
    step = make_step(model)
    wanted = plain_gradient(model, step, ratio, correction, kl=0.05)
    scale = max(float(g.abs().max()) for g in wanted.values())
    for budget in (40, 4096):
        algorithm = AlgorithmConfig.model_validate(
            {
                "loss": {"type": "ppo_clip", "clip_low": 0.2, "clip_high": 0.28},
                "correction": {"type": "truncated"} if correction else {"type": "none"},
                "ratio": ratio,
                "kl": {"coefficient": 0.05},
            }
        )
        config = TrainerConfig(algorithm=algorithm, tokens_per_micro_batch=budget)
        learner = Learner(model, config, 1.0)
        learner.version = 7
        learner.optimizer.zero_grad()
        _, metrics = learner.accumulate(step)
        assert metrics["clip_fraction"] > 0 or ratio == "proximal"
        for name, parameter in model.named_parameters():
            error = float((parameter.grad - wanted[name]).abs().max())
            assert error <= 1e-5 * scale, f"{name} at budget {budget}: {error / scale}"


def test_normalized_weights_do_not_depend_on_the_micro_batches() -> None:
    model = make_model()
    step = make_step(model)
    gradients = []
    for budget in (40, 4096):
        algorithm = AlgorithmConfig.model_validate({"correction": {"type": "truncated", "normalize": True}})
        learner = Learner(model, TrainerConfig(algorithm=algorithm, tokens_per_micro_batch=budget), 1.0)
        learner.version = 7
        learner.optimizer.zero_grad()
        learner.accumulate(step)
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_metrics_of_a_correction_do_not_depend_on_the_micro_batches(level: str) -> None:
    model = make_model()
    step = make_step(model)
    reject = [{"kind": "seq_mean_k3", "upper": 0.02}]
    correction = {"type": "icepop", "level": level, "lower": 0.9, "upper": 1.1}
    algorithm = AlgorithmConfig.model_validate({"ratio": "proximal", "correction": correction, "reject": reject})
    found = []
    for budget in (40, 4096):
        learner = Learner(model, TrainerConfig(algorithm=algorithm, tokens_per_micro_batch=budget), 1.0)
        learner.version = 7
        learner.optimizer.zero_grad()
        _, metrics = learner.accumulate(step)
        found.append({name: metrics[name] for name in metrics if name.startswith(("is_weight", "rejected"))})
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert 0 < found[0]["is_weight_effective_sample_fraction"] < 1 and 0 < found[0]["rejected_rows"] < 1
    assert "is_weight_square" not in found[0]


def test_the_clip_that_follows_age_is_counted_as_it_is() -> None:
    model = make_model()
    algorithm = AlgorithmConfig.model_validate({"loss": {"type": "ppo_clip", "lag_exponent": 3.0}})
    learner = Learner(model, TrainerConfig(algorithm=algorithm), 1.0)
    learner.version = 7
    learner.optimizer.zero_grad()
    _, metrics = learner.accumulate(make_step(model))
    lags = [name.split("/")[1] for name in metrics if name.endswith("/share")]
    beyond = sum(metrics[f"lag/{lag}/clipped"] * metrics[f"lag/{lag}/share"] for lag in lags)
    assert beyond >= metrics["clip_fraction"] > 0, "of those beyond the clip some are on the side that is not clipped"


def test_what_age_does_is_told_for_each_lag_whatever_the_micro_batches() -> None:
    model = make_model()
    step = make_step(model)
    found = []
    for budget in (40, 4096):
        learner = Learner(model, TrainerConfig(tokens_per_micro_batch=budget), 1.0)
        learner.version = 7
        learner.optimizer.zero_grad()
        _, metrics = learner.accumulate(step)
        found.append({name: value for name, value in metrics.items() if name.startswith("lag/")})
    assert found[0] == pytest.approx(found[1], rel=1e-6)
    trained = [t.versions[t.loss_mask == 1] for t, there in zip(step.trajectories, step.rewarded, strict=True) if there]
    lags, counts = np.unique(7 - np.concatenate(trained), return_counts=True)
    assert len(lags) > 1
    for lag, count in zip(lags.tolist(), counts.tolist(), strict=True):
        assert found[0][f"lag/{lag}/share"] == pytest.approx(count / counts.sum())
        assert found[0][f"lag/{lag}/kl"] >= 0 and 0 < found[0][f"lag/{lag}/ess"] <= 1
    clipped = sum(found[0][f"lag/{lag}/clipped"] * found[0][f"lag/{lag}/share"] for lag in lags.tolist())
    assert clipped > 0


def test_learning_rate_warms_up_and_falls() -> None:
    config = TrainerConfig.model_validate(
        {"steps": 10, "optimizer": {"lr": 1.0, "warmup_steps": 2, "schedule": "linear", "final_lr_share": 0.5}}
    ).optimizer
    rates = [learning_rate(config, step, 10) for step in range(10)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[-1] == pytest.approx(0.5) and rates[-2] == pytest.approx(0.5 + 0.5 / 7)


def test_warm_up_and_fall_may_be_shares_of_the_steps() -> None:
    """The last ``decay_share`` of them lie below the rate, and the very last one has what is to be left."""
    given = {"lr": 1.0, "warmup_share": 0.2, "schedule": "linear", "decay_share": 0.4, "final_lr_share": 0.2}
    rates = [learning_rate(OptimizerConfig.model_validate(given), step, 10) for step in range(10)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])
    whole = given | {"warmup_share": 0, "warmup_steps": 2, "decay_share": 1.0}
    plain = {key: value for key, value in whole.items() if key != "decay_share"}
    both = [[learning_rate(OptimizerConfig.model_validate(each), n, 10) for n in range(10)] for each in (whole, plain)]
    assert both[0] == both[1]
    for wrong, said in (
        ({"warmup_steps": 1}, "leave one of the two out"),
        ({"schedule": "constant"}, "set schedule=linear or cosine"),
        ({"decay_share": 0.9}, "are more than all steps"),
    ):
        with pytest.raises(ValueError, match=said):
            OptimizerConfig.model_validate(given | wrong)
