"""Dying at a chosen point, to prove that it does no harm: ``PENSTOCK_KILL_AT="trained:3,committed:7"``.

Points of the trainer: taken, trained, committed, published, each of a step; publishing (a bucket is out), of a version.
Points of a rollout, each of a version: receiver-proposed, receiver-received, receiver-verified, receiver-swapped,
receiver-acknowledged. The first rollout that comes by dies.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

VARIABLE = "PENSTOCK_KILL_AT"


def reach(point: str, number: int) -> None:
    """Kills this process with SIGKILL where the environment asks for it, once for each point: a file beside the
    variable ``PENSTOCK_KILL_LOG`` remembers those that were reached."""
    asked = os.environ.get(VARIABLE)
    if not asked or f"{point}:{number}" not in asked.split(","):
        return
    done = Path(os.environ["PENSTOCK_KILL_LOG"])
    reached = done.read_text().split() if done.exists() else []
    if f"{point}:{number}" in reached:
        return
    with done.open("a") as file:
        file.write(f"{point}:{number}\n")
    os.kill(os.getpid(), signal.SIGKILL)
