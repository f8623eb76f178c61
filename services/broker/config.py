"""Config sections that the broker reads."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from penstock.services.data.config import DataConfig
from penstock.services.runtime.settings import Section


class PromptsConfig(Section):
    """Which prompts a run trains on, in which order."""

    train: DataConfig
    eval: DataConfig | None = None
    """Held-out prompts, answered greedily before and after training. None: no evaluation."""
    eval_size: int = Field(256, ge=1)
    eval_every: int = Field(0, ge=0)
    """Evaluate also after every so many steps, while training goes on; 0: not."""
    shuffle: bool = True
    epochs: int | None = Field(None, ge=1)
    """How often every prompt is drawn; None: as often as the steps need."""


class GateConfig(Section):
    """How old experience may be. See docs/bounded-lag.md."""

    max_lag: int = Field(1, ge=0)
    """η: no token older than this many versions is trained on. 0 is synchronous training."""
    groups_per_step: int = Field(32, ge=1)
    """B: groups in a training step."""
    window: int = Field(1, ge=1)
    """W: a finished group may overtake this many unfinished ones, less one. 1 keeps strict order."""

    prefetch: int | None = Field(None, ge=1)
    """Groups that may be leased, scored or ready beyond the step in training. None: as many as max_lag allows. About
    groups_per_step keeps experience one version old where rollouts are faster than the trainer; at least that many,
    plus window - 1, are always allowed."""

    @model_validator(mode="after")
    def _enough_lag(self) -> GateConfig:
        needed = -(-(self.window - 1) // self.groups_per_step)
        if self.max_lag < needed:
            raise ValueError(
                f"window={self.window} with groups_per_step={self.groups_per_step} needs max_lag >= {needed}, "
                f"got {self.max_lag}"
            )
        return self


class BrokerConfig(Section):
    """The broker process."""

    bind: str = "tcp://127.0.0.1:0"
    """Where it listens; port 0 takes a free one."""
    advertise: str | None = None
    """The address that others use, where it differs from what was bound."""
    heartbeat_s: float = Field(1.0, gt=0)
    dead_after_s: float = Field(15.0, gt=0)
    """An actor that is silent for this long is treated as dead."""
    lease_s: float = Field(30.0, gt=0)
    """A lease that is not renewed (by its holder's heartbeats) for this long is given to another rollout."""
    stall_s: float = Field(60.0, gt=0)
    """When no step completes for this long, log and live view name the group, the actor and the wait."""
    max_attempts: int = Field(5, ge=1)
    """A group that was leased or scored this often without an answer is dropped."""
    max_consecutive_drops: int = Field(64, ge=1)
    """So many groups that failed, without one that was scored in between, end the run with an error."""


class ReplayConfig(Section):
    """What becomes of trained groups."""

    archive: Literal["all", "none"] | int = "none"
    """Steps whose groups are kept on disk, in the run's folder, for `penstock replay`: all, the last N, or none."""
    filter: Literal["none", "zero_variance"] = "none"
    """``zero_variance``: drop groups whose rewards are all equal, and generate others instead (Yu et al. 2025)."""
    max_consecutive_filtered: int = Field(1024, ge=1)
    """So many filtered groups without one that is kept end the run: there is nothing left to learn."""


class StoreConfig(Section):
    """Redis, the pipeline's memory."""

    url: str | None = None
    """``redis://…``, ``rediss://…`` or ``unix://…``. None: a private server in the run's folder."""
    fsync: Literal["always", "everysec"] = "always"
    """How the private server syncs its append-only file."""
    retry_s: float = Field(60.0, gt=0)
    """How long the broker waits for a store that does not answer, before it gives up."""
    shutdown: bool = False
    """When the run is over, the broker ends the server too: for one that serves this run alone, as in a container."""
