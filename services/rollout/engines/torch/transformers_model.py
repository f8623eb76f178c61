"""What both ways to run transformers' own code have in common: two copies of the weights, one that serves, and the
shadow that the next version is prepared in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from penstock.services.data.picture_files import PictureError
from penstock.services.modeling.buffers import widen_buffers
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import ModelError, attention_of, has_own_code, with_head
from penstock.services.modeling.logprobs import LOGIT_BYTES
from penstock.services.modeling.norms import fuse_norms
from penstock.services.modeling.routing import Recorder
from penstock.services.modeling.sight import Sight, forget_seen, give_sight, resting_sight, sight_of
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.engines.base import Request, RequestError


class TransformersModel:
    """Pictures are seen by the towers of the copy that serves."""

    def __init__(self, config: Any, dtype: torch.dtype, device: torch.device, head_dtype: str | None) -> None:
        self._device = device
        self._spare = [self._make(config, dtype, head_dtype) for _ in range(2)]
        self._weights: Any = None
        self._sees_anew = False
        self._recorders = [Recorder(model) for model in self._spare]

    def see(self, path: str, dtype: str, towers_learn: bool = False) -> bool:
        """From now on prompts may show pictures, which the model at ``path`` sees, by each version otherwise where its
        ``towers_learn``; False: it does not."""
        self._sees_anew = towers_learn
        if not all(give_sight(model, path, dtype, self._device) for model in self._spare):
            return False
        if not towers_learn:
            self._spare[1].penstock_sight.share(self._spare[0].penstock_sight)
        return True

    @property
    def weights(self) -> Any:
        """The copy that serves: what `prepare` returned last, once somebody has set it."""
        return self._weights

    @weights.setter
    def weights(self, prepared: Any) -> None:
        first, self._weights = self._weights is None, prepared
        for model in self._spare if first or self._sees_anew else ():  # before the first version they are of nobody
            forget_seen(model)

    @property
    def sight(self) -> Sight | None:
        """Of the copy that serves, or may come to."""
        return sight_of(self._spare[0] if self._weights is None else self._weights)

    def shown(self, request: Request) -> Shown:
        """What ``request`` shows. Raises `RequestError` where its tokens have another number of places for it."""
        assert self.sight, "see() said so"
        said = np.zeros(len(request.tokens), bool) if request.sampled is None else request.sampled
        try:
            self.sight.check(request.tokens, said, request.pictures)
        except PictureError as error:
            raise RequestError(str(error)) from error
        return request.pictures, said

    @property
    def recorder(self) -> Recorder:
        """Of the copy that serves."""
        return self._recorders[self.weights is self._spare[1]]

    def _make(self, config: Any, dtype: torch.dtype, head_dtype: str | None) -> Any:
        model = with_head(config, "language").from_config(
            config, dtype=dtype, attn_implementation=attention_of(config), trust_remote_code=has_own_code(config)
        )
        compute_head_in(model, head_dtype)
        fuse_norms(model)
        widen_buffers(model)  # as the trainer computes with them
        return model.to(self._device).eval()

    def prepare(self, named: Mapping[str, torch.Tensor]) -> Any:
        """Loads a version into the copy that does not serve."""
        shadow = self._spare[0] if self._spare[0] is not self.weights else self._spare[1]
        missing, unexpected = shadow.load_state_dict(dict(named), strict=False)
        wanted = version_of(shadow).keys() - _tied(shadow)
        missing = [name for name in missing if name in wanted]
        if missing or unexpected:
            raise ModelError(f"the version does not fit the model: missing {missing[:3]}, unexpected {unexpected[:3]}")
        shadow.tie_weights()
        return shadow

    @property
    def kept(self) -> list[torch.Tensor]:
        """Both copies of the weights. What was seen is forgotten."""
        kept = [tensor for model in self._spare for tensor in (*model.parameters(), *model.buffers())]
        return [*kept, *(tensor for model in self._spare for tensor in resting_sight(model))]

    def logits(self, weights: Any, tokens: torch.Tensor) -> torch.Tensor:
        """As `NativeModel.logits`."""
        return weights(input_ids=tokens[None], use_cache=False).logits[0].float()


Shown = tuple[tuple[bytes, ...], np.ndarray]
"""What a row shows; and, bool, which of its first tokens were sampled: all behind them were."""
NOTHING: Shown = ((), np.zeros(0, bool))


def logit_rows(vocabulary: int, length: int) -> int:
    """Rows of ``length`` tokens whose logits may be there at once, at least one."""
    return max(1, LOGIT_BYTES // (4 * vocabulary * length))


def _tied(model: Any) -> set[str]:
    return set(getattr(model, "_tied_weights_keys", None) or ())
