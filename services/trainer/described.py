"""What a step's experience is like, as metrics: rewards, ages, lengths, and its columns' means."""

from __future__ import annotations

import numpy as np

from penstock.protocols.columns import REFERENCE, REWARD, SOURCE
from penstock.protocols.experience import mean_by_session
from penstock.protocols.measured import of_answers
from penstock.services.learning.batch import TrainingBatch

OF_ANY = (
    "reward", "reward_std", "reward_missing", "groups_without_variance", "tokens", "tokens_lagging", "lag_mean",
    "lag_max", "groups_unreadable",
)  # fmt: skip
"""What a step is asked for, whatever it has learned from."""


def describe(step: TrainingBatch, version: int, compares: bool, with_given: bool = False) -> dict[str, float]:
    """Of a step that ``version`` learns from. ``compares``: nothing is learned from groups whose rewards are all equal,
    so that these are counted; ``with_given``: given answers are compared too. All else but the count of
    tokens is of what was sampled alone."""
    given = step.given
    if not given.any():
        return _sampled(step, version, step if compares else None)
    own = step.only(np.flatnonzero(~given))
    compared = step if with_given else own
    found = _sampled(own, version, compared if compares and compared.trajectories else None)
    if given.all():  # nothing is known of the policy's own answers
        found = {name: found[name] for name in OF_ANY}
    tokens = sum(trajectory.sampled for trajectory in step.trajectories if trajectory.given)
    found |= {"tokens": found["tokens"] + tokens, "given_tokens": float(tokens)}
    rewards = step.rewards[given & step.rewarded]
    return found | ({"reward_given": float(rewards.mean())} if rewards.size else {})


def _sampled(step: TrainingBatch, version: int, compared: TrainingBatch | None) -> dict[str, float]:
    """``compared``: the answers that are compared with each other; None where none is."""
    lags = step.lags(version)
    lengths = np.array([t.sampled for t in step.trajectories])
    rewards = mean_by_session(step.rewards, step.sessions)
    rewards = rewards[np.isfinite(rewards)]
    finished = [t.finish == "stop" for t in step.trajectories]
    solved_all, solved_none = _solved(compared) if compared else (0, 0)
    return {
        "reward": float(rewards.mean()) if rewards.size else float("nan"),
        "reward_std": float(rewards.std()) if rewards.size else float("nan"),
        "reward_missing": float((~step.rewarded).sum()),
        "groups_without_variance": float(solved_all + solved_none),
        "tokens": float(lags.size),
        "tokens_lagging": float((lags >= 1).sum()),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": float(lags.max()) if lags.size else 0.0,
        "response_tokens": float(lengths.mean()) if lengths.size else 0.0,
        "finished_share": float(np.mean(finished)) if finished else 0.0,
        "groups_unreadable": float(step.unreadable),
        **(_shares(compared, solved_all, solved_none) if compared else {}),
        **_means(step),
        **_turns(step),
        **_by_source(step),
    }


def _solved(step: TrainingBatch) -> tuple[int, int]:
    """Groups of which every answer with a reward has the same: above 0, and as high as any of the step's to prompts of
    its source, so that there is nothing left to learn; and the others, which are stuck below. Nobody knows how high
    rewards can be."""
    sources = np.array(step.sources or [""] * len(step.trajectories))
    best = {name: step.rewards[step.rewarded & (sources == name)].max(initial=-np.inf) for name in np.unique(sources)}
    equal = solved = 0
    for number in np.unique(step.groups[step.rewarded]):
        mine = step.rewarded & (step.groups == number)
        highest = step.rewards[mine].max()
        if highest == step.rewards[mine].min():
            equal += 1
            solved += bool(highest == best[sources[mine][0]] and highest > 0)
    return solved, equal - solved


def _shares(step: TrainingBatch, solved_all: int, solved_none: int) -> dict[str, float]:
    """Of the step's groups that have a reward; empty where none has."""
    groups = len(np.unique(step.groups[step.rewarded]))
    return {"solved_all": solved_all / groups, "solved_none": solved_none / groups} if groups else {}


def _means(step: TrainingBatch) -> dict[str, float]:
    """Of every column but those that have metrics of their own: over sessions, or over sampled tokens, that have a
    value."""
    found = {}
    for name, values in step.values.items():
        if name != REWARD and np.isfinite(values).any():
            found[name] = float(np.nanmean(mean_by_session(values, step.sessions)))
    for name, parts in step.token_values.items():
        if name != REFERENCE and name not in step.values and parts:
            sampled = [v[t.loss_mask == 1] for v, t in zip(parts, step.trajectories, strict=True)]
            values = np.concatenate(sampled)
            if (there := values[~np.isnan(values)]).size:
                found[name] = float(there.mean())
    return found


def _turns(step: TrainingBatch) -> dict[str, float]:
    """What only steps with greedy baselines, an environment or agents have."""
    found = {}
    if step.greedy is not None and np.isfinite(step.greedy).any():
        found["reward_greedy"] = float(np.nanmean(step.greedy))
    if (sessions := len(np.unique(step.sessions))) < len(step.trajectories):
        found["branches"] = len(step.trajectories) / sessions
    return found | of_answers(step.trajectories, step.sessions.tolist())


def _by_source(step: TrainingBatch) -> dict[str, float]:
    """Mean reward over the sessions of each source of a mixture."""
    found = {}
    for name in sorted(set(step.sources)):
        mine = np.array([source == name for source in step.sources])
        rewards = mean_by_session(step.rewards[mine], step.sessions[mine])
        if np.isfinite(rewards).any():
            found[f"{SOURCE}{name}"] = float(np.nanmean(rewards))
    return found
