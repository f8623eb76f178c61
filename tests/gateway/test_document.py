"""The OpenAPI document that is served is true: whatever fits it, or does not, is answered as it says."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
    unsupported_method,
)

from tests.gateway.house import CALLS, House
from tests.gateway.test_doors import opened, owners, served

CHECKS: list[CheckFunction] = [
    status_code_conformance, content_type_conformance, response_schema_conformance, negative_data_rejection,
    unsupported_method,
]  # fmt: skip
ENDING = "finish", "abandon"
"""After these a session is known no more."""
KEY = "right"


def statuses(operation: Any, session: str) -> Counter[int]:
    """Of answers to generated requests, half of them in a ``session`` that there is."""
    found: Counter[int] = Counter()

    @settings(
        max_examples=25, deadline=None, database=None, derandomize=True, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(case=operation.as_strategy())
    def check(case: Any) -> None:
        if "session" in case.path_parameters and found.total() % 2:
            case.path_parameters["session"] = session
        if operation.label == "POST /v1/sessions" and isinstance(case.body, dict):
            case.body.setdefault("wait_s", 0)
            if isinstance(case.body["wait_s"], int | float):
                case.body["wait_s"] = min(case.body["wait_s"], 0)  # nobody waits for a task
        shown = f"{KEY}:{session}" if found.total() % 2 else KEY
        answer = case.call_and_validate(headers={"x-api-key": shown}, checks=CHECKS, timeout=30)
        found[answer.status_code] += 1

    check()
    return found


def test_the_served_document_is_true(tokenizers: dict[bool, Path], model: Any, tmp_path: Path) -> None:
    house = House(tokenizers[True], model, tool_calls=CALLS, attempts=1000, max_turns=4096)
    house.desk.start(house.lease(0, n=8, new=2))
    house.desk._settled_at = 0.0  # nobody is waited for

    def play(url: str, session: str) -> dict[str, Counter[int]]:
        schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json").json())
        schema.config.base_url = url
        operations = [result.ok() for result in schema.get_all_operations()]
        operations.sort(key=lambda operation: operation.path.endswith(ENDING))
        return {operation.label: statuses(operation, session) for operation in operations}

    async def agent(url: str) -> dict[str, Counter[int]]:
        async with httpx.AsyncClient(timeout=60, headers={"x-api-key": KEY}) as http:
            session = await opened(url, http)
        return await asyncio.to_thread(play, url, session["session"])

    found = served(house, agent, owners(tmp_path, KEY))
    assert len(found) == 20
    for label, codes in found.items():
        assert not codes[500], (label, codes)
    answered = [label for label, codes in found.items() if codes[200]]
    chats = {"POST /s/{session}/v1/chat/completions", "POST /v1/chat/completions"}
    assert {*chats, "POST /s/{session}/v1/generate"} <= set(answered), found
