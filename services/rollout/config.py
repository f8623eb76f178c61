"""Config sections of the rollout processes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from protocols.experience import Sampling
from services.section import Section


class TorchEngineConfig(Section):
    """The embedded engine: continuous batching over a static KV cache, on any device."""

    type: Literal["torch"] = "torch"
    max_sequences: int = Field(256, ge=1)
    """Trajectories decoded at once."""
    max_length: int = Field(2048, ge=2)
    """Longest prompt and response together, in tokens; the KV cache holds max_sequences of them."""
    prefill_tokens: int = Field(8192, ge=1)
    """Prompt tokens prefilled between two decoding steps."""
    device: str = "auto"
    kv_on_update: Literal["keep", "recompute"] = "keep"
    """What happens to the KV of requests in flight when the weights change: kept as it is, or recomputed under the new
    weights."""


class PluginEngineConfig(Section):
    """An engine of your own: a class that implements `services.rollout.engines.base.Engine`."""

    type: Literal["plugin"] = "plugin"
    name: str
    """Entry point of the group ``penstock.engines``, or ``module:class``."""
    options: dict[str, Any] = {}


EngineConfig = Annotated[TorchEngineConfig | PluginEngineConfig, Field(discriminator="type")]


class SamplingConfig(Section):
    """How training trajectories are drawn."""

    n: int = Field(8, ge=1)
    """Trajectories of each prompt."""
    temperature: float = Field(1.0, ge=0)
    """0 is greedy."""
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0)
    """0 keeps all tokens."""
    max_new_tokens: int = Field(256, ge=1)
    stop: tuple[str, ...] = ()
    """Texts that end a trajectory."""

    def training(self) -> Sampling:
        """For training groups."""
        return Sampling(**self.model_dump())

    def greedy(self) -> Sampling:
        """For evaluation: one greedy answer."""
        return Sampling(n=1, temperature=0.0, max_new_tokens=self.max_new_tokens, stop=self.stop)


class RolloutConfig(Section):
    """The rollout processes."""

    count: int = Field(1, ge=1)
    engine: EngineConfig = TorchEngineConfig()
    sampling: SamplingConfig = SamplingConfig()
    threads: int = Field(1, ge=1)
    """Compute threads of each process."""
    groups_in_flight: int = Field(0, ge=0)
    """Groups that one rollout holds at most; 0: as many as fit the engine, and half as many again in its queue."""
