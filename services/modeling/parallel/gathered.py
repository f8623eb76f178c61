"""What is published of a weight that no rank has rows of as they are."""

from __future__ import annotations

from typing import Protocol

import torch


class Gathered(Protocol):
    """Rows of a matrix, made of what several ranks have of it."""

    shape: torch.Size
    device: torch.device

    @property
    def first(self) -> int:
        """The number of its first row."""

    def gather(self) -> None:
        """To be called by all ranks, when the weights have changed."""

    def local(self) -> torch.Tensor:
        """Flat: elements in the order of the whole matrix, from row `first` on."""
