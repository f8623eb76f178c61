"""What a model says of sampled tokens, without ever holding all logits: shared by the trainer and the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from penstock.services.modeling.attention import Segments
from penstock.services.modeling.candidates import Candidates
from penstock.services.modeling.families import OUR_ATTENTION, PLAIN
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.parallel.sequence import SequenceParallel
from penstock.services.modeling.parallel.stages import Stage
from penstock.services.modeling.token_statistics import Statistic, token_statistics

LOGIT_BYTES = 256 << 20
"""Logits are made in chunks of at most this size."""


def logprobs(model: Any, rows: Rows, temperature: float) -> torch.Tensor:
    """Log-probability of every sampled token under ``model`` at ``temperature``: float32
    ``[trajectories, longest - 1]``, 0 where ``rows.mask`` is False. Differentiable."""
    return statistics(model, rows, temperature, ("log_prob",))[0]


def statistics(model: Any, rows: Rows, temperature: float, wanted: tuple[Statistic, ...]) -> torch.Tensor:
    """What is ``wanted`` of the distribution that each sampled token was chosen from, see `token_statistics`: float32
    ``[wanted, trajectories, longest - 1]``, 0 where ``rows.mask`` is False. Differentiable."""
    if getattr(model, model.base_model_prefix, None) is None:
        logits = model(**model_inputs(model, rows), use_cache=False).logits
        logits = logits.flatten(0, 1)[rows.source]
        table = None if rows.candidates is None else rows.candidates.table()
        flat = token_statistics(logits, rows.target, temperature, table, wanted)
    else:

        def compute(hidden: torch.Tensor, places: Places) -> torch.Tensor:
            return _chunked(model, hidden, places, temperature, wanted)

        flat = of_places(model, rows, compute, len(wanted))
    return torch.stack([rows.scatter(values.float()) for values in flat])


@dataclass(frozen=True)
class Places:
    """Where tokens are predicted, which they are, and what the sampler chose them from."""

    target: torch.Tensor
    candidates: Candidates | None


def of_places(
    model: Any, rows: Rows, compute: Callable[[torch.Tensor, Places], torch.Tensor], which: int
) -> torch.Tensor:
    """``[which, sampled tokens]``: what ``compute`` makes of the base model's hidden states ``[some, size]`` where they
    are predicted. Ranks that share a row's tokens compute some each, and all have the result of all. Of a stage that is
    not a pipeline's last: zeros."""
    base, inputs = getattr(model, model.base_model_prefix), model_inputs(model, rows)
    ulysses: SequenceParallel | None = getattr(model, "penstock_ulysses", None)
    stage: Stage | None = getattr(model, "penstock_stage", None)
    inputs = ulysses.part(inputs) if ulysses else inputs
    inputs = stage.take_up(inputs) if stage else inputs
    hidden = base(**inputs, use_cache=False).last_hidden_state
    if stage and not stage.last:
        return stage.hand_on(hidden, which, len(rows.target))
    hidden = hidden.flatten(0, 1)
    if ulysses is None:
        return compute(hidden[rows.source], Places(rows.target, rows.candidates))
    length = rows.tokens.shape[1]
    owners = ulysses.owners(rows.source, length)
    mine = owners[ulysses.rank]
    candidates = None if rows.candidates is None else rows.candidates.chosen(mine)
    found = compute(hidden[rows.source[mine] - ulysses.first(length)], Places(rows.target[mine], candidates))
    parts = ulysses.gather(found, [len(places) for places in owners])
    # Rows are in the ranks' order now: back to that of the tokens.
    return torch.cat(parts, -1)[:, torch.cat(owners).argsort()]


def model_inputs(model: Any, rows: Rows) -> dict[str, Any]:
    """What ``model`` is called with for ``rows``."""
    inputs: dict[str, Any] = {"input_ids": rows.tokens, "position_ids": rows.positions}
    if isinstance(rows.attention, Segments):
        assert model.config._attn_implementation == OUR_ATTENTION, "another attention would ignore the segments"
        inputs["segments"] = rows.attention
        # transformers hands a mask of four dimensions on as it is, and makes none of its own then.
        inputs["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=rows.tokens.device)
    else:
        inputs["attention_mask"] = rows.attention
    if rows.routing is not None:
        inputs["routing"] = torch.from_numpy(rows.routing).to(rows.tokens.device)
    return inputs


def shares_prompts(model: Any) -> bool:
    """Trajectories may share a prompt's row: the model is `PLAIN`, and no layer of it has a window."""
    config = model.config
    return config.model_type in PLAIN and "sliding_attention" not in (getattr(config, "layer_types", None) or ())


class _Known(BaseModelOutputWithPast):
    """What a base model gives: its hidden state, and None for whatever else a family's head reads of it."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):  # Python's own: that it is not there is an answer
            raise AttributeError(name)


class _Given(nn.Module):
    """In the place of a ``base`` model: its hidden state is known, and whatever else is read of it is its own."""

    def __init__(self, base: nn.Module, hidden: torch.Tensor) -> None:
        super().__init__()
        self._base, self._hidden = (base,), hidden  # in a tuple, it is no part of this one

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self._base[0], name)

    @property
    def decoder(self) -> _Given:
        """What OPT asks in the place of its base model."""
        return self

    def forward(self, *args: Any, **kwargs: Any) -> _Known:
        """``hidden``, whatever it is asked."""
        return _Known(last_hidden_state=self._hidden)


def _head(model: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Logits ``[tokens, vocabulary]`` of ``hidden`` ``[tokens, size]``, as the family makes them: with its soft cap or
    scale, which its own ``forward`` applies behind the base model."""
    if model.config.model_type in PLAIN:
        return model.get_output_embeddings()(hidden)
    prefix = model.base_model_prefix
    base = model._modules[prefix]
    model._modules[prefix] = _Given(base, hidden[None])
    try:
        return type(model).forward(model, input_ids=None, inputs_embeds=hidden[None]).logits[0]
    finally:
        model._modules[prefix] = base


def _chunked(
    model: Any, hidden: torch.Tensor, places: Places, temperature: float, wanted: tuple[Statistic, ...]
) -> torch.Tensor:
    vocabulary = model.config.get_text_config().vocab_size
    size = max(1, LOGIT_BYTES // (4 * vocabulary))

    def chunk(part: torch.Tensor, targets: torch.Tensor, candidates: Candidates | None) -> torch.Tensor:
        table = None if candidates is None else candidates.table()
        return token_statistics(_head(model, part), targets, temperature, table, wanted)

    if len(hidden) <= size:
        return chunk(hidden, places.target, places.candidates)
    targets = places.target.split(size)
    candidates = [None] * len(targets) if places.candidates is None else places.candidates.split(size)
    parts = zip(hidden.split(size), targets, candidates, strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts], -1)
