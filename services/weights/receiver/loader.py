"""What the weight channel asks of an engine: to make something of a version's tensors, and to score with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from penstock.protocols.versions import Layout


@dataclass(frozen=True)
class MappedVersion:
    """Where another process of this host finds a version."""

    path: str
    """A file that it can map."""
    offset: int
    """Where in the file the flat buffer begins."""
    layout: Layout


class WeightLoader(Protocol):
    """An engine, as the weight channel sees it. Both methods may run in another thread than the engine's."""

    device: torch.device
    """Where `prepare` wants the weights."""
    remote: bool
    """Its weights lie in processes of its own, and a version is loaded over the one that serves. So `prepare` is told
    where they find it, and `score` can be asked only after `swap`; until the score is right, nothing that was finished
    since then leaves the rollout."""

    def prepare(self, weights: Mapping[str, Any], memory: MappedVersion | None = None) -> Any:
        """Turns verified tensors (transformers' names, on the host) into whatever `swap` takes. It may keep the tensors
        as they are: they stay unchanged until another version was swapped in. It must not write to them. ``memory``
        says where they lie, where the engine is `remote` and they are in memory that can be shared."""

    def score(self, prepared: Any, tokens: np.ndarray) -> np.ndarray:
        """Log-probabilities (float32 ``[tokens - 1]``, temperature 1) of all ``tokens`` (int32) but the first, under
        weights that are not swapped in yet (`remote`: that are): what is made of a version is checked before it
        serves. Engines with several replicas give a row for each."""
