"""What models take that read what the policy has said and do not learn: references, teachers, reward models. Counted
from their config.json alone; imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from penstock.pipeline.config import Config
from penstock.pipeline.resources.model_shape import shape_of
from penstock.pipeline.resources.trainer_memory import FOUR_BIT_BYTES, LOGITS_GIB, OVERHEAD_GIB, coded_matrices
from penstock.protocols.versions import DTYPE_BYTES
from penstock.services.modeling.decoder_shape import Shape
from penstock.services.runtime.gpu_kinds import MACHINE
from penstock.services.runtime.gpus import GIB

BATCH, LONGEST = 8192, 8192
"""Of the built-in scorers, `tokens_per_batch` and `max_length` where nothing else is said."""


NO_CONFIG = "no config.json of {} here, of a decoder that is known"


def readers_each(config: Config, ranks: int) -> tuple[int, float]:
    """References, scorers and programs beside an engine on one GPU of a trainer of so many ``ranks`` (`run.placement`:
    colocated): how many at most, and GiB of theirs at most, as `placement.seated` and `beds` deal them. What is of no
    known size counts as nothing."""
    seats = config.reference.count * config.reference.gpus if config.with_reference else 0
    sizes = [reference_gib(config) or 0.0] * seats
    for kind, scorer in config.scorers.items():
        sizes += [scorer_gib(config, kind) or 0.0] * (0 if scorer.own_gpus else scorer.count * scorer.gpus)
    for program in config.sleepers.values():
        sizes += [program.gpu_gib or 0.0] * program.gpus
    dealt = [sizes[place::ranks] for place in range(ranks)]
    return max(map(len, dealt)), max(map(sum, dealt))


def reference_gib(config: Config) -> float | None:
    """GiB of a reference at its peak, on each of its GPUs: weights, a layer's activations, a chunk of logits; None
    where the sizes of its model are not known here."""
    shape = shape_of(config, config.reference.path)
    if shape is None:
        return None
    coded = shape.layers * sum(matrix.numbers for matrix in coded_matrices(shape, config.reference_quantized))
    weights = (shape.served - coded) * shape.served_bytes + FOUR_BIT_BYTES * coded
    tokens = max(config.reference.tokens_per_batch, shape.longest)
    return _reading_gib(shape, weights, tokens, config.reference.gpus)


def scorer_gib(config: Config, kind: str) -> float | None:
    """GiB of one process of the scorer ``kind`` with GPUs, of those that are built in, on each of them; None where it
    has none, or the sizes of its model are not known here."""
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
    return _reading_gib(shape, weights, max(tokens, longest), scorer.gpus)


def _reading_gib(shape: Shape, weights: float, tokens: int, gpus: int) -> float:
    """Of so many bytes of ``weights``, dealt out over ``gpus``, in a forward pass over so many ``tokens``: the GPU that
    has most has up to a layer more than its share, and a head that is the embedding too is there twice."""
    if gpus > 1:
        weights += shape.head * shape.tied * shape.served_bytes
        weights = weights / gpus + weights / shape.layers
    wide = 3 * (shape.beside if shape.experts else shape.intermediate)
    wide += shape.chosen * (2 * shape.hidden + 3 * shape.intermediate) if shape.experts else 0
    inner = shape.served_bytes * tokens * (8 * shape.hidden + wide) / GIB
    logits = 0.8 * LOGITS_GIB  # a chunk of 256 MiB, and what it is made of in the model's dtype
    return (weights + shape.seen_bytes) / GIB + max(inner, logits) + OVERHEAD_GIB


def on_each(gpus: int) -> str:
    """Behind GiB that are of each of them, for people."""
    return f" on each of {gpus} GPUs" if gpus > 1 else ""


def enough_gpus(config: Config, kind: str, room: float) -> int | None:
    """Over how many GPUs of ``room`` GiB the layers of a reference's or scorer's model can be dealt; None: not over as
    many as a machine has."""
    section: Any = config.reference if kind == "reference" else config.scorers[kind]
    for gpus in (2, 4, MACHINE):
        more = section.model_copy(update={"gpus": gpus})
        changed = {"reference": more} if kind == "reference" else {"scorers": config.scorers | {kind: more}}
        there = config.model_copy(update=changed)
        need = reference_gib(there) if kind == "reference" else scorer_gib(there, kind)
        if gpus > section.gpus and need and need <= room:
            return gpus
    return None


def shorter(config: Config) -> str:
    """What else makes a reference smaller whose largest pass is one row, to be added to what does."""
    shape = shape_of(config, config.reference.path)
    long = shape and shape.longest > config.reference.tokens_per_batch
    return ", or a shorter rollout.engine.max_length, since a row is never cut" if long else ""


def uncounted(config: Config) -> str:
    """Says who computes on GPUs beside trainer and rollouts and is not counted, with why; empty: nobody."""
    told = [f"{kind} ({why})" for kind, why in _beside(config)]
    return f"not counted: {', '.join(told)}" if told else ""


def _beside(config: Config) -> Iterator[tuple[str, str]]:
    """Those, with why."""
    policy = getattr(config.model, "path", None)
    learners = (("reference", config.reference, config.with_reference), ("critic", config.critic, config.with_critic))
    for kind, section, there in learners:
        if there and section.device != "cpu" and shape_of(config, section.path) is None:
            yield kind, NO_CONFIG.format(section.path or policy)
    for kind, scorer in config.scorers.items():
        if scorer.gpus and scorer_gib(config, kind) is None:
            path = scorer.options.get("path") if scorer.built_in else None
            yield f"scorers.{kind}", NO_CONFIG.format(path) if path else "a class of your own"
    for name, program in config.sleepers.items():
        if program.gpus and program.gpu_gib is None:
            yield f"programs.{name}", f"programs.{name}.gpu_gib would say"
