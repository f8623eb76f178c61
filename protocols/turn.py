"""What an environment says after a turn of the policy: `penstock.Turn`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Turn:
    """An environment's answer to one turn.

    >>> Turn("17 is too high.", reward=0.0).done
    False
    """

    observation: str | Sequence[dict[str, str]] | None = None
    """What the policy reads next: text, or chat messages with ``role`` and ``content``. Text is a user's message where
    the prompt is a chat, and goes behind the answer as it is where the prompt is plain text."""
    reward: float = 0.0
    """For this turn. A trajectory's reward is the sum over its turns."""
    done: bool = False
    """The task is over; the observation, if there is one, is not read any more."""
    pictures: Sequence[Any] = ()
    """What the observation shows, for models that see: files as bytes, images of Pillow, or paths. `<image>` in its
    words is where each stands; without, they stand before the words."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Whatever else there is to measure of this turn. They are added up over a trajectory's turns, and the mean of each
    over the trajectories that report it is in the step's metrics, as ``agent/NAME``: where 0 counts, give it."""
