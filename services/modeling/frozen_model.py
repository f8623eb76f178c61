"""A language model that is only read: what references and teachers have in common."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from penstock.protocols.experience import Group, Trajectory
from penstock.services.modeling.by_trajectory import by_trajectory
from penstock.services.modeling.filling import PASSES_EACH
from penstock.services.modeling.four_bit import in_four_bits_by
from penstock.services.modeling.head import compute_head_in
from penstock.services.modeling.load import load_model, vocabulary_of
from penstock.services.modeling.logprobs import layout_of
from penstock.services.modeling.lora import Adapter, adapted_layers
from penstock.services.modeling.packing import Rows, plan_rows
from penstock.services.modeling.resting import Resting, release
from penstock.services.modeling.sight import check_shown, give_sight, resting_sight
from penstock.services.modeling.spread import spread

HOST = torch.device("cpu")


class FrozenModel:
    """The model at ``path``, which the config's ``key`` gives, on ``devices``, of which the key ``counts`` said how
    many; ``budget`` bounds the tokens of a forward pass. ``quantized``: of this adapter's model, whose matrices lie in
    4 bits, it is a copy. Raises `SetupError`."""

    def __init__(
        self, path: str, dtype: str, devices: Sequence[torch.device], budget: int, key: str, counts: str,
        head_dtype: str | None = None, quantized: Adapter | None = None,
    ) -> None:  # fmt: skip
        self._path, self._key, self._counts = path, key, counts
        self._dtype, self._head_dtype, self._quantized = dtype, head_dtype, quantized
        self._devices, self._budget = devices, budget
        self._resting = Resting(devices[0])
        self.model = self._load(path, key)
        self._take_place(self.model)

    def _load(self, path: str, key: str) -> Any:
        """On the host."""
        model = load_model(path, self._dtype, HOST, key).eval()
        if self._quantized:
            in_four_bits_by(model, adapted_layers(self._quantized, path), self._devices[0])
        compute_head_in(model, self._head_dtype)
        give_sight(model, self._path, self._dtype, self._devices[0], self._key)
        return model

    def _take_place(self, model: Any) -> None:
        spread(model, self._devices, self._devices[-1], self._counts)

    def become(self, path: str, key: str) -> None:
        """The model at ``path`` takes this one's place. Raises `SetupError`; then it stays what it was."""
        newer = self._load(path, key)  # on the host first: the devices have room for one
        self.model = None
        self._resting.forget()
        release(self._devices[0])
        self._take_place(newer)
        self.model = newer

    @property
    def ahead(self) -> int:
        """Passes that are begun ahead of the one that is waited for."""
        return len(self._devices)

    def check(self, group: Group) -> None:
        """Raises `ExperienceError` or `PictureError` where the model does not know the group's tokens, or sees its
        pictures otherwise than its prompt has places for."""
        group.check_ids(vocabulary_of(self.model))
        check_shown(self.model, group.trajectories)

    def at_once(self, groups: Sequence[Group]) -> int:
        """How many of the first ones have, together, the tokens of a forward pass, or of as many as keep all devices at
        work; one may have more."""
        passes = PASSES_EACH * len(self._devices) if len(self._devices) > 1 else 1
        shares = (layout_of(self.model, group.trajectories) != "apart" for group in groups)
        sizes = itertools.accumulate(map(_tokens, groups, shares))
        return max(1, sum(size <= passes * self._budget for size in sizes))

    @torch.inference_mode()
    def of_each(
        self, groups: Sequence[Group], compute: Callable[[Sequence[Trajectory], Rows], torch.Tensor]
    ) -> list[np.ndarray]:
        """What ``compute``, which is given all trajectories and some of their rows, says of each trajectory of
        ``groups``: see `by_trajectory`."""
        trajectories = [trajectory for group in groups for trajectory in group.trajectories]
        numbers = [place for place, group in enumerate(groups) for _ in group.trajectories]
        layout = layout_of(self.model, trajectories)
        first, last = self._devices[0], self._devices[-1]
        passes = plan_rows(trajectories, numbers, self._budget, first, layout, at_end=last)
        return by_trajectory(trajectories, passes, lambda rows: compute(trajectories, rows), self.ahead)

    def sleep(self) -> None:
        """Gives its devices' memory back, until `wake`."""
        self._resting.rest(resting_sight(self.model), [*self.model.parameters(), *self.model.buffers()])

    def wake(self) -> None:
        """Takes its place on its devices again."""
        self._resting.wake()


def _tokens(group: Group, share: bool) -> int:
    """Of a group's rows, where its trajectories ``share`` their prompt; padding is not counted."""
    prompt = min(int(trajectory.loss_mask.argmax()) for trajectory in group.trajectories) if share else 0
    return sum(len(trajectory.tokens) - prompt for trajectory in group.trajectories) + prompt
