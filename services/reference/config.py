"""Config section of the reference processes."""

from __future__ import annotations

from pydantic import Field

from penstock.services.runtime.settings import Section


class ReferenceConfig(Section):
    """The reference processes; none are started where the KL coefficient is 0."""

    count: int = Field(1, ge=1)
    path: str | None = None
    """The frozen model; None: the model that training starts from."""
    device: str = "auto"
    tokens_per_batch: int = Field(8192, ge=1)
    """Padded tokens of one forward pass."""
    groups_in_hand: int = Field(64, ge=1)
    """Groups that one reference process asks for at once."""
    threads: int = Field(1, ge=1)
