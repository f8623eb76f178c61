"""A teacher as a scorer: what a frozen model says of each token that the policy sampled."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from penstock.protocols.experience import Group
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import device_of, load_model, vocabulary_of
from penstock.services.modeling.logprobs import logprobs, shares_prompts
from penstock.services.modeling.packing import by_trajectory, plan_rows
from penstock.services.runtime.errors import SetupError


class Teacher:
    """scorers: {teacher: {scorer: teacher, columns: {teacher: token}, options: {path: ORG/MODEL}}}

    ``path``: a causal model with the policy's own vocabulary. ``column`` is the column that it writes, ``temperature``
    that of `rollout.sampling`; ``tokens_per_batch`` bounds a forward pass, padding included; ``head_dtype`` as
    `model.head_dtype`.
    """

    def __init__(
        self, path: str, column: str = "teacher", device: str = "auto", dtype: str = "bfloat16",
        temperature: float = 1.0, tokens_per_batch: int = 8192, head_dtype: Literal["float32"] | None = None,
    ) -> None:  # fmt: skip
        if head_dtype not in (None, "float32"):
            raise SetupError(f"scorers.options.head_dtype: {head_dtype!r}; set it to float32 or null")
        self._device = device_of(device, "scorers.options.device")
        self._model = load_model(path, dtype, self._device, "scorers.options.path").eval()
        compute_head_in(self._model, head_dtype)
        self._column, self._temperature, self._budget = column, temperature, tokens_per_batch

    @torch.inference_mode()
    def score_group(self, group: Group, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Log-probabilities, natural logarithm: float32 ``[tokens of all trajectories]``, 0 where nothing was
        sampled."""
        group.check_ids(vocabulary_of(self._model))
        found, share = list(group.trajectories), shares_prompts(self._model)
        passes = plan_rows(found, [group.number] * len(found), self._budget, self._device, share)
        rows = by_trajectory(found, passes, lambda part: logprobs(self._model, part, self._temperature))
        return {self._column: np.concatenate(rows)}
