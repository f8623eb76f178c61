"""How long scorers take for a column, over the groups of a step."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Latency:
    """Seconds by column, since `read` was called last."""

    _seen: dict[str, list[float]] = field(default_factory=dict)

    def add(self, column: str, seconds: float) -> None:
        """One group's column took so long, from when its scorer had the work to its answer."""
        self._seen.setdefault(column, []).append(seconds)

    def read(self) -> dict[str, float]:
        """``latency/COLUMN``, the mean, and ``latency_max/COLUMN``; then begins anew."""
        found = {f"latency/{column}": sum(seen) / len(seen) for column, seen in self._seen.items()}
        found |= {f"latency_max/{column}": max(seen) for column, seen in self._seen.items()}
        self._seen.clear()
        return found
