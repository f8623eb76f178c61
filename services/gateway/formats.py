"""Answers of a certain form: what a request asks for, and whether an answer has it.

Nothing is forced. A policy that is held to a form would be trained on tokens that it did not choose, with probabilities
that are not its own: it is to learn the form, from the reward. So an answer comes as it was drawn, and says whether it
fits.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import structlog

from penstock.services.gateway.errors import AgentError
from penstock.services.runtime.errors import SetupError
from penstock.services.user_processes.pool import WorkerPool
from penstock.services.user_processes.worker import Call, Program

log = structlog.get_logger()

LOOK_S = 2.0
"""That a schema, or an answer by it, is looked at."""
WAIT_S = 20.0
"""That others' may take before."""
MOST_BYTES = 64 << 10
"""Of a schema, as JSON."""
BUSY_S = 5.0
"""Before who could not be looked after asks again."""
REMEMBERED = 4096
"""Schemas that need no second look."""
AHEAD = 8
"""Looks that the process has at once."""

Wanted = tuple[str, Mapping[str, Any] | None]
"""The request's key, and what it says there."""


class Form:
    """One that an answer is to have. ``fits``: whether each of the answers that were judged has it; None: that took too
    long to find out."""

    def __init__(self, forms: Forms, schema: str) -> None:
        self._forms, self._schema = forms, schema
        self.fits: list[bool | None] = []

    async def judge(self, texts: Sequence[str]) -> None:
        """Notes which of these have it."""
        try:
            self.fits = (await self._forms.look(self._schema, texts))["fits"]
        except Exception as error:  # the answer is there; what it is worth is another matter
            log.warning("whether an answer fits its form is not known", error=str(error))
            self.fits = [None] * len(texts)


class Forms:
    """Looks at them in a process of its own, with a deadline: a schema that takes too long costs whoever has sent
    it."""

    def __init__(self) -> None:
        self._pool: asyncio.Future[WorkerPool] | None = None
        self._sound: OrderedDict[bytes, None] = OrderedDict()
        """Digests of schemas that are some, the last that was asked for last."""

    async def read(self, wanted: Wanted) -> Form | None:
        """The form that is wanted; None where any will do. Raises `AgentError` where no form is meant, or a schema is
        none."""
        key, said = wanted
        kind = (said or {}).get("type", "text")
        if kind == "text" or said is None:
            return None
        if kind == "json_object":
            return Form(self, '{"type": "object"}')
        if kind != "json_schema":
            raise AgentError(400, "unsupported", f"{key}.type: {kind!r}; text, json_object and json_schema are known")
        about = said.get("json_schema", said)  # chat completions wrap it once more than responses
        schema = about.get("schema") if isinstance(about, Mapping) else None
        if not isinstance(schema, Mapping):
            raise AgentError(400, "invalid_schema", f"{key}: it has no schema")
        text = json.dumps(schema)
        if len(text) > MOST_BYTES:
            raise AgentError(400, "invalid_schema", f"{key}: a schema has at most {MOST_BYTES:,} bytes")
        await self._check(key, text)
        return Form(self, text)

    async def _check(self, key: str, schema: str) -> None:
        """Raises `AgentError` where it is none."""
        digest = hashlib.sha256(schema.encode()).digest()
        if digest in self._sound:
            self._sound.move_to_end(digest)
            return
        try:
            found = await self.look(schema, ())
        except (SetupError, OSError) as error:  # others' take too long, or nobody can look: no fault of its own
            log.warning("a schema could not be looked at", error=str(error))
            raise AgentError(
                503, "busy", f"{key}: the schema is not looked at yet: {error}; ask again", BUSY_S
            ) from None
        except Exception as error:
            raise AgentError(400, "invalid_schema", f"{key}: the schema cannot be looked at: it {error}") from None
        if "wrong" in found:
            raise AgentError(400, "invalid_schema", f"{key}: not a JSON schema: {found['wrong']}")
        self._sound[digest] = None
        if len(self._sound) > REMEMBERED:
            self._sound.popitem(last=False)

    async def look(self, schema: str, texts: Sequence[str]) -> dict[str, Any]:
        """See `schema_check.SchemaCheck.start`. Raises what its process, or the time that it takes, does."""
        if self._pool is None:
            program = Program("penstock.services.gateway.schema_check:SchemaCheck", "", "response_format", LOOK_S, {})
            self._pool = asyncio.ensure_future(asyncio.to_thread(WorkerPool, program, 1, AHEAD))
        try:
            pool = await asyncio.shield(self._pool)
        except (SetupError, OSError):
            self._pool = None  # what was lacking may be there the next time
            raise
        future = pool.submit(Call({"schema": schema, "texts": list(texts)}))
        try:
            return await asyncio.wait_for(asyncio.wrap_future(future), WAIT_S)
        except TimeoutError:
            raise TimeoutError("others take long") from None

    def close(self) -> None:
        """Ends the process, if there is one."""
        if self._pool and self._pool.done() and not self._pool.exception():
            self._pool.result().close()
