"""Columns of a finished group as numbers of its trajectories."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.protocols.experience import Purpose
from penstock.protocols.packed_groups import lengths_of
from penstock.services.broker.state import BrokerState


def by_trajectory(state: BrokerState, key: tuple[Purpose, int], names: Sequence[str]) -> dict[str, np.ndarray]:
    """``[trajectories]`` of each of these columns, which must be there: of one with a value for each token, the
    sums."""
    found = state.payloads.columns(key, names)
    if of_tokens := state.settings.columns.by_token.intersection(found):
        ends = np.cumsum(lengths_of(state.payloads.experience(key)))
        found |= {name: np.array([part.sum() for part in np.split(found[name], ends[:-1])]) for name in of_tokens}
    return found
