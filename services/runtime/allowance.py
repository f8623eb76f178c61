"""What this process may use of its machine, cores and memory: a container or a cluster's job may have less of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

CGROUPS, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def cores() -> int:
    """Those that it may run on, no more than its control groups (cgroups) give it the time of; at least 1."""
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    shares = [_quota(folder) for folder in _groups("cpu")]
    return max(1, min([own, *(math.ceil(share) for share in shares if share)]))


def spare_cores(config: Any, processes: int, most: int) -> int:
    """The machine's cores less the threads of the actors of a run of this ``config``, shared by ``processes`` that run
    a user's code; at least 1, and no more than ``most``."""
    used = config.trainer.ranks * config.trainer.threads + config.rollout.count * config.rollout.threads
    used += config.with_critic * config.critic.ranks * config.critic.threads
    return min(most, max(1, (cores() - used) // processes))


def memory() -> tuple[int, int]:
    """Bytes: all that there is, and what is free of it; of its control groups' where that is less."""
    machine = psutil.virtual_memory()
    total, free = machine.total, machine.available
    for folder in _groups("memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if not limit or limit >= machine.total:
            continue
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        # What is kept of files is given up when it is needed.
        total, free = min(total, limit), min(free, max(0, limit - used + _kept_of_files(folder)))
    return total, free


def _groups(controller: str) -> Iterator[Path]:
    """The folders of this process's group and those above it, by version 2 and version 1; what is not there reads as no
    limit."""
    try:
        lines = OWN.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        number, names, path = line.split(":", 2)
        if number != "0" and controller not in names.split(","):
            continue
        top = CGROUPS if number == "0" else CGROUPS / controller
        inner = top / path.lstrip("/")
        yield from (folder for folder in (inner, *inner.parents) if folder == top or top in folder.parents)


def _quota(folder: Path) -> float | None:
    """Cores that the group has the time of; None: any number."""
    try:
        quota, _, period = (folder / "cpu.max").read_text().strip().partition(" ")
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and quota_us > 0 and period_us else None


def _kept_of_files(folder: Path) -> int:
    try:
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(rows.get("inactive_file", rows.get("total_inactive_file", 0)))
    except (OSError, ValueError):
        return 0


def _number(file: Path) -> int | None:
    """None where there is none, or it is "max"."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None
