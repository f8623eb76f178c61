"""Dying at a chosen point, to prove that it does no harm: ``PENSTOCK_KILL_AT="trained:3,committed:7"``.

A point is due at the number asked for, or at the first after it: who is behind leaves versions out.
Points of the trainer: taken, trained, committed, published, each of a step; publishing (a bucket is out), of a version.
Points of the critic, each of a step: critic-taken, critic-valued (its values are durable), critic-trained (nobody has
heard of it).
Points of the broker, each of a step: commit-applied (its commit will be durable with this turn), commit-durable (it is,
and nobody has heard of it).
Points of a rollout, or of a worker of its engine, each of a version: receiver-proposed, receiver-bucket,
receiver-received, receiver-verified, receiver-swapped, receiver-acknowledged. The first one that comes by dies.
receiver-flipped kills nobody: a bit of a bucket that has arrived is turned.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

VARIABLE = "PENSTOCK_KILL_AT"


def reach(point: str, number: int) -> None:
    """Kills this process with SIGKILL where `due`."""
    if due(point, number):
        os.kill(os.getpid(), signal.SIGKILL)


def due(point: str, number: int) -> bool:
    """Whether the environment asks for ``point`` now: once each, since the file that the variable ``PENSTOCK_KILL_LOG``
    names remembers those that were reached."""
    asked = [entry for entry in os.environ.get(VARIABLE, "").split(",") if entry.startswith(f"{point}:")]
    if not asked:
        return False
    done = Path(os.environ["PENSTOCK_KILL_LOG"])
    reached = done.read_text().split() if done.exists() else []
    for entry in asked:
        if entry not in reached and number >= int(entry.partition(":")[2]):
            with done.open("a") as file:
                file.write(f"{entry}\n")
            return True
    return False
