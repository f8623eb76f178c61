"""Whether the answers that are given have a use, and nothing is asked for that only sampled ones have."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.protocols.columns import BASELINE
from penstock.services.broker.config import NoFilter
from penstock.services.trainer.algorithm_config import AlgorithmConfig
from penstock.services.trainer.term_config import GivenLossConfig

PRESET, PAIRS, TAUGHT = "sft", "dpo", "gkd"


def given_by_preset(data: dict[str, Any]) -> dict[str, Any]:
    """``data`` of a whole config: preset `PRESET` gives every answer, and one to each prompt, and `PAIRS` one and the
    one that it is preferred to, where nothing else is said."""
    trainer, rollout = data.get("trainer"), data.get("rollout") or {}
    algorithm = trainer.get("algorithm") if isinstance(trainer, dict) else None
    preset = algorithm.get("preset") if isinstance(algorithm, dict) else None
    if preset not in (PRESET, PAIRS) or not isinstance(rollout, dict):
        return data
    sampling, given = rollout.get("sampling") or {}, rollout.get("given") or {}
    if not isinstance(sampling, dict) or not isinstance(given, dict):
        return data
    if preset == PAIRS:
        sampling, given = {"n": 2, **sampling}, {"answers": 1, "rejected": 1, **given}
    else:
        sampling = {"n": 1, **sampling}
        given = {"answers": sampling["n"], **given}
    return {**data, "rollout": {**rollout, "sampling": sampling, "given": given}}


def check_given(config: Any) -> None:
    """Raises `ValueError` where answers are given that nobody could give or learn from, or none are and some must be;
    and where too few are left to compare."""
    if config.prompts.measures and config.rollout.sampling.routing_replay:
        raise ValueError(
            "prompts.eval_given: no engine has routed what it was not asked for; set rollout.sampling.routing_replay="
            "false, or leave prompts.eval_given out"
        )
    _check_pairs(config)
    given, n = config.rollout.given, config.rollout.sampling.n
    answers, algorithm = given.count, config.trainer.algorithm
    said = f"rollout.given.answers={given.answers}" + f" + rejected={given.rejected}" * bool(given.rejected)
    if answers > n:
        raise ValueError(
            f"{said} is more than rollout.sampling.n={n}, of which they are a part; set it to "
            f"{n} or fewer, or take more answers a group"
        )
    if config.rollout.without_engine:
        _check_engine(config, n - answers)
    if not algorithm.learns_from_sampled and not (answers and algorithm.given.coefficient):
        raise ValueError(
            "trainer.algorithm: advantage=none: nothing is learned; give distill, e.g. {teachers: {teacher: 1.0}}, or "
            "imitate, or answers (rollout.given), or take an advantage"
        )
    if not answers and algorithm.given != GivenLossConfig():
        raise ValueError(
            "trainer.algorithm.given: no answers are given that it could learn from; set rollout.given.answers, e.g. "
            "to 1, or leave it out"
        )
    for words in _unfit(config) if answers else ():
        raise ValueError(f"{said}: {words}")
    if answers == n:
        for key, why in _unread(config):
            raise ValueError(
                f"{key}: {why}, and {said} is all of rollout.sampling.n={n}: nothing is "
                "sampled for training; leave it out, or give fewer answers"
            )
        return
    if algorithm.preset == PRESET:
        raise ValueError(
            f"rollout.given.answers={answers}: preset={PRESET} learns from given answers alone; set it to "
            f"rollout.sampling.n={n}, or leave the preset out"
        )
    least = algorithm.advantage.least_n
    if (n if algorithm.given.compared else n - answers) < least:
        beside = f" beside the {answers} that are given (rollout.given.answers)" * bool(answers)
        raise ValueError(
            f"rollout.sampling.n must be at least {least}{beside}: advantage={algorithm.advantage.type} compares the "
            "trajectories of a group"
        )
    if algorithm.subset:
        _check_subset(algorithm, n - answers)


def _check_pairs(config: Any) -> None:
    """Raises `ValueError` where answers are given that others are preferred to, and not these, or nobody could learn
    from the two."""
    given, n, algorithm = config.rollout.given, config.rollout.sampling.n, config.trainer.algorithm
    if algorithm.preset == PAIRS and not given.rejected:
        raise ValueError(
            f"rollout.given.rejected: preset={PAIRS} learns from pairs of given answers; set it and rollout.given."
            "answers to 1, or take preset=online_dpo, whose pairs are sampled"
        )
    if not given.rejected:
        return
    key = f"rollout.given.rejected={given.rejected}"
    if not given.answers:
        raise ValueError(f"{key}: nothing is preferred to these; set rollout.given.answers, e.g. to 1")
    if given.count != n:
        raise ValueError(
            f"{key}: with rollout.given.answers={given.answers} it is {given.count} of rollout.sampling.n={n} answers, "
            f"and beside pairs nothing is sampled; set n to {given.count}"
        )
    as_dpo = algorithm.given.as_sampled and algorithm.advantage.beside_reference
    if not as_dpo or algorithm.loss.type != "reinforce":
        raise ValueError(f"{key}: an answer that others are preferred to would be learned; take preset={PAIRS}")


def _check_subset(algorithm: AlgorithmConfig, sampled: int) -> None:
    """``sampled``: answers of a group, of which some stay."""
    assert algorithm.subset
    keep, least = algorithm.subset.keep, algorithm.advantage.least_n
    if keep >= sampled:
        raise ValueError(
            f"trainer.algorithm.subset.keep={keep}: a group has {sampled} sampled answers, so none is left out; take "
            "fewer, or more of them (rollout.sampling.n)"
        )
    if BASELINE in algorithm.advantage.given:
        raise ValueError(
            f"trainer.algorithm.subset: advantage={algorithm.advantage.type} compares with running means of all "
            "answers, not with those that stay of a group; leave it out"
        )
    if keep < least:
        raise ValueError(
            f"trainer.algorithm.subset.keep={keep}: advantage={algorithm.advantage.type} compares at least {least}"
        )


def _check_engine(config: Any, sampled: int) -> None:
    """Of rollouts without one, where so many answers of a group are ``sampled``."""
    key, n = "rollout.engine.type", config.rollout.sampling.n
    if sampled:
        raise ValueError(
            f"{key}: none samples nothing, and {sampled} of rollout.sampling.n={n} answers are to be sampled; take "
            f"another, e.g. torch, or set rollout.given.answers={n}"
        )
    if config.prompts.evaluates:
        raise ValueError(
            f"{key}: none has nobody who could answer prompts.eval; take another, e.g. torch, or leave prompts.eval "
            "out, and have the loss on held-out answers measured (prompts.eval_given)"
        )
    if config.run.colocated:
        raise ValueError(
            f"{key}: none has no engine that could sleep (run.placement=colocated); set run.placement=as_given"
        )


def _unfit(config: Any) -> Iterator[str]:
    """What has no place for answers that are given."""
    if config.gateway.count:
        yield "agents make their groups themselves, and take no row's answer; leave it out, or gateway.count"
    if config.rollout.all_environments:
        yield "an environment answers what the policy says, and has nothing to say to a row's answer; leave one out"
    if config.rollout.sampling.routing_replay:
        yield "no engine has routed what it was not asked for; set rollout.sampling.routing_replay=false"
    if config.with_critic:
        yield "a critic would learn from what nobody sampled; take an advantage without one, e.g. grpo"
    if config.trainer.algorithm.advantage.type == "self_distillation":
        yield "advantage=self_distillation shows good answers that the policy has found itself; take another advantage"


def _unread(config: Any) -> Iterator[tuple[str, str]]:
    """By key, what is there for sampled answers alone, or cannot be where there are none."""
    algorithm, plain = config.trainer.algorithm, AlgorithmConfig()
    taught, pairs = algorithm.given.shape == "distill", config.rollout.given.rejected > 0
    if algorithm.preset not in (None, PRESET, *[TAUGHT] * taught, *[PAIRS] * pairs):
        yield "trainer.algorithm.preset", f"{algorithm.preset} learns from what the policy says"
    if not algorithm.given.coefficient:
        yield "trainer.algorithm.given.coefficient", "with 0 nothing at all is learned"
    if algorithm.given.compared and not pairs:
        yield "trainer.algorithm.given.compared", "there is nothing to compare with"
    own = (
        "advantage", "loss", "correction", "reject", "ratio", "kl", "sampler_penalty", "entropy_bonus", "subset",
        "entropy_control", "entropy_share", "imitate", "distill", "teacher_advantage", "constraints", "reward_shape",
        "whiten", "advantage_bound",
    )  # fmt: skip
    of_teachers = ["distill"] * taught  # as preset TAUGHT has them, and its own choices
    of_teachers += ["advantage", "loss"] * (taught and algorithm.advantage.type == "none")
    of_pairs = ["advantage", "loss", "imitate"] * pairs
    for name in own:
        if name not in (*of_teachers, *of_pairs) and getattr(algorithm, name) != getattr(plain, name):
            yield f"trainer.algorithm.{name}", "it is of what the policy says"
    if config.replay.filter != NoFilter():
        yield "replay.filter", "there are no rewards to choose groups by"
    if config.prompts.curriculum:
        yield "prompts.curriculum", "there are no rewards to choose prompts by"
