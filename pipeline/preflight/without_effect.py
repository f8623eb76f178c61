"""Choices of an algorithm that undo each other: each is right by itself, and together one of them does nothing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from penstock.pipeline.config import Config
from penstock.protocols.columns import PROCESS, VALUES
from penstock.services.trainer.algorithm_config import RejectRule
from penstock.services.trainer.loss_config import GspoLoss
from penstock.services.trainer.presets import PRESETS

FOR_OLD = ("m2po", "topr", "vespo")
"""Losses that go by how far the policy is from the one that sampled."""
NARROW = 0.01
"""A clip of whole answers that is no wider is crossed by rounding alone, in 16 bits."""


def idle_choices(config: Config) -> Iterator[str]:
    """What a start is refused for."""
    algorithm = config.trainer.algorithm
    loss, kl = algorithm.loss.type, algorithm.kl
    once = config.trainer.updates == 1  # with more the ratio moves within the step
    if once and algorithm.ratio == "proximal" and loss in FOR_OLD:
        yield (
            f"trainer.algorithm.ratio=proximal: loss={loss} goes by how far the policy is from the one that sampled, "
            "and this ratio compares with the one that the step starts from; set trainer.algorithm.ratio=behaviour and "
            "trainer.algorithm.correction={type: none}"
        )
    if kl.coefficient and kl.place == "loss" and kl.kind == "k1" and kl.gradient == "own":
        yield (
            "trainer.algorithm.kl.kind=k1: as a term of the loss its own gradient is 0 in the mean, so that nothing "
            "holds the policy; set trainer.algorithm.kl.gradient=k2, or another kind, e.g. k3"
        )
    if algorithm.router_balance and not getattr(config.model, "experts", 1):
        yield "trainer.algorithm.router_balance: there are no experts; set model.experts, e.g. to 4, or leave it out"
    yield from map(_wrong_side, filter(_leaves_out_agreement, algorithm.reject))
    if algorithm.correction.type == "icepop" and loss == "geo_mean" and algorithm.correction.level == "token":
        yield (
            "trainer.algorithm.correction=icepop: it leaves out tokens, and each token of loss=geo_mean has the whole "
            "trajectory's loss; set trainer.algorithm.correction.level=sequence"
        )


def _leaves_out_agreement(rule: RejectRule) -> bool:
    """What engine and trainer say alike is out of its bounds."""
    return rule.kind.endswith("k1") and (rule.upper < 1 or (rule.lower or 0) > 1)


def _wrong_side(rule: RejectRule) -> str:
    key, bound, side = ("upper", rule.upper, "above") if rule.upper < 1 else ("lower", rule.lower or 0, "below")
    nats = bound if key == "upper" else -bound
    return (
        f"trainer.algorithm.reject: {rule.kind} with {key}={bound:g} leaves out nearly everything: bounds of k1 are "
        f"ratios, and that of engine to trainer is about 1; set {key} {side} 1, e.g. {math.exp(nats):.4g} where "
        f"{bound:g} nats are meant"
    )


def _own_clip(loss: Any, preset: str | None) -> Iterator[str]:
    """What is said of the clip that is not there anyway, nor by the ``preset``."""
    chosen = PRESETS.get(preset or "", {}).get("loss", {})
    for name in ("clip_low", "clip_high"):
        field = type(loss).model_fields.get(name)
        if field and getattr(loss, name) not in (field.default, chosen.get(name)):
            yield f"{name}={getattr(loss, name):g}"


def idle_notes(config: Config) -> Iterator[str]:
    """What one should know of."""
    yield from _of_another_critic(config)
    yield from _other_pulls(config)
    trainer, algorithm = config.trainer, config.trainer.algorithm
    updates, loss = trainer.updates, algorithm.loss
    aged = algorithm.ratio == "proximal" and algorithm.correction.type == "none" and config.gate.max_lag > 0
    if aged and updates == 1 and loss.has_ratio and loss.type not in FOR_OLD and algorithm.learns_from_sampled:
        yield (
            "trainer.algorithm.ratio=proximal: with one update a step the ratio is 1, so that the loss never clips and "
            f"nothing makes up for experience that is up to gate.max_lag={config.gate.max_lag} versions old; set "
            "trainer.algorithm.correction, e.g. {type: truncated}, or ratio=behaviour"
        )
    idle = updates == 1 and algorithm.ratio == "proximal" and algorithm.correction.type != "none"
    if clip := ", ".join(_own_clip(loss, algorithm.preset)) if idle else "":
        yield (
            f"trainer.algorithm.loss: {clip} is never reached: with ratio=proximal and one update a step the ratio is "
            "1; leave it out, or set trainer.mini_batches=2 or more"
        )
    rounds = algorithm.ratio == "behaviour" and config.model.dtype != "float32"
    if rounds and isinstance(loss, GspoLoss) and max(loss.clip_low, loss.clip_high) < NARROW:
        yield (
            f"trainer.algorithm.loss: its clip of {loss.clip_low:g} and {loss.clip_high:g} is meant for a ratio that "
            "the trainer computes on both sides; with ratio=behaviour the engine's rounding in "
            f"{config.model.dtype} alone crosses it in many answers; set trainer.algorithm.ratio=proximal with "
            "correction={type: truncated} and trainer.mini_batches=2 or more, or a wider clip"
        )
    if algorithm.kl.in_reward and algorithm.kl.gradient != "own":
        yield (
            f"trainer.algorithm.kl.gradient={algorithm.kl.gradient}: a penalty in the reward has no gradient; take it "
            "out, or set trainer.algorithm.kl.place=loss"
        )
    compares = algorithm.advantage.compares and not algorithm.equal_is_idle
    if config.replay.filter.type == "zero_variance" and compares and algorithm.advantage.type != "custom":
        yield (
            "replay.filter=zero_variance: groups of equal reward would teach something here (an advantage, a penalty "
            "or a loss that does not go by the reward alone), and are left out"
        )


def _of_another_critic(config: Config) -> Iterator[str]:
    """Keys of the kind of critic that the run does not have."""
    kinds, plain = {VALUES: ("clip", "gamma", "lam"), PROCESS: ("beta", "right")}, type(config.critic)()
    for column, keys in kinds.items() if config.with_critic else ():
        said = [key for key in keys if getattr(config.critic, key) != getattr(plain, key)]
        if said and config.critic_column != column:
            yield f"critic.{said[0]}: it is of a critic that says {column}, and this one says {config.critic_column}"


def _other_pulls(config: Config) -> Iterator[str]:
    """What makes another gradient of a loss that compares answers of a group beside the reference."""
    trainer = config.trainer
    kind = trainer.algorithm.advantage.type
    if kind not in ("online_dpo", "gvpo"):
        return
    if trainer.updates > 1:
        yield (
            f"trainer.algorithm.advantage={kind}: a step has {trainer.updates} updates, and its answers pull as they "
            "did before the first; set trainer.epochs and trainer.mini_batches to 1"
        )
    if kind == "online_dpo" and trainer.algorithm.truncated == "mask":
        yield (
            "trainer.algorithm.truncated=mask: of a pair, one that was cut off is left out, and the other pulls alone; "
            "set it to learn, and let a reward, e.g. overlong, speak against it"
        )
