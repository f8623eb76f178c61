"""A teacher as a scorer: what a frozen model says of each token that the policy sampled, and of what else could stand
there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import numpy as np
import torch

from penstock.protocols.columns import top_columns
from penstock.protocols.experience import Group
from penstock.services.modeling.by_trajectory import by_trajectory
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import devices_of, load_model, vocabulary_of
from penstock.services.modeling.logprobs import Places, layout_of, logprobs, of_logits
from penstock.services.modeling.packing import Rows, plan_rows
from penstock.services.modeling.resting import Resting
from penstock.services.modeling.sight import give_sight, resting_sight
from penstock.services.modeling.spread import spread
from penstock.services.modeling.taught import over_top
from penstock.services.modeling.token_statistics import token_statistics
from penstock.services.runtime.errors import SetupError


class Teacher:
    """scorers: {teacher: {scorer: teacher, columns: {teacher: token}, options: {path: ORG/MODEL}}}

    ``path``: a causal model with the policy's own vocabulary. ``column`` is the column that it writes,
    ``temperature`` that of `rollout.sampling`: a run says both. ``tokens_per_batch`` bounds a forward pass, padding
    included; ``head_dtype`` as `model.head_dtype`. ``gpus``: those that its layers are dealt out over. ``top_k``:
    it writes `columns.top_columns` of so many tokens too; None or 0: not.
    """

    def __init__(
        self, path: str, column: str = "teacher", device: str = "auto", dtype: str = "bfloat16",
        temperature: float = 1.0, tokens_per_batch: int = 8192, head_dtype: Literal["float32"] | None = None,
        top_k: int | None = None, gpus: int = 1,
    ) -> None:  # fmt: skip
        if head_dtype not in (None, "float32"):
            raise SetupError(f"options.head_dtype: {head_dtype!r}; set it to float32 or null")
        self._devices = devices_of(device, gpus, "options.device", "gpus")
        self._device, self._at_end = self._devices[0], self._devices[-1]
        self._model = load_model(path, dtype, torch.device("cpu"), "options.path").eval()
        compute_head_in(self._model, head_dtype)
        give_sight(self._model, path, dtype, self._device, "options.path")
        spread(self._model, self._devices, self._at_end, "gpus")
        self._column, self._temperature, self._budget, self._k = column, temperature, tokens_per_batch, top_k or 0
        self._resting = Resting(self._device)
        if self._k > vocabulary_of(self._model):
            raise SetupError(f"options.top_k={self._k}: {path} has {vocabulary_of(self._model)} tokens; take no more")

    @torch.inference_mode()
    def score_group(self, group: Group, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Log-probabilities, natural logarithm: float32 ``[tokens of all trajectories]``, 0 where nothing was
        sampled. With `top_k` also `columns.top_columns`, flat."""
        group.check_ids(vocabulary_of(self._model))
        found = list(group.trajectories)
        layout = layout_of(self._model, found)
        numbers = [group.number] * len(found)
        passes = plan_rows(found, numbers, self._budget, self._device, layout, at_end=self._at_end)
        tops: dict[int, np.ndarray] = {}

        def compute(part: Rows) -> torch.Tensor:
            if not self._k:
                return logprobs(self._model, part, self._temperature)
            stated = of_logits(self._model, part, self._stated, 2 * self._k + 2)
            ends = part.mask.sum(1).cumsum(0).tolist()
            for index, values in zip(part.index, np.split(stated[1:].T.cpu().numpy(), ends[:-1]), strict=True):
                # What a trajectory begins with is predicted by nothing.
                tops[index] = np.pad(values, ((int(found[index].loss_mask[0]), 0), (0, 0)))
            return part.scatter(stated[0].float())

        rows = {self._column: np.concatenate(by_trajectory(found, passes, compute, len(self._devices)))}
        if not self._k:
            return rows
        every = np.concatenate([tops[index] for index in range(len(found))])
        ids, logs = (column.name for column in top_columns(self._column, self._k, ""))
        logs_16 = np.maximum(every[:, self._k :], np.finfo(np.float16).min).astype(np.float16)
        return rows | {ids: every[:, : self._k].astype(np.int32).reshape(-1), logs: logs_16.reshape(-1)}

    def sleep(self) -> None:
        """Gives its device's memory back, until `wake`."""
        self._resting.rest(resting_sight(self._model), [*self._model.parameters(), *self._model.buffers()])

    def wake(self) -> None:
        """Takes its place on its device again."""
        self._resting.wake()

    def _stated(self, logits: torch.Tensor, places: Places) -> torch.Tensor:
        """float64, which holds any id, ``[1 + k + k + 1, tokens]``: what is said of the sampled token, ids, and their
        log-probabilities."""
        said = token_statistics(logits, places.target, self._temperature, places.table())
        logits = logits.float() / (self._temperature or 1.0)
        ids = logits.topk(self._k).indices
        logs = over_top(logits, logits.logsumexp(-1), ids)
        return torch.cat([said.double(), ids.T.double(), logs.T.double()])
