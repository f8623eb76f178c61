"""How far a tiny model's warm start is: as the process that makes it says it, and as others read that."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.progress import Progress

from penstock.pipeline.report.console import OwnConsole

WARM_START = "warm start"
TELL_S = 1.0
"""Between two lines, where there is no terminal."""
READ = 4096
"""Bytes at the end of what was said."""


@contextmanager
def progress(total: int) -> Iterator[Callable[[int, int, float], None]]:
    """Gives what is told step, steps and loss after each step: a bar on a terminal, else a line now and then on
    stderr."""
    console = OwnConsole(stderr=True)
    if not console.is_terminal:
        yield _lines(console)
        return
    with Progress(console=console) as bar:
        task = bar.add_task(WARM_START, total=total)
        yield lambda step, _, loss: bar.update(task, completed=step, description=f"{WARM_START}, loss {loss:.3f}")


def _lines(console: OwnConsole) -> Callable[[int, int, float], None]:
    at = time.monotonic()

    def advance(step: int, steps: int, loss: float) -> None:
        nonlocal at
        if step == steps or time.monotonic() - at > TELL_S:
            at = time.monotonic()
            console.print(f"{WARM_START} {step}/{steps}, loss {loss:.3f}", highlight=False, soft_wrap=True)

    return advance


def how_far(said: Path, begin: int) -> str:
    """The last line behind the byte ``begin`` of the file ``said`` that says how far it is, e.g. ``warm start 40/150,
    loss 1.234``; empty: none yet."""
    try:
        with said.open("rb") as file:
            file.seek(max(begin, file.seek(0, 2) - READ))
            lines = file.read().decode(errors="replace").split("\n")[:-1]
    except OSError:
        return ""
    return next((line for line in reversed(lines) if line.startswith(WARM_START)), "")
