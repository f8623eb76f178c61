"""SGLang's server, by its native API. Written against the documentation of SGLang 0.5; not yet run against a server."""

from __future__ import annotations

from typing import Any

from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.engines.http.engine import Answer, HttpEngine, Version, ended_by_stop
from penstock.services.rollout.http_options import HttpOptions


class SGLangEngine(HttpEngine):
    """``rollout.engine: {type: plugin, name: sglang, options: {url: ..., folder: ...}}``.

    Its log-probabilities are those of the tempered, untruncated distribution, unless SGLANG_RETURN_ORIGINAL_LOGPROB is
    set in its environment. Seeds count only with ``--enable-deterministic-inference``.
    """

    def __init__(self, options: dict[str, Any], model_path: str, dtype: str, stop_ids: set[int]) -> None:
        super().__init__(HttpOptions.read(options), model_path, dtype, stop_ids)

    async def hello(self) -> None:
        """See `HttpEngine.hello`."""
        await self.get("/health")

    async def ask(self, request: Request, seed: int) -> Answer:
        """See `HttpEngine.ask`."""
        sampling = request.sampling
        parameters = {
            "max_new_tokens": sampling.max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p,
            "top_k": sampling.top_k or -1, "min_p": sampling.min_p, "stop": list(sampling.stop),
            # ignore_eos would have it go on behind these, too; the model's own ends are among them.
            "stop_token_ids": sorted({*self.stop_ids, *request.stop_ids}), "ignore_eos": False,
            "skip_special_tokens": False, "sampling_seed": seed & (2**31 - 1),
        }  # fmt: skip
        body = {"input_ids": request.tokens.tolist(), "sampling_params": parameters, "return_logprob": True}
        said = (await self.post("/generate", body))["meta_info"]
        rows = said["output_token_logprobs"]
        return Answer([row[1] for row in rows], [row[0] for row in rows], ended_by_stop(said["finish_reason"]["type"]))

    async def load(self, version: Version, number: int) -> None:
        """See `HttpEngine.load`."""
        body = {"model_path": str(version.folder.resolve()), "weight_version": str(number), "flush_cache": True}
        said = await self.post("/update_weights_from_disk", body)
        if not said.get("success"):
            raise ValueError(f"the server did not load version {number}: {said.get('message')}")

    async def score_tokens(self, tokens: list[int]) -> list[float]:
        """See `HttpEngine.score_tokens`."""
        body = {
            "input_ids": tokens, "sampling_params": {"max_new_tokens": 1, "temperature": 0.0}, "return_logprob": True,
            "logprob_start_len": 0,
        }  # fmt: skip
        rows = (await self.post("/generate", body))["meta_info"]["input_token_logprobs"]
        return [row[0] for row in rows[1:]]
