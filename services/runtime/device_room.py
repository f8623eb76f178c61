"""A device whose guest has just died: its lock is free at once, and its memory some moments later."""

from __future__ import annotations

import time
from collections.abc import Callable

import structlog

from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import inventory

log = structlog.get_logger()

SETTLES_S, STABLE_S, POLL_S = 30.0, 2.0, 0.1
"""So long less may be free than ever before, and so long without a change, which says that it stays so."""
SLACK_GIB, CHANGE_GIB = 1.0, 0.05


class DeviceRoom:
    """Of one ``device``, by the name that `device_turn.devices_here` gives it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._least: float | None = None
        """GiB: what was free at the begin of each turn so far, at least."""

    def wait(self, beat: Callable[[], None]) -> None:
        """Until about as much is free as at the begin of any turn, or nothing changes any more, since somebody has come
        to stay; ``beat`` is called meanwhile."""
        begun = changed = time.monotonic()
        free = self._free()
        if free is None:
            return
        wanted, last = (self._least or 0.0) - SLACK_GIB, free
        while free < wanted and time.monotonic() < min(begun + SETTLES_S, changed + STABLE_S):
            beat()
            time.sleep(POLL_S)
            free = self._free() or 0.0
            if abs(free - last) > CHANGE_GIB:
                changed, last = time.monotonic(), free
        if free < wanted:
            log.info("less of the device is free than before", free_gib=round(free, 1))
        self._least = free if self._least is None else min(self._least, free)

    def _free(self) -> float | None:
        """None where nobody says it."""
        if self._device.startswith("cpu"):
            return None
        try:
            return next((gpu.free_gib for gpu in inventory().gpus if gpu.uuid == self._device), None)
        except SetupError:  # the driver's bad moment
            return None
