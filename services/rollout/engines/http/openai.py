"""Servers of the OpenAI completion protocol that return token ids and log-probabilities. Tested against vLLM's."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

from penstock.services.rollout.engines.base import Request, RequestError
from penstock.services.rollout.engines.http.engine import Answer, HttpEngine, Version, ended_by_stop
from penstock.services.rollout.http_options import OpenAIOptions


class OpenAIEngine(HttpEngine):
    """``rollout.engine: {type: plugin, name: openai, options: {url: ..., folder: ...}}``."""

    def __init__(self, options: dict[str, Any], model_path: str, dtype: str, stop_ids: set[int]) -> None:
        self._own = OpenAIOptions.read(options)
        self._model = self._own.model
        super().__init__(self._own, model_path, dtype, stop_ids)

    def submit(self, request: Request) -> None:
        """See `base.Engine.submit`. Only what the server reports as `Completion` promises it."""
        sampling, processed = request.sampling, self._own.processed
        if not processed and sampling.temperature not in (0.0, 1.0) and not request.unread:
            raise RequestError(
                f"temperature {sampling.temperature:g}: the server reports log-probabilities before it; have it report "
                "processed ones, and set options.processed"
            )
        if processed and sampling.truncated and not request.unread:
            raise RequestError(
                "top_p, top_k, min_p: the server reports log-probabilities after truncation (options.processed)"
            )
        super().submit(request)

    async def hello(self) -> None:
        """See `HttpEngine.hello`."""
        listed = [entry["id"] for entry in (await self.get("/v1/models")).json()["data"]]
        self._model = self._model or listed[0]
        if self._model not in listed:
            raise ValueError(f"the server has no model {self._model!r}; it has {', '.join(listed)}")

    async def ask(self, request: Request, seed: int) -> Answer:
        """See `HttpEngine.ask`."""
        sampling = request.sampling
        body = {
            "model": self._model, "prompt": request.tokens.tolist(), "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k or -1,
            "seed": seed, "stop": list(sampling.stop), "ignore_eos": True,
            "stop_token_ids": sorted({*self.stop_ids, *request.stop_ids}),
            # Or a server takes the model's own, from its generation_config.json, and reports what was before them.
            "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "min_p": sampling.min_p,
            "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True,
        }  # fmt: skip
        (choice,) = (await self.post("/v1/completions", body))["choices"]
        return Answer(_ids(choice), choice["logprobs"]["token_logprobs"], ended_by_stop(choice["finish_reason"]))

    async def load(self, version: Version, number: int) -> None:
        """See `HttpEngine.load`."""
        names = {"{folder}": str(version.folder.resolve()), "{version}": str(number)}
        *calls, last = self._own.load
        try:
            for call in calls:
                await self.post(call.path, _filled(call.body, names))
        except BaseException:  # what was sent may have stopped the server, which may be others' too
            with suppress(Exception):  # also TimeoutError, while it still loads: it has been told
                async with asyncio.timeout(self.options.deadline_s):
                    await self.post(last.path, _filled(last.body, names))
            raise
        await self.post(last.path, _filled(last.body, names))

    async def score_tokens(self, tokens: list[int]) -> list[float]:
        """See `HttpEngine.score_tokens`."""
        body = {
            "model": self._model, "prompt": tokens, "max_tokens": 1, "temperature": 0, "echo": True, "logprobs": 0,
            "return_tokens_as_token_ids": True,
        }  # fmt: skip
        (choice,) = (await self.post("/v1/completions", body))["choices"]
        return choice["logprobs"]["token_logprobs"][1 : len(tokens)]


def _ids(choice: dict[str, Any]) -> list[int]:
    """From ``token_ids``, or from tokens that are spelled ``token_id:17``."""
    if choice.get("token_ids") is not None:
        return choice["token_ids"]
    tokens = choice["logprobs"]["tokens"]
    if all(token.startswith("token_id:") for token in tokens):
        return [int(token.removeprefix("token_id:")) for token in tokens]
    raise ValueError("the server's answer has no token ids: text alone cannot be trained on")


def _filled(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _filled(item, names) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, names) for item in value]
    if isinstance(value, str):
        for name, text in names.items():
            value = value.replace(name, text)
    return value
