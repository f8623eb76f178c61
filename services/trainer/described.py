"""What a step's experience is like, as metrics: rewards, ages, lengths, and its columns' means."""

from __future__ import annotations

import numpy as np

from penstock.protocols.columns import REFERENCE, REWARD
from penstock.protocols.experience import mean_by_session
from penstock.services.learning.batch import TrainingBatch


def describe(step: TrainingBatch, version: int, compares: bool) -> dict[str, float]:
    """Of a step that ``version`` learns from. ``compares``: its advantage learns nothing from groups whose rewards are
    all equal, so that these are counted."""
    lags = step.lags(version)
    lengths = np.array([t.sampled for t in step.trajectories])
    rewards = mean_by_session(step.rewards, step.sessions)
    rewards = rewards[np.isfinite(rewards)]
    finished = [t.finish == "stop" for t in step.trajectories]
    compared = [step.rewards[step.groups == number] for number in np.unique(step.groups)] if compares else []
    return {
        "reward": float(rewards.mean()) if rewards.size else float("nan"),
        "reward_std": float(rewards.std()) if rewards.size else float("nan"),
        "reward_missing": float((~step.rewarded).sum()),
        "groups_without_variance": float(sum(np.nanmax(g) == np.nanmin(g) for g in compared if np.isfinite(g).any())),
        "tokens": float(lags.size),
        "tokens_lagging": float((lags >= 1).sum()),
        "lag_mean": float(lags.mean()) if lags.size else 0.0,
        "lag_max": float(lags.max()) if lags.size else 0.0,
        "response_tokens": float(lengths.mean()) if lengths.size else 0.0,
        "finished_share": float(np.mean(finished)) if finished else 0.0,
        "groups_unreadable": float(step.unreadable),
        **_means(step),
        **_turns(step),
        **_by_source(step),
    }


def _means(step: TrainingBatch) -> dict[str, float]:
    """Of every column but those that have metrics of their own: over trajectories, or over sampled tokens, that have a
    value."""
    found = {}
    for name, values in step.values.items():
        if name != REWARD and np.isfinite(values).any():
            found[name] = float(np.nanmean(values))
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
    turns = [len(t.turns) for t in step.trajectories]
    if any(turns):
        found["turns"] = float(np.mean(turns))
    measured: dict[str, dict[int, float]] = {}
    for session, trajectory in zip(step.sessions.tolist(), step.trajectories, strict=True):
        for name, value in trajectory.metrics.items():
            measured.setdefault(name, {})[session] = value
    return found | {f"agent/{name}": float(np.mean([*values.values()])) for name, values in measured.items()}


def _by_source(step: TrainingBatch) -> dict[str, float]:
    """Mean reward over the sessions of each source of a mixture."""
    found = {}
    for name in sorted(set(step.sources)):
        mine = np.array([source == name for source in step.sources])
        rewards = mean_by_session(step.rewards[mine], step.sessions[mine])
        if np.isfinite(rewards).any():
            found[f"source/{name}"] = float(np.nanmean(rewards))
    return found
