"""Structured logs: one JSON object a line, with run and actor on every line."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import structlog

LEVELS = {name: getattr(logging, name.upper()) for name in ("debug", "info", "warning", "error")}


def configure(run: str, actor: str, file: Path | None, level: str = "info") -> None:
    """Sends this process's log to ``file`` (appended, a line at a time), or to stderr where there is none."""
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
    target = file.open("a", buffering=1) if file else sys.stderr
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
        logger_factory=structlog.WriteLoggerFactory(file=target),
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
