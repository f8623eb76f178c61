"""How this command starts itself again, as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path


def penstock(*arguments: str) -> list[str]:
    """The command line of ``penstock ARGUMENTS``, which is also what `ps` shows. ``-P`` keeps a folder of the user's
    that is called ``services``, say, from standing in for ours."""
    return [*_start(), *arguments]


def arguments_of(command: list[str]) -> list[str]:
    """ARGUMENTS of a command line that `penstock` made."""
    return command[len(_start()) :]


def _start() -> list[str]:
    script = Path(sys.executable).parent / "penstock"
    start = [str(script)] if script.is_file() else ["-m", "penstock.pipeline.cli"]
    return [sys.executable, "-P", *start]
