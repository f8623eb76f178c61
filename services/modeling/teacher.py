"""A teacher as a scorer: what a frozen model says of each token that the policy sampled, and of what else could stand
there."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from penstock.protocols.columns import top_values
from penstock.protocols.experience import Group, Trajectory
from penstock.services.modeling.frozen_model import FrozenModel
from penstock.services.modeling.load import devices_of, vocabulary_of
from penstock.services.modeling.logprobs import Places, logprobs, of_logits
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.pinned import to_host
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
        devices = devices_of(device, gpus, "options.device", "gpus")
        self._frozen = FrozenModel(path, dtype, devices, tokens_per_batch, "options.path", "gpus", head_dtype)
        self._column, self._temperature, self._k = column, temperature, top_k or 0
        if self._k > (known := vocabulary_of(self._frozen.model)):
            raise SetupError(f"options.top_k={self._k}: {path} has {known} tokens; take no more")

    def at_once(self, groups: Sequence[Group]) -> int:
        """See `custom_scorer.SEVERAL`."""
        return self._frozen.at_once(groups)

    def score_group(self, group: Group, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Log-probabilities, natural logarithm: float32 ``[tokens of all trajectories]``, 0 where nothing was
        sampled. With `top_k` also `columns.top_columns`, flat."""
        return self.score_groups([group], [columns])[0]

    def score_groups(
        self, groups: Sequence[Group], columns: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """The same, of each of ``groups``."""
        for group in groups:
            self._frozen.check(group)
        tops: dict[int, np.ndarray] = {}
        begun: deque[tuple[Callable[[], torch.Tensor], list[tuple[int, int, int]]]] = deque()
        model, wide = self._frozen.model, 2 * self._k + 2

        def take() -> None:
            wait, whose = begun.popleft()
            values = wait().numpy().copy()  # memory that copies are made through is dear
            tops.update({place: values[first:end] for place, first, end in whose})

        def compute(trajectories: Sequence[Trajectory], part: Rows) -> torch.Tensor:
            if not self._k:
                return logprobs(model, part, self._temperature)
            stated = of_logits(model, part, self._stated, wide)
            begun.append((to_host(stated[1:].T.float()), [*_sampled(trajectories, part.index)]))
            if len(begun) > self._frozen.ahead:
                take()
            return part.scatter(stated[0].float())

        rows = iter(enumerate(self._frozen.of_each(groups, compute)))
        while begun:
            take()
        found = []
        for group in groups:
            mine = [next(rows) for _ in group.trajectories]
            said = {self._column: np.concatenate([values for _, values in mine])}
            if self._k:
                own = zip(group.trajectories, mine, strict=True)
                every = np.concatenate([_behind(t, tops[place]) for t, (place, _) in own])
                said |= top_values(self._column, self._k, every[:, : self._k], every[:, self._k :])
            found.append(said)
        return found

    def sleep(self) -> None:
        """Gives its devices' memory back, until `wake`."""
        self._frozen.sleep()

    def wake(self) -> None:
        """Takes its place on its devices again."""
        self._frozen.wake()

    def _stated(self, logits: torch.Tensor, places: Places) -> torch.Tensor:
        """float64, which holds any id, ``[1 + k + k + 1, tokens]``: what is said of the sampled token, ids, and their
        log-probabilities."""
        said = token_statistics(logits, places.target, self._temperature, places.table())
        logits = logits.float() / (self._temperature or 1.0)
        ids = logits.topk(self._k).indices
        logs = over_top(logits, logits.logsumexp(-1), ids)
        return torch.cat([said.double(), ids.T.double(), logs.T.double()])


def _sampled(trajectories: Sequence[Trajectory], index: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Of each trajectory of a pass its place, and the first and the last but one of its numbers there."""
    end = 0
    for place in index:
        first, end = end, end + int(np.count_nonzero(trajectories[place].loss_mask[1:] == 1))
        yield place, first, end


def _behind(trajectory: Trajectory, stated: np.ndarray) -> np.ndarray:
    """What is ``stated`` of a trajectory; what it begins with is predicted by nothing."""
    return np.pad(stated, ((int(trajectory.loss_mask[0]), 0), (0, 0)))
