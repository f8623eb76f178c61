"""What forward passes give, taken apart again."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.modeling.packing import Rows
from penstock.services.modeling.pinned import to_host
from penstock.services.runtime import health


def by_trajectory(
    trajectories: Sequence[Trajectory], passes: Iterable[Rows], compute: Callable[[Rows], torch.Tensor], ahead: int = 1
) -> list[np.ndarray]:
    """What ``compute`` gives for each of ``passes`` (``[trajectories, longest - 1]``, aligned with its mask, or several
    such, ``[which, trajectories, longest - 1]``), taken apart: float32 ``[tokens]``, or ``[which, tokens]``, of each
    trajectory, 0 for its first. So many passes are begun ``ahead`` of the one that is waited for: one for each device
    that they run through."""
    found = [np.zeros(0, np.float32)] * len(trajectories)

    def take(index: Sequence[int], values: np.ndarray) -> None:
        for k, i in enumerate(index):
            size = len(trajectories[i].tokens)
            found[i] = np.zeros((*values.shape[:-2], size), np.float32)
            found[i][..., 1:] = values[..., k, : size - 1]

    begun: deque[tuple[tuple[int, ...], Callable[[], torch.Tensor]]] = deque()
    for rows in passes:
        health.beat()
        begun.append((rows.index, to_host(compute(rows).float())))
        if len(begun) > ahead:  # while a device computes the next pass
            index, wait = begun.popleft()
            take(index, wait().numpy())
    for index, wait in begun:
        take(index, wait().numpy())
    return found
