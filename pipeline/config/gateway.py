"""What agents ask of the rest of the config."""

from __future__ import annotations

from typing import Any


def check_gateway(config: Any) -> None:
    """Raises `ValueError` where a run with gateways cannot work."""
    trajectories = config.sampling.trajectories
    if config.rollout.all_environments:
        raise ValueError(
            "gateway.count: agents make the groups of a run, or rollout.environment does; leave one of them out"
        )
    if config.run.deterministic:
        raise ValueError("run.deterministic: agents answer when they like; set it to false, or gateway.count to 0")
    if config.gateway.sessions < trajectories:
        raise ValueError(
            f"gateway.sessions={config.gateway.sessions} has no room for a group of {trajectories} (rollout.sampling.n)"
        )
