"""Structured logs: one JSON object a line, with run and actor on every line."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from pathlib import Path
from typing import Any, TextIO, cast

import structlog

LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


class _Log:
    """Writes lines to a file and, ``aloud``, to stderr. A full disk costs lines, never the actor."""

    def __init__(self, file: TextIO, aloud: bool) -> None:
        self._targets = [file, sys.stderr] if aloud else [file]
        self._lost = 0

    def write(self, text: str) -> None:
        for target in self._targets:
            try:
                if self._lost and target is self._targets[0]:
                    gap = {
                        "event": "here lines of this log may be lacking: it could not be written",
                        "lines": self._lost,
                    }
                    target.write(json.dumps(gap) + "\n")
                    self._lost = 0
                target.write(text)
            except OSError:
                self._lost += target is self._targets[0]

    def flush(self) -> None:
        for target in self._targets:
            with contextlib.suppress(OSError):
                target.flush()


def configure(run: str, actor: str, file: Path, level: str = "info", aloud: bool = False) -> None:
    """Sends this process's log to ``file`` (appended, a line at a time), and, ``aloud``, to stderr too."""
    file.parent.mkdir(parents=True, exist_ok=True)
    target = file.open("a", buffering=1)
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso"),
            structlog.processors.StackInfoRenderer(),
            structlog.processors.format_exc_info,
            structlog.processors.JSONRenderer(default=_plain),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=cast(TextIO, _Log(target, aloud))),
        cache_logger_on_first_use=False,
    )
    # The context is global here, not per thread: an actor's helper threads log as the actor.
    structlog.configure(processors=[_constant(run=run, actor=actor), *structlog.get_config()["processors"]])


def _constant(**fields: str) -> Any:
    def add(_logger: Any, _method: str, event: dict[str, Any]) -> dict[str, Any]:
        return {**fields, **event}

    return add


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else str(value)


def silence() -> None:
    """Nothing is logged, until `configure`: what is wrong is raised, or said otherwise."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))


def quiet() -> None:
    """For commands that speak for themselves: only warnings, of vLLM only errors, unless the user wants to see more."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
