"""An engine that once does not come back."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.base import Completion, Refusal
from penstock.services.rollout.engines.torch.engine import TorchEngine


class Hanging(TorchEngine):
    """Hangs in a step with version 2 or later, unless the file ``flag`` is there, which it makes."""

    def __init__(self, options: dict[str, Any], model_path: str, dtype: str, stop_ids: set[int]) -> None:
        config = TorchEngineConfig(max_sequences=64, max_length=32)
        super().__init__(config, AutoConfig.from_pretrained(model_path), dtype, stop_ids, str)
        self._flag = Path(options["flag"])

    def step(self) -> list[Completion | Refusal]:
        if self.version >= 2 and not self._flag.exists():
            self._flag.touch()
            time.sleep(600)
        return super().step()
