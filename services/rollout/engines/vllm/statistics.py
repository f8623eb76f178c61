"""What vLLM says of itself, step by step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Load:
    """What vLLM's scheduler says of itself, over all of its engine cores."""

    running: dict[int, int] = field(default_factory=dict)
    waiting: dict[int, int] = field(default_factory=dict)
    kv_usage: dict[int, float] = field(default_factory=dict)
    generated: int = 0
    preempted: int = 0

    def record(self, core: int, scheduler: Any, iteration: Any) -> None:
        """Takes a step's statistics."""
        if scheduler is not None:
            self.running[core] = scheduler.num_running_reqs
            self.waiting[core] = scheduler.num_waiting_reqs
            self.kv_usage[core] = scheduler.kv_cache_usage
        if iteration is not None:
            self.generated += iteration.num_generation_tokens
            self.preempted += iteration.num_preempted_reqs
