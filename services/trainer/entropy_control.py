"""The entropy bonus, steered to a target: He et al. 2025, arXiv:2505.22312 (Skywork-OR1), section 4.

It follows from the steps alone, and what it has become is in the learner's `state`: checkpoints have it, and a step
that is redone finds the same one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from penstock.services.trainer.algorithm_config import AlgorithmConfig

COEFFICIENT, BEGAN, LAST = "entropy_bonus", "entropy_bonus_began", "entropy_last"
"""In a learner's `state`, where it is steered: what it has become, with which `entropy_bonus` it began, and the
entropy, in nats a token, that the last update found."""


def bonus_of_update(config: AlgorithmConfig, state: dict[str, float]) -> float:
    """What a nat takes off the loss of the next update: 0 while the last one's entropy was above the target, or is not
    known. As the config has it, where nothing steers it; begun anew, where a run was resumed with another one."""
    control = config.entropy_control
    if control is None or state.get(BEGAN, config.entropy_bonus) != config.entropy_bonus:
        for name in (COEFFICIENT, BEGAN, LAST):
            state.pop(name, None)
    if control is None:
        return config.entropy_bonus
    state[BEGAN] = config.entropy_bonus
    within = state.get(LAST, math.inf) <= control.target
    return _bounded(config, state.get(COEFFICIENT, config.entropy_bonus)) if within else 0.0


def steer(config: AlgorithmConfig, state: dict[str, float], found: Mapping[str, float]) -> None:
    """Takes the entropy that an update has ``found`` into ``state``: the bonus grows by a step where it is at most the
    target, and falls by one where it is above."""
    control, entropy = config.entropy_control, found.get("entropy", math.nan)
    if control is None or not math.isfinite(entropy):  # nothing was sampled, or the update is skipped
        return
    coefficient = _bounded(config, state.get(COEFFICIENT, config.entropy_bonus))
    coefficient += control.step if entropy <= control.target else -control.step
    state[COEFFICIENT], state[LAST] = _bounded(config, coefficient), entropy


def _bounded(config: AlgorithmConfig, coefficient: float) -> float:
    control = config.entropy_control
    assert control is not None
    return min(max(coefficient, control.low), control.high)
