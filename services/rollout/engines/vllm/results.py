"""What vLLM says of a continuation, as ours."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.protocols.experience import Finish
from penstock.protocols.routing import routing_dtype, unrouted
from penstock.services.modeling.experts import experts_of, mixture_layers
from penstock.services.rollout.engines.base import Completion, EngineError


def as_recorded(routed: np.ndarray | None, tokens: int, model_config: Any) -> np.ndarray:
    """vLLM's ``[tokens, layers, experts of a token]``, which has all layers, and all ``tokens`` but the last, which
    was not run, as `Completion.routing`. Raises `EngineError` where it is of another number of tokens or layers."""
    layers = model_config.num_hidden_layers
    if routed is None or len(routed) not in (tokens - 1, tokens) or routed.shape[1] != layers:
        found = "nothing" if routed is None else routed.shape
        raise EngineError(
            f"rollout.sampling.routing_replay: vLLM says where tokens went as {found}, of {tokens} tokens and {layers} "
            "layers"
        )
    run = routed[: tokens - 1, mixture_layers(model_config)].astype(routing_dtype(experts_of(model_config)))
    return np.concatenate([run, unrouted(1, run)])


def completion_of(number: int, sample: int, output: Any, candidates: bool) -> Completion:
    """Continuation ``sample`` of request ``number``. Raises `EngineError` where vLLM has broken it off."""
    tokens = np.array(output.token_ids, np.int32)
    versions = np.full(len(tokens), -1, np.int32)
    for span in output.weight_versions or ():
        versions[span.start : span.end] = int(span.version)
    if output.finish_reason not in ("stop", "length"):  # an engine core that is told to end aborts what it has
        raise EngineError(f"vLLM ended a continuation by {output.finish_reason!r}")
    finish: Finish = output.finish_reason
    said = output.logprobs
    logprobs = np.array(said.logprobs, np.float32)
    if not candidates:
        return Completion(number, sample, tokens, logprobs[: len(tokens)], versions, finish)
    ids, starts = np.array(said.token_ids, np.int32), said.start_indices[: len(tokens)]
    # Each position: the sampled token, then the likeliest ones; those that were cut off have no finite value.
    spans = [slice(start, end) for start, end in zip(starts, said.end_indices[: len(tokens)], strict=True)]
    kept = [np.unique(ids[span][np.isfinite(logprobs[span])]) for span in spans]
    counts = np.array([len(k) for k in kept], np.int32)
    return Completion(number, sample, tokens, logprobs[starts], versions, finish, counts, np.concatenate(kept))
