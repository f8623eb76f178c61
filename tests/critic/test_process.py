"""PRIME's critic: what it says of each token, what it learns from outcomes, and what the policy makes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForTokenClassification

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.preflight import lora
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.preflight.without_effect import idle_notes
from penstock.pipeline.run.resume import check_fixed
from penstock.protocols.columns import PROCESS, REFERENCE
from penstock.services.critic.config import CriticConfig
from penstock.services.critic.process_learner import ProcessLearner
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.runtime import registry
from penstock.services.trainer.algorithms.advantages.prime import prime
from tests.conftest import TINY
from tests.trainer.rank_program import a_model
from tests.trainer.steps import a_step

BETA, RIGHT = 0.3, 0.6


def a_learner(**chosen: Any) -> ProcessLearner:
    config = {"optimizer": {"lr": 1e-2}, "beta": BETA, "right": RIGHT, **chosen}
    return ProcessLearner(a_model(), CriticConfig.model_validate(config), 50, 0.9)


def asked(learner: ProcessLearner, seed: int = 0) -> TrainingBatch:
    """A step with the reference's log-probabilities, those of the model that the learner began as, and with what it
    says of it."""
    step = a_step(seed)
    reference = a_learner()
    said = reference.evaluate(step, lambda rows: forward(reference.model, rows, 0.9))
    step = step.with_tokens(REFERENCE, said)
    return step.with_tokens(PROCESS, learner.values(step))


def test_a_token_is_worth_what_it_is_likelier_than_under_the_reference() -> None:
    learner = a_learner()
    assert all(not values.any() for values in asked(learner).token_values[PROCESS]), "it begins as the reference"
    learner.train(asked(learner))
    step = asked(learner)
    for trajectory, values in zip(step.trajectories, step.token_values[PROCESS], strict=True):
        logits = [
            each.model(torch.from_numpy(trajectory.tokens.astype(np.int64))[None]).logits[0] / 0.9
            for each in (learner, a_learner())
        ]
        wanted = torch.zeros(len(trajectory.tokens))
        for place in np.flatnonzero(trajectory.loss_mask):
            mine, theirs = (of[place - 1].log_softmax(-1)[trajectory.tokens[place]] for of in logits)
            wanted[place] = BETA * (mine - theirs).detach()
        np.testing.assert_allclose(values, wanted, atol=1e-5)


def test_its_gradient_is_that_of_the_papers_cross_entropy_whatever_the_cut() -> None:
    found = []
    for tokens in (60, 8192):
        learner = a_learner(tokens_per_micro_batch=tokens)
        step = asked(learner, 1)
        step.values["reward"][2] = np.nan
        rewarded = np.flatnonzero(step.rewarded)
        loss = learner._accumulate(step, rewarded)
        found.append((loss, [parameter.grad for parameter in learner.parameters.values()]))
    plain, losses = a_learner(), []
    for i in rewarded:
        tokens = torch.from_numpy(step.trajectories[i].tokens.astype(np.int64))
        logs = (plain.model(tokens[None]).logits[0, :-1] / 0.9).log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        mask = torch.from_numpy(step.trajectories[i].loss_mask[1:].astype(np.float32))
        worth = BETA * ((logs - torch.from_numpy(step.token_values[REFERENCE][i][1:])) * mask).sum()
        right = step.rewards[i] >= RIGHT
        losses.append(-(torch.sigmoid(worth) if right else 1 - torch.sigmoid(worth)).log())
    wanted = torch.stack(losses).mean()
    wanted.backward()
    for loss, gradients in found:
        assert loss == pytest.approx(wanted.item(), rel=1e-5)
        for mine, parameter in zip(gradients, plain.parameters.values(), strict=True):
            torch.testing.assert_close(mine, parameter.grad, rtol=1e-4, atol=1e-7)


def test_it_learns_which_answers_are_right() -> None:
    learner = a_learner(optimizer={"lr": 3e-3})
    first = learner.train(asked(learner))
    for _ in range(40):
        last = learner.train(asked(learner))
    assert last["critic_accuracy"] == 1.0 and last["critic_loss"] < 0.3 * first["critic_loss"]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 999), gamma=st.sampled_from([1.0, 0.9]), share=st.sampled_from([0.0, 1.0, 5.0]))
def test_advantages_are_the_papers(seed: int, gamma: float, share: float) -> None:
    random = np.random.default_rng(seed)
    groups, mask = np.array([0, 0, 0, 1, 1, 2]), random.random((6, 7)) < 0.7
    mask[:, 2] = True
    rewards, process = random.random(6), random.normal(size=(6, 7))
    tokens = np.zeros((6, 7))
    tokens[np.arange(6), [np.flatnonzero(row)[-1] for row in mask]] = rewards
    given = (
        torch.from_numpy(each) for each in (tokens, mask.astype(np.float64), groups, process, rewards, np.arange(6))
    )
    found = prime(*given, share=share, gamma=gamma)
    for i in range(6):
        others = [j for j in range(6) if groups[j] == groups[i] and j != i]
        outcome = rewards[i] - (np.mean([rewards[j] for j in others]) if others else 0.0)
        baseline = np.mean([process[j][mask[j]].mean() for j in others]) if others else 0.0
        places = np.flatnonzero(mask[i])
        for number, place in enumerate(places):
            later = [gamma**k * (process[i, s] - baseline) for k, s in enumerate(places[number:])]
            assert float(found[i, place]) == pytest.approx(outcome + share * sum(later))
    assert not found.numpy()[~mask].any()


def test_an_agents_session_is_compared_once_and_learned_from_once() -> None:
    scores, sessions = torch.tensor([1.0, 1.0, 1.0, 0.0]), torch.tensor([0, 0, 0, 1])
    process = torch.tensor([[1.0, 0.0], [4.0, 0.0], [7.0, 0.0], [2.0, 6.0]])
    mask = torch.tensor([[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    about = torch.zeros(4, 2), mask, torch.zeros(4, dtype=torch.int64), process, scores, sessions
    outcome = prime(*about, share=0.0, gamma=1.0)
    assert outcome[:, 0].tolist() == [1, 1, 1, -1], "each has the other session's mean taken off, and no sibling's"
    both = prime(*about, share=1.0, gamma=1.0) - outcome
    assert both[:3, 0].tolist() == [1 - 4, 4 - 4, 7 - 4] and both[3].tolist() == [2 + 6 - 2 * 4, 6 - 4]
    learner = a_learner()
    step, twice = asked(learner, 2), asked(learner, 2)
    twice.trajectories.append(twice.trajectories[0])
    for name, values in twice.token_values.items():
        twice.token_values[name] = [*values, values[0]]
    twice = replace(
        twice, groups=np.r_[twice.groups, twice.groups[0]], sessions=np.r_[twice.sessions, 0],
        values={name: np.r_[values, values[0]] for name, values in twice.values.items()},
    )  # fmt: skip
    alone, with_branch = learner._accumulate(step, np.arange(12)), a_learner()._accumulate(twice, np.arange(13))
    assert with_branch == pytest.approx(alone, rel=1e-5)


def test_a_critic_of_its_kind_and_a_reference_come_with_it() -> None:
    config = load(Path("configs/quickstart.yaml"), ["trainer.algorithm.preset=prime", "trainer.algorithm.kl={}"])
    assert {"critic", "reference"} <= {kind for kind, spec in registry.actors(config).items() if spec.names(config)}
    (column,) = config.columns.of_step
    assert column.name == config.critic_column == PROCESS
    with pytest.raises(ConfigError, match="a critic learns beside the trainer"):
        load(
            Path("configs/quickstart.yaml"),
            ["trainer.algorithm.preset=prime", "trainer.lora.rank=4", "reference.in_trainer=true"],
        )


def test_a_scorer_of_ones_own_may_say_what_tokens_were_worth() -> None:
    own = "scorers={mine: {scorer: 'm:S', columns: {process: token}}}"
    config = load(Path("configs/quickstart.yaml"), ["trainer.algorithm={preset: prime}", own])
    assert not config.with_critic and not config.with_reference


def test_what_process_rewards_are_made_of_stays_where_a_run_goes_on() -> None:
    began, other = (load(Path("configs/prime.yaml"), more) for more in ([], ["critic.beta=0.1"]))
    with pytest.raises(ConfigError, match=r"critic\.beta: 0\.1, but the run began with 0\.05"):
        check_fixed(began, other)
    check_fixed(*(load(Path("configs/ppo.yaml"), more) for more in ([], ["critic.beta=0.1"])))
    values = load(Path("configs/prime.yaml"), ["trainer.algorithm={preset: ppo, advantage: {type: gae}}"])
    with pytest.raises(ConfigError, match="the run has a critic that says process"):
        check_fixed(began, values)


def test_keys_of_another_critic_are_told_of() -> None:
    for path, key, wrong in (("prime", "critic.gamma=0.9", "values"), ("ppo", "critic.right=1.0", "process")):
        notes = [*idle_notes(load(Path(f"configs/{path}.yaml"), [key]))]
        assert any(f"{key.partition('=')[0]}: it is of a critic that says {wrong}" in note for note in notes), notes


@pytest.mark.parametrize("column", ["process", "values"])
def test_adapters_of_the_other_kind_of_critic_are_refused(column: str, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from peft import LoraConfig, get_peft_model

    model = a_model() if column == "values" else LlamaForTokenClassification(LlamaConfig(**TINY, num_labels=1))
    kind = "CAUSAL_LM" if column == "values" else "TOKEN_CLS"
    get_peft_model(model, LoraConfig(r=4, lora_alpha=8, task_type=kind)).save_pretrained(tmp_path)
    adapter = CriticConfig.model_validate({"lora": {"rank": 4, "alpha": 8, "start": str(tmp_path)}}).lora
    preset = "prime" if column == "process" else "ppo"
    config = load(Path(f"configs/{preset}.yaml"))
    config = config.model_copy(update={"critic": config.critic.model_copy(update={"lora": adapter})})
    report = Report()
    lora.look(config, report)
    (said,) = report.problems
    assert "critic.lora.start: the adapter in" in said and f"name one of {OTHER[column]}" in said


OTHER = {"process": "a language model", "values": "a critic of values"}
