"""Answers of a certain form: what a request asks for, and whether an answer has it.

Nothing is forced. A policy that is held to a form would be trained on tokens that it did not choose, with probabilities
that are not its own: it is to learn the form, from the reward. So an answer comes as it was drawn, and says whether it
fits.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import jsonschema_rs

from penstock.services.gateway.errors import AgentError

Fits = Callable[[str], bool]


def wanted_form(key: str, wanted: Mapping[str, Any] | None) -> Fits | None:
    """Whether an answer has the form that is ``wanted`` under the request's ``key``; None where any will do. Raises
    `AgentError` where no form is meant, or a schema is none."""
    kind = (wanted or {}).get("type", "text")
    if kind == "text" or wanted is None:
        return None
    if kind == "json_object":
        return _fits({"type": "object"})
    if kind != "json_schema":
        raise AgentError(400, "unsupported", f"{key}.type: {kind!r}; text, json_object and json_schema are known")
    about = wanted.get("json_schema", wanted)  # chat completions wrap it once more than responses
    schema = about.get("schema") if isinstance(about, Mapping) else None
    if not isinstance(schema, Mapping):
        raise AgentError(400, "invalid_schema", f"{key}: it has no schema")
    try:
        return _fits(schema)
    except (ValueError, TypeError, RecursionError) as error:
        words = str(error).strip().splitlines()
        raise AgentError(400, "invalid_schema", f"{key}: not a JSON schema: {words[0] if words else error}") from None


def _fits(schema: Mapping[str, Any]) -> Fits:
    # A pattern is searched in linear time, and nothing is looked up elsewhere: schemas are strangers' too.
    validator = jsonschema_rs.validator_for(
        dict(schema), retriever=_nowhere, pattern_options=jsonschema_rs.RegexOptions()
    )

    def fits(text: str) -> bool:
        try:
            return bool(validator.is_valid(json.loads(text)))
        except (ValueError, RecursionError):
            return False

    return fits


def _nowhere(uri: str) -> Any:
    raise ValueError(f"{uri} is not looked up; write it out")
