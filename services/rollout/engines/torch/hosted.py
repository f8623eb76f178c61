"""Any causal language model whose cache is keys and values, run by transformers' own code over our slots."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from penstock.services.modeling.families import window_of
from penstock.services.modeling.precision import LOGITS
from penstock.services.rollout.engines.torch.cache import SlotCache, row_of_each
from penstock.services.rollout.engines.torch.transformers_model import Shown, TransformersModel, logit_rows

FULL, SLIDING = "full_attention", "sliding_attention"


class UnfitError(Exception):
    """The model keeps something else than keys and values of one shape, or takes them in another way."""


class SlotLayer(CacheLayerMixin):
    """One layer of a `SlotCache` as transformers sees it, for one decoding step."""

    is_sliding = False

    def __init__(self, cache: SlotCache, layer: int, positions: torch.Tensor, span: int) -> None:
        super().__init__()
        self._cache, self._layer, self._positions, self._span = cache, layer, positions, span
        self._rows = torch.arange(len(positions), device=positions.device)
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """The slots exist already."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *_args: Any, **_kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes this step's token into each slot and returns what each may attend to."""
        self._cache.append(self._layer, self._rows, self._positions, key_states[:, :, 0], value_states[:, :, 0])
        count = len(self._rows)
        keys, values = self._cache.keys[self._layer], self._cache.values[self._layer]
        return keys[:count, :, : self._span], values[:count, :, : self._span]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset."""
        return self._span, 0

    def get_seq_length(self) -> int:
        """Tokens before this step."""
        return self._span - 1

    def get_max_length(self) -> int:
        """No limit of its own."""
        return -1


class HostedModel(TransformersModel):
    """The interface of `native.NativeModel` over a transformers module. Where the attention of some layers slides,
    their keys are kept whole, and the mask hides what is out of the window. Raises `UnfitError` where the model's cache
    is of another kind, which a trial on random weights shows."""

    def __init__(
        self, config: Any, slots: int, length: int, dtype: torch.dtype, device: torch.device,
        head_dtype: str | None = None,
    ) -> None:  # fmt: skip
        super().__init__(config, dtype, device, head_dtype)
        self._text = text = config.get_text_config()
        self._check_kinds()
        window = window_of(text)
        self._window = window if window and window < length else None
        """Tokens that sliding layers look back on, where sequences may be longer."""
        self._by_kind = self._window is not None and SLIDING in (getattr(text, "layer_types", None) or ())
        """The model has layers of both kinds, and takes a mask for each."""
        self._vocabulary = text.vocab_size
        self._told = "logits_to_keep" in inspect.signature(self._spare[0].forward).parameters
        """The model can be told which logits are wanted."""
        self.cache = self._make_cache(slots, length, dtype)
        self._shift = torch.zeros(slots, dtype=torch.long, device=device)
        """What a slot's positions are ahead of its tokens: those of a picture have fewer than it has tokens."""
        try:
            self._try(length, dtype)
        except UnfitError:
            if not self._told:
                raise
            self._told = False  # by a number alone, maybe
            self._try(length, dtype)

    def prefill(
        self, tokens: torch.Tensor, lengths: torch.Tensor, slots: list[torch.Tensor], shown: Sequence[Shown] = ()
    ) -> torch.Tensor:
        """As `NativeModel.prefill`, of rows of which each is ``shown`` something; nothing: none is."""
        found = torch.empty((len(tokens), self._vocabulary), device=tokens.device)
        for rows, width in self.runs(lengths.tolist(), tokens.shape[1]):
            some = [shown[row] for row in rows] if shown else ()
            found[rows] = self._prefill(tokens[rows, :width], lengths[rows], [slots[row] for row in rows], some)
        return found

    def runs(self, lengths: Sequence[int], width: int) -> list[tuple[list[int], int]]:
        """Which of a prefill's rows of so many ``lengths``, padded to ``width``, are run together, and how wide."""
        most, found = logit_rows(self._vocabulary, 1), list[list[int]]()
        ends: set[int] = set()
        for row, length in enumerate(lengths):
            # Of each row come the logits of every place that is some row's last; of one that cannot be told, of all.
            places = len(ends | {length}) if self._told else width
            if not found or (len(found[-1]) + 1) * places > most:
                found.append([])
                ends = set()
            found[-1].append(row)
            ends.add(length)
        return [(rows, width) for rows in found]

    def _prefill(
        self, tokens: torch.Tensor, lengths: torch.Tensor, slots: list[torch.Tensor], shown: Sequence[Shown]
    ) -> torch.Tensor:
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        cache, (last, place) = self._new_cache(), torch.unique(lengths - 1, return_inverse=True)
        inputs: dict[str, Any] = {
            "input_ids": tokens,
            "attention_mask": (steps[None] < lengths[:, None]).long(),
            "position_ids": steps.expand(tokens.shape),
        }
        if self.sight and any(pictures for pictures, _ in shown):
            sampled = np.ones(tokens.shape, bool)
            for row, (_, said) in enumerate(shown):
                sampled[row, : len(said)] = said[: tokens.shape[1]]
            inputs |= self.sight.inputs(
                tokens,
                inputs["attention_mask"],
                torch.from_numpy(sampled).to(tokens.device),
                [each[0] for each in shown],
            )
        out = self.weights(
            **inputs, past_key_values=cache, use_cache=True, **({"logits_to_keep": last} if self._told else {})
        )
        every, rows = torch.cat(slots), row_of_each(slots, tokens.device)
        self._fill(cache.layers, every, rows)
        ends = inputs["position_ids"].expand(3, *tokens.shape)[0].gather(1, lengths[:, None] - 1)[:, 0]
        self._shift[every] = (ends - (lengths - 1)).index_select(0, rows)
        wanted = place if self._told else lengths - 1
        return out.logits[torch.arange(len(tokens), device=tokens.device), wanted].float()

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """As `NativeModel.decode`."""
        out = self.weights(
            input_ids=tokens[:, None],
            attention_mask=self._mask(positions, span),
            position_ids=(positions + self._shift[: len(positions)])[:, None],
            past_key_values=Cache(layers=self._layers(positions, span)),
            use_cache=True,
        )
        return out.logits[:, -1].float()

    def move(self, source: torch.Tensor, target: torch.Tensor, length: int) -> None:
        """As `NativeModel.move`."""
        self.cache.move(source, target, length)
        self._shift[target] = self._shift[source]

    @property
    def cached(self) -> list[torch.Tensor]:
        """As `NativeModel.cached`."""
        return self.cache.tensors

    def _new_cache(self) -> DynamicCache:
        """transformers' own, of whole sequences."""
        return DynamicCache()

    def _fill(self, layers: Sequence[Any], slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Writes what these ``layers`` keep of whole sequences: to each slot that of the sequence ``rows`` says."""
        for index, layer in enumerate(layers):
            keys, values = layer.keys.index_select(0, rows), layer.values.index_select(0, rows)
            self.cache.fill(index, slots, keys, values)

    def _layers(self, positions: torch.Tensor, span: int) -> list[Any]:
        """What each layer keeps, for one decoding step."""
        return [SlotLayer(self.cache, index, positions, span) for index in range(len(self.cache.keys))]

    def _mask(self, positions: torch.Tensor, span: int) -> Any:
        """What each row may attend to: ``[rows, 1, 1, span]``, 0 or the lowest number; one for each kind of layer where
        there are two."""
        dtype = self.cache.keys[0].dtype
        key = torch.arange(span, device=positions.device)[None]

        def mask(hidden: torch.Tensor) -> torch.Tensor:
            shown = torch.zeros((len(positions), 1, 1, span), dtype=dtype, device=positions.device)
            return shown.masked_fill_(hidden[:, None, None], torch.finfo(dtype).min)

        later = key > positions[:, None]
        if self._window is None:
            return mask(later)
        sliding = mask(later | (key <= positions[:, None] - self._window))
        return {FULL: mask(later), SLIDING: sliding} if self._by_kind else sliding

    # --- the trial ---------------------------------------------------------------------------------------------------

    def _check_kinds(self) -> None:
        kinds = set(getattr(self._text, "layer_types", None) or [FULL])
        if not kinds <= {FULL, SLIDING}:
            raise UnfitError(f"layers of type {', '.join(sorted(kinds - {FULL, SLIDING}))}")

    @torch.inference_mode()
    def _make_cache(self, slots: int, length: int, dtype: torch.dtype) -> SlotCache:
        """Slots of the shape that the model's own cache has."""
        model, found = self._spare[0], self._new_cache()
        try:
            model(input_ids=torch.zeros((1, 2), dtype=torch.long, device=self._device), past_key_values=found)
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise UnfitError(f"{type(error).__name__}: {error}") from error
        return self._slots_like(found.layers, slots, length, dtype)

    def _slots_like(self, layers: Sequence[Any], slots: int, length: int, dtype: torch.dtype) -> SlotCache:
        """For keys and values as these ``layers`` have them of two tokens."""
        shapes = {(tuple(layer.keys.shape), tuple(layer.values.shape)) for layer in layers if layer.is_initialized}
        keys, values = shapes.pop() if len(shapes) == 1 else ((), ())
        if len(keys) != 4 or keys[:3] != values[:3] or keys[2] != 2:
            raise UnfitError("its layers keep keys and values of different shapes")
        return SlotCache(len(layers), slots, keys[1], length, keys[3], dtype, self._device, values[3])

    @torch.inference_mode()
    def _try(self, length: int, dtype: torch.dtype) -> None:
        """Two sequences of different length, longer than the window if there is one: tokens decoded over the slots have
        the logits that they have in the whole sequence."""
        model = self.weights = self._spare[0]
        longest = min(length, (self._window or 0) + 6)
        again = longest >= 5  # the second token follows from what the first has left
        lengths = torch.tensor([longest - 1 - again, 2], device=self._device)
        if len(self.cache.keys[0]) < 2 or longest < 4:
            lengths = lengths[:1]
        generator = torch.Generator().manual_seed(0)
        tokens = torch.randint(
            0, model.config.get_text_config().vocab_size, (len(lengths), longest), generator=generator
        )
        tokens = tokens.to(self._device)
        rows = torch.arange(len(lengths), device=self._device)
        try:
            self.prefill(tokens[:, :-1], lengths, [rows[i : i + 1] for i in range(len(rows))])
            found = [self.decode(tokens[rows, lengths + n], lengths + n, longest) for n in range(1 + again)]
        except torch.OutOfMemoryError:
            raise
        except (AttributeError, TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            raise UnfitError(f"{type(error).__name__}: {error}") from error
        finally:
            self.weights = None
        bound = LOGITS[str(dtype).removeprefix("torch.")]
        for row, size in enumerate(lengths.tolist()):
            wanted = self.logits(model, tokens[row, : size + len(found)])[-len(found) :]
            decoded = torch.stack([each[row] for each in found])
            if not bool(((decoded - wanted).abs().amax(-1) <= bound * wanted.std(-1)).all()):  # NaN is unfit
                raise UnfitError("its logits over our slots are not those of the whole sequence")
