"""What is said while a run's tiny model is made: how far its warm start is."""

from __future__ import annotations

import time
from collections.abc import Callable

from rich.console import Console

from penstock.pipeline.models.progress import how_far
from penstock.pipeline.run.supervisor import Child

EVERY_S = 5.0
"""Between two lines, where there is no terminal."""
LOOK_S = 0.1


def watch(console: Console, child: Child, words: str, interrupted: Callable[[], None]) -> None:
    """Until ``child``, which makes the model, has ended. ``words`` say what is done; ``interrupted`` raises where
    nobody wants it any more."""
    if not console.is_terminal:  # where a status shows nothing
        console.print(words, highlight=False)
    told, at = "", time.monotonic()
    with console.status(words) as status:
        while child.alive:
            interrupted()
            time.sleep(LOOK_S)
            far = how_far(child.stderr, child.said_before)
            if console.is_terminal and far:
                status.update(f"{words} {far}")
            elif far != told and time.monotonic() - at > EVERY_S:
                told, at = far, time.monotonic()
                console.print(far, highlight=False)
