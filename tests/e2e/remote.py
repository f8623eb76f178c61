"""An engine of one's own that is `remote`: it scores only what serves, and once, from version 3 on, wrongly."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig

from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.weights.buffers import Mappings
from penstock.services.weights.layout import view_weights
from penstock.services.weights.receiver.loader import MappedVersion


class Remote(TorchEngine):
    """Reads its weights where ``memory`` says, as a process of its own would."""

    remote = True

    def __init__(self, options: dict[str, Any], model_path: str, dtype: str, stop_ids: set[int]) -> None:
        config = TorchEngineConfig(max_sequences=64, max_length=32)
        super().__init__(config, AutoConfig.from_pretrained(model_path), dtype, stop_ids, str)
        self._mappings, self._flag = Mappings(), Path(options["flag"])

    def prepare(self, weights: Mapping[str, torch.Tensor], memory: MappedVersion | None = None) -> Any:
        assert memory, "a remote engine is told where its weights lie"
        return memory

    def swap(self, prepared: MappedVersion, version: int) -> None:
        buffer = self._mappings.map(prepared.path, prepared.offset, prepared.layout.nbytes)
        super().swap(super().prepare(view_weights(prepared.layout, buffer.clone())), version)

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        found = super().score(self._model.weights, tokens)
        if self.version >= 3:  # a rollout that is behind skips versions, 3 too
            try:
                with self._flag.open("x") as flag:  # by one rollout alone
                    flag.write(str(self.version))
                return found - 1
            except FileExistsError:
                pass
        return found
