"""What a model says of sampled tokens, without ever holding all logits: shared by the trainer and the reference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_outputs import BaseModelOutputWithPast

from penstock.protocols.experience import Trajectory
from penstock.services.modeling.attention import Segments
from penstock.services.modeling.candidates import Candidates
from penstock.services.modeling.families import (
    BOTH_WAYS,
    OUR_ATTENTION,
    PACKED,
    PLAIN,
    is_recurrent,
    soft_cap,
    window_of,
)
from penstock.services.modeling.load import has_own_code
from penstock.services.modeling.packing import Layout, Rows, Shown
from penstock.services.modeling.parallel.sequence import SequenceParallel
from penstock.services.modeling.parallel.stages import Stage
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.sight import Sight, sight_of
from penstock.services.modeling.taught import Taught
from penstock.services.modeling.token_statistics import Statistic, token_statistics
from penstock.services.runtime.errors import SetupError

LOGIT_BYTES = 256 << 20
"""Logits are made in chunks of at most this size."""


def logprobs(model: Any, rows: Rows, temperature: float) -> torch.Tensor:
    """Log-probability of every sampled token under ``model`` at ``temperature``: float32
    ``[trajectories, longest - 1]``, 0 where ``rows.mask`` is False. Differentiable."""
    return statistics(model, rows, temperature, ("log_prob",))[0]


def statistics(model: Any, rows: Rows, temperature: float, wanted: tuple[Statistic, ...]) -> torch.Tensor:
    """What is ``wanted`` of the distribution that each sampled token was chosen from, see `token_statistics`: float32
    ``[wanted, trajectories, longest - 1]``, 0 where ``rows.mask`` is False. Differentiable."""

    def compute(logits: torch.Tensor, places: Places) -> torch.Tensor:
        return token_statistics(logits, places.target, temperature, places.table(), wanted, places.taught)

    return torch.stack([rows.scatter(values.float()) for values in of_logits(model, rows, compute, len(wanted))])


@dataclass(frozen=True)
class Places:
    """Where tokens are predicted, which they are, what the sampler chose them from, and what teachers say of them."""

    target: torch.Tensor
    candidates: Candidates | None = None
    taught: Taught | None = None

    def table(self) -> torch.Tensor | None:
        """Of what they were chosen from, where that was recorded: see `Candidates.table`."""
        return None if self.candidates is None else self.candidates.table()

    def chosen(self, numbers: np.ndarray) -> Places:
        """Those of the tokens with these ``numbers``, int64, in that order."""
        candidates = None if self.candidates is None else self.candidates.chosen(numbers)
        tokens = to_device(torch.from_numpy(numbers), self.target.device)
        return Places(self.target[tokens], candidates, None if self.taught is None else self.taught.chosen(tokens))

    def split(self, size: int) -> list[Places]:
        """Those of ``size`` tokens each, in order; the last have what is left."""
        targets = self.target.split(size)
        others: list[Sequence[Any]] = [
            [None] * len(targets) if each is None else each.split(size) for each in (self.candidates, self.taught)
        ]
        return [Places(*parts) for parts in zip(targets, *others, strict=True)]


Compute = Callable[[torch.Tensor, Places], torch.Tensor]
"""Something of each of some tokens, ``[which, some]``, from numbers ``[some, …]`` where they are predicted."""


def of_logits(model: Any, rows: Rows, compute: Compute, which: int) -> torch.Tensor:
    """``[which, sampled tokens]``: what ``compute`` makes of the logits ``[some, vocabulary]`` where they are
    predicted, a chunk at a time; as `of_places`."""
    if has_own_code(model.config) or getattr(model, model.base_model_prefix, None) is None:
        # Not by a call, around which FSDP would gather what it has gathered for us.
        logits = type(model).forward(model, **model_inputs(model, rows), use_cache=False).logits.flatten(0, 1)
        return compute(logits[rows.source], Places(rows.target, rows.candidates, rows.taught))
    return of_places(model, rows, lambda hidden, places: _chunked(model, hidden, places, compute), which)


def of_places(model: Any, rows: Rows, compute: Compute, which: int) -> torch.Tensor:
    """``[which, sampled tokens]``: what ``compute`` makes of the base model's hidden states ``[some, size]`` where they
    are predicted. Ranks that share a row's tokens compute some each, and all have the result of all. Of a stage that is
    not a pipeline's last: zeros."""
    base, inputs = getattr(model, model.base_model_prefix), model_inputs(model, rows)
    ulysses = _ulysses_of(model)
    stage: Stage | None = getattr(model, "penstock_stage", None)
    inputs = stage.take_up(inputs) if stage else inputs
    hidden = base(**inputs, use_cache=False).last_hidden_state
    if stage and not stage.last:
        return stage.hand_on(hidden, which, len(rows.target))
    hidden, places = hidden.flatten(0, 1), Places(rows.target, rows.candidates, rows.taught)
    if ulysses is None:
        return compute(hidden[rows.source], places)
    length = rows.tokens.shape[1]
    owners = ulysses.owners(rows.host_source, length)
    mine = owners[ulysses.rank]
    here, back = (
        to_device(torch.from_numpy(each), hidden.device)
        for each in (rows.host_source[mine] - ulysses.first(length), np.concatenate(owners).argsort())
    )
    found = compute(hidden[here], places.chosen(mine))
    parts = ulysses.gather(found, [len(owned) for owned in owners])
    # Rows are in the ranks' order now: back to that of the tokens.
    return torch.cat(parts, -1)[:, back]


