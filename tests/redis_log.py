"""Where a Redis of ours keeps what it was told."""

from __future__ import annotations

from pathlib import Path


def append_only_file(run: Path) -> Path:
    """Of the run in this folder, the file that is written to: one in all, or, from Redis 7 on, the last of several."""
    parts = sorted((run / "redis" / "appendonlydir").glob("*.incr.aof"), key=lambda path: int(path.name.split(".")[-3]))
    return parts[-1] if parts else run / "redis" / "appendonly.aof"
