"""A device whose guest has just died: its lock is free at once, and its memory some moments later."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from penstock.services.runtime.gpus import inventory

log = structlog.get_logger()

SETTLES_S, POLL_S = 30.0, 0.1
SLACK_GIB = 1.0
"""What others may have more than the last time, and nobody waits."""


class DeviceRoom:
    """Of one ``device``, by the name that `device_turn.devices_here` gives it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._before: float | None = None
        """GiB that were free when its turn began the last time."""

    def wait(self, beat: Callable[[], None]) -> None:
        """Until about as much is free as the last time, or as is free after `SETTLES_S`; ``beat`` is called
        meanwhile."""
        until, free = time.monotonic() + SETTLES_S, self._free()
        while free is not None and free < (self._before or 0.0) - SLACK_GIB and time.monotonic() < until:
            beat()
            time.sleep(POLL_S)
            free = self._free()
        if free is not None and free < (self._before or 0.0) - SLACK_GIB:
            log.warning("less of the device is free than the last time", free_gib=free, before_gib=self._before)
        self._before = free

    def _free(self) -> float | None:
        if self._device.startswith("cpu"):
            return None
        return next((gpu.free_gib for gpu in inventory().gpus if gpu.uuid == self._device), None)