def model_inputs(model: Any, rows: Rows) -> dict[str, Any]:
    """What ``model`` is called with for ``rows``; where ranks share these, for this one's part."""
    inputs: dict[str, Any] = {"input_ids": rows.tokens, "position_ids": rows.positions}
    if isinstance(rows.attention, Segments):
        own = model.config.get_text_config()._attn_implementation
        assert own == OUR_ATTENTION, "another attention would ignore the segments"
        inputs["segments"] = rows.attention
        # transformers hands a mask of four dimensions on as it is, and makes none of its own then.
        inputs["attention_mask"] = torch.ones((1, 1, 1, 1), dtype=torch.bool, device=rows.tokens.device)
    else:
        inputs["attention_mask"] = rows.attention
    if rows.routing is not None:
        inputs["routing"] = to_device(torch.from_numpy(rows.routing), rows.tokens.device)
    ulysses, sight = _ulysses_of(model), sight_of(model)
    if ulysses:
        inputs = ulysses.part(inputs)
    if rows.shown:
        inputs |= _told(model, sight, rows.shown, ulysses)
    elif sight and sight.learns:
        inputs |= sight.nothing(inputs["input_ids"])
    return inputs


def _ulysses_of(model: Any) -> SequenceParallel | None:
    return getattr(model, "penstock_ulysses", None)


def _told(model: Any, sight: Sight | None, shown: Shown, ulysses: SequenceParallel | None) -> dict[str, Any]:
    """What it is told of pictures."""
    if sight is None:
        raise SetupError(
            f"prompts show pictures, which {model.config.model_type} does not see; take a model that does "
            "(docs/models.md), or leave images_key out"
        )
    blind = torch.tensor([not pictures for pictures in shown.pictures], device=shown.sampled.device)
    at = (shown.member, shown.place) if ulysses is None else (ulysses.own(shown.member, -1), ulysses.own(shown.place))
    return sight.inputs(shown.tokens, shown.real, shown.sampled | blind[:, None], shown.pictures, at)


def layout_of(model: Any, trajectories: Sequence[Trajectory] = ()) -> Layout:
    """How rows of ``trajectories`` lie for ``model``."""
    family, text = model.config.model_type, model.config.get_text_config()
    if family not in PACKED or (family in BOTH_WAYS and any(each.pictures for each in trajectories)):
        return "apart"
    kinds = set(getattr(text, "layer_types", None) or ())
    plain = kinds == {"full_attention"} if kinds else window_of(text) is None
    if is_recurrent(text):
        return "whole"
    return "either" if plain and not soft_cap(text) else "packed"


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


def _chunked(model: Any, hidden: torch.Tensor, places: Places, compute: Compute) -> torch.Tensor:
    size = max(1, LOGIT_BYTES // (4 * model.config.get_text_config().vocab_size))

    def chunk(part: torch.Tensor, its: Places) -> torch.Tensor:
        return compute(_head(model, part), its)

    if len(hidden) <= size:
        return chunk(hidden, places)
    parts = zip(hidden.split(size), places.split(size), strict=True)
    return torch.cat([checkpoint(chunk, *part, use_reentrant=False) for part in parts], -1)
