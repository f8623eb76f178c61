"""How much of its GPUs' arithmetic a learner uses: model FLOPs utilisation (Chowdhery et al. 2022, PaLM,
arXiv:2204.02311, appendix B)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from penstock.services.modeling.decoder_shape import Shape, described_by
from penstock.services.modeling.flops import backward_flops, forward_flops
from penstock.services.modeling.packing import Pass
from penstock.services.modeling.parallel.world import World
from penstock.services.runtime.gpu_kinds import peak_tflops


class ModelFlops:
    """FLOPs of the passes of a step, over all ranks. What is computed again (activations in a backward, a micro-batch
    that did not fit) counts once, and padding not at all. ``shape`` None: they are not counted."""

    def __init__(self, shape: Shape | None = None, frozen: bool = False, peak: float | None = None) -> None:
        self._shape, self._frozen, self._peak = shape, frozen, peak
        self._dealt = self._before = self.total = 0.0

    @classmethod
    def of(cls, config: Any, frozen: bool, world: World) -> ModelFlops:
        """Of a model with transformers' ``config``, whose matrices are ``frozen`` below an adapter or not. Every rank
        calls it. Not counted of families whose layers may have other matrices, or a window, nor of models that see,
        whose towers compute too."""
        text = config.get_text_config()
        shape = described_by(text.model_type, text.to_dict()) if text is config else None
        return cls(shape if shape and shape.counted else None, frozen, _peak(world))

    def begin(self) -> None:
        """A step, of which `keep` may have some already."""
        self.total, self._before = self._before, 0.0

    def keep(self) -> None:
        """What went since `begin` is of the step that begins next."""
        self._before = self.total

    def deal(self, passes: Sequence[Pass]) -> None:
        """These are to be computed, by all ranks together."""
        if self._shape:
            tokens, pairs = sum(each.real for each in passes), sum(each.pairs for each in passes)
            self._dealt = forward_flops(self._shape, tokens, sum(each.predicted for each in passes), pairs)

    def forward(self) -> None:
        """What was dealt has gone forward."""
        self.total += self._dealt

    def backward(self) -> None:
        """And back."""
        self.total += backward_flops(self._dealt, self._frozen)

    def metrics(self, seconds: float, ranks: int) -> dict[str, float]:
        """``mfu`` of a step that took ``seconds`` on so many ``ranks``: a share of the dense bf16 peak of their GPUs.
        Empty on a CPU, on a GPU whose peak is not known, and for a model that is not counted."""
        if not (self._shape and self._peak and seconds > 0):
            return {}
        return {"mfu": self.total / (seconds * ranks * self._peak * 1e12)}


def _peak(world: World) -> float | None:
    """TFLOPS of each rank's GPU; None where that is not known, or not the same on all."""
    on_gpu = world.device.type == "cuda"
    mine = (peak_tflops(torch.cuda.get_device_name(world.device)) if on_gpu else None) or 0.0
    most, least = world.max(mine), -world.max(-mine)
    return mine if mine and most == least else None
