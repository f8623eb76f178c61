"""JSON schemas of strangers, in a process of its own: one of two kilobytes can take hours to be looked at."""

from __future__ import annotations

import json
from typing import Any

import jsonschema_rs


class SchemaCheck:
    """A `user_processes.child.Handler`: whether texts fit a schema."""

    is_async = False
    asks = ["schema", "texts"]

    def __init__(self, program: dict[str, Any]) -> None:
        self.timeout_s: float = program["timeout_s"]

    def start(self, arguments: dict[str, Any]) -> dict[str, Any]:
        """``{"fits": [true, …]}`` of each text; or ``{"wrong": …}``, why ``schema``, as JSON, is none."""
        try:
            # A pattern is searched in linear time, and nothing is looked up elsewhere.
            validator = jsonschema_rs.validator_for(
                json.loads(arguments["schema"]), retriever=_nowhere, pattern_options=jsonschema_rs.RegexOptions()
            )
        except (ValueError, TypeError, RecursionError) as error:
            words = str(error).strip().splitlines()
            return {"wrong": words[0] if words else type(error).__name__}
        return {"fits": [_fits(validator, text) for text in arguments["texts"]]}

    def answer(self, value: dict[str, Any]) -> dict[str, Any]:
        """See `child.Handler`."""
        return {"value": value}


def _fits(validator: Any, text: str) -> bool:
    try:
        return bool(validator.is_valid(json.loads(text)))
    except (ValueError, RecursionError):
        return False


def _nowhere(uri: str) -> Any:
    raise ValueError(f"{uri} is not looked up; write it out")
