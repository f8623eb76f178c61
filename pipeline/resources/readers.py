"""What models take that read what the policy has said and do not learn: references, teachers, reward models. Counted
from their config.json alone; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from penstock.pipeline.config import Config
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.trainer_memory import FOUR_BIT_BYTES, LOGITS_GIB, OVERHEAD_GIB, coded_matrices
from penstock.protocols.versions import DTYPE_BYTES
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.runtime.gpus import GIB

BATCH, LONGEST = 8192, 8192
"""Of the built-in scorers, `tokens_per_batch` and `max_length` where nothing else is said."""


def readers_each(config: Config, ranks: int) -> tuple[int, float]:
    """References and scorers beside an engine on one GPU of a trainer of so many ``ranks`` (`run.placement`:
    colocated): how many at most, and GiB of theirs at most, as `placement.seated` deals them. What is of no known size
    counts as nothing."""
    sizes = [reference_gib(config) or 0.0] * (config.reference.count if config.with_reference else 0)
    for kind, scorer in config.scorers.items():
        sizes += [scorer_gib(config, kind) or 0.0] * (0 if scorer.own_gpus else scorer.count)
    dealt = [sizes[place::ranks] for place in range(ranks)]
    return max(map(len, dealt)), max(map(sum, dealt))


def reference_gib(config: Config) -> float | None:
    """GiB of a reference at its peak: weights, a layer's activations, a chunk of logits; None where the sizes of its
    model are not known here."""
    shape = shape_of(config, config.reference.path)
    if shape is None:
        return None
    coded = shape.layers * sum(matrix.numbers for matrix in coded_matrices(shape, config.reference_quantized))
    weights = (shape.served - coded) * shape.served_bytes + FOUR_BIT_BYTES * coded
    return _reading_gib(shape, weights, max(config.reference.tokens_per_batch, shape.longest))


def scorer_gib(config: Config, kind: str) -> float | None:
    """GiB of one process of the scorer ``kind`` with a GPU, of those that are built in; None where it has none, or the
    sizes of its model are not known here."""
    scorer = config.scorers[kind]
    path = scorer.options.get("path")
    shape = shape_of(config, str(path)) if scorer.gpus and scorer.built_in and path else None
    if shape is None:
        return None
    dtype = scorer.options.get("dtype")
    shape = replace(shape, dtype=dtype if dtype in DTYPE_BYTES else "bfloat16")
    tokens, longest = scorer.options.get("tokens_per_batch", BATCH), shape.longest
    weights: float = shape.served * shape.served_bytes
    if scorer.scorer == "reward_model":  # it has no head, sees nothing, and reads the end of what is longer
        weights, shape = (shape.served - shape.head * (not shape.tied)) * shape.served_bytes, replace(shape, sees=False)
        longest = min(longest, scorer.options.get("max_length", LONGEST))
    return _reading_gib(shape, weights, max(tokens, longest))


def _reading_gib(shape: Shape, weights: float, tokens: int) -> float:
    """Of so many bytes of ``weights``, in a forward pass over so many ``tokens``."""
    wide = 3 * (shape.beside if shape.experts else shape.intermediate)
    wide += shape.chosen * (2 * shape.hidden + 3 * shape.intermediate) if shape.experts else 0
    inner = shape.served_bytes * tokens * (8 * shape.hidden + wide) / GIB
    logits = 0.8 * LOGITS_GIB  # a chunk of 256 MiB, and what it is made of in the model's dtype
    return (weights + shape.seen_bytes) / GIB + max(inner, logits) + OVERHEAD_GIB


def shorter(config: Config) -> str:
    """What else makes a reference smaller whose largest pass is one row, to be added to what does."""
    shape = shape_of(config, config.reference.path)
    long = shape and shape.longest > config.reference.tokens_per_batch
    return ", or a shorter rollout.engine.max_length, since a row is never cut" if long else ""


def uncounted(config: Config) -> str:
    """Says who computes on GPUs beside trainer and rollouts and is not counted, with why; empty: nobody."""
    told = [
        f"{kind} ({f'no config.json of {path} here, of a decoder that is known' if path else 'a class of your own'})"
        for kind, path in _beside(config)
    ]
    return f"not counted: {', '.join(told)}" if told else ""


def _beside(config: Config) -> Iterator[tuple[str, str | None]]:
    """Those, with the path of each one's model; None: of no model that is known of."""
    policy = getattr(config.model, "path", None)
    learners = (("reference", config.reference, config.with_reference), ("critic", config.critic, config.with_critic))
    for kind, section, there in learners:
        if there and section.device != "cpu" and shape_of(config, section.path) is None:
            yield kind, section.path or policy
    for kind, scorer in config.scorers.items():
        if scorer.gpus and scorer_gib(config, kind) is None:
            path = scorer.options.get("path") if scorer.built_in else None
            yield f"scorers.{kind}", str(path) if path else None
