"""Any other causal language model, run by transformers' own code over our slots."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin

from penstock.services.modeling.load import ModelError
from penstock.services.rollout.engines.torch.cache import SlotCache


class _SlotLayer(CacheLayerMixin):
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


class HostedModel:
    """The interface of `native.NativeModel` over a transformers module. Keeps two copies of the weights: the one that
    serves, and the shadow that the next version is prepared in."""

    def __init__(self, config: Any, cache: SlotCache, dtype: torch.dtype, device: torch.device) -> None:
        if getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True):
            raise ModelError(
                f"rollout.engine: the torch engine does not run sliding-window attention ({config.model_type}); "
                "use another engine for this model"
            )
        self._cache, self._device = cache, device
        self._spare = [self._make(config, dtype), self._make(config, dtype)]
        self.weights: Any = None

    def _make(self, config: Any, dtype: torch.dtype) -> Any:
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.to(self._device).eval()

    def prepare(self, named: Mapping[str, torch.Tensor]) -> Any:
        """Loads a version into the copy that does not serve."""
        shadow = self._spare[0] if self._spare[0] is not self.weights else self._spare[1]
        missing, unexpected = shadow.load_state_dict(dict(named), strict=False)
        tied = set(getattr(shadow, "_tied_weights_keys", None) or ())
        missing = [name for name in missing if name not in tied]
        if missing or unexpected:
            raise ModelError(f"the version does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")
        shadow.tie_weights()
        return shadow

    def logits(self, weights: Any, tokens: torch.Tensor) -> torch.Tensor:
        """As `NativeModel.logits`."""
        return weights(input_ids=tokens[None], use_cache=False).logits[0].float()

    def prefill(self, tokens: torch.Tensor, lengths: torch.Tensor, slots: list[torch.Tensor]) -> torch.Tensor:
        """As `NativeModel.prefill`."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        attention = (steps[None] < lengths[:, None]).long()
        cache = DynamicCache()
        out = self.weights(
            input_ids=tokens,
            attention_mask=attention,
            position_ids=steps.expand(tokens.shape),
            past_key_values=cache,
            use_cache=True,
        )
        every = torch.cat(slots)
        repeat = torch.tensor([len(s) for s in slots], device=tokens.device)
        for index, layer in enumerate(cache.layers):
            keys, values = layer.keys.repeat_interleave(repeat, 0), layer.values.repeat_interleave(repeat, 0)
            self._cache.fill(index, every, keys, values)
        return out.logits[torch.arange(len(tokens), device=tokens.device), lengths - 1].float()

    def decode(self, tokens: torch.Tensor, positions: torch.Tensor, span: int) -> torch.Tensor:
        """As `NativeModel.decode`."""
        dtype = self._cache.keys[0].dtype
        hidden_from = torch.arange(span, device=tokens.device)[None] > positions[:, None]
        mask = torch.zeros((len(tokens), 1, 1, span), dtype=dtype, device=tokens.device)
        mask.masked_fill_(hidden_from[:, None, None], torch.finfo(dtype).min)
        layers = [_SlotLayer(self._cache, index, positions, span) for index in range(len(self._cache.keys))]
        out = self.weights(
            input_ids=tokens[:, None],
            attention_mask=mask,
            position_ids=positions[:, None],
            past_key_values=Cache(layers=layers),
            use_cache=True,
        )
        return out.logits[:, -1].float()
