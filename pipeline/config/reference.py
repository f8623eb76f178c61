"""Whether the reference can take the policy's own versions, or be computed where the policy learns."""

from __future__ import annotations

from typing import Any

from penstock.protocols.columns import PROCESS, REFERENCE


def check_reference(config: Any) -> None:
    """Raises `ValueError` where it cannot."""
    if config.reference.in_trainer:
        _check_in_trainer(config)
    every, saved = config.reference.refresh_every, config.trainer.checkpoint.every
    if not every:
        if config.reference.mix < 1:
            raise ValueError(
                f"reference.mix={config.reference.mix:g}: nothing is mixed where the reference stays as it is; set "
                "reference.refresh_every, e.g. a multiple of trainer.checkpoint.every, or leave it out"
            )
        return
    key = f"reference.refresh_every={every}"
    if not config.with_reference:
        raise ValueError(f"{key}: this run has no reference; set trainer.algorithm.kl.coefficient, or leave it out")
    if every % saved:
        raise ValueError(f"{key} is no multiple of trainer.checkpoint.every={saved}, where the versions are read")
    if config.trainer.lora is not None:
        raise ValueError(f"{key}: checkpoints of trainer.lora are adapters, which the reference does not read")
    if config.critic_column == PROCESS:
        raise ValueError(f"{key}: process rewards are made beside a reference that stays what it is; leave it out")
    if config.run.deterministic:
        raise ValueError(f"{key}: which groups the new one scores depends on time, which run.deterministic forbids")


def _check_in_trainer(config: Any) -> None:
    key, reference = "reference.in_trainer", config.reference
    if config.trainer.lora is None:
        raise ValueError(f"{key}: only an adapter can be switched off; set trainer.lora, or leave it out")
    if reference.path or reference.refresh_every:
        other = "path" if reference.path else "refresh_every"
        raise ValueError(f"{key}: that is the model that training starts from; leave out reference.{other}")
    if config.rollout.sampling.routing_replay:
        raise ValueError(f"{key}: rollout.sampling.routing_replay would send its tokens as the policy's; leave it out")
    if config.with_critic:
        raise ValueError(f"{key}: a critic learns beside the trainer, and does not wait for it; leave it out")
    before = {f"reward.functions.{index}.columns": each.columns for index, each in enumerate(config.reward.functions)}
    before |= {f"scorers.{kind}.reads": scorer.reads for kind, scorer in config.scorers.items()}
    before |= {"reward.columns": config.reward.columns}
    if config.replay.filter.type != "none":
        before["replay.filter.column"] = [config.replay.filter.column]
    if config.prompts.curriculum:
        before["prompts.curriculum.column"] = [config.prompts.curriculum.column]
    for name, columns in before.items():
        if REFERENCE in columns:
            raise ValueError(f"{name}: with {key} reference is there once a step has taken a group, and not before")
