"""A GPU that is too small for a step: what is said of it, and when a smaller micro-batch is tried."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import structlog
import torch

from penstock.services.runtime.gpus import GIB

log = structlog.get_logger()

T = TypeVar("T")
LEAST_TOKENS = 256
"""A micro-batch that is smaller is not tried."""


class DoesNotFit(RuntimeError):
    """A step needs more memory than there is; says in which phase, how much there was, and which keys would help."""


class MicroBatches:
    """How many tokens a forward and backward pass has: ``tokens``, or fewer where a step did not fit and ``may_shrink``
    says that its results may be rounded otherwise. ``section`` is the learner's in the config."""

    def __init__(self, tokens: int, may_shrink: bool, section: str, device: torch.device) -> None:
        self.tokens, self._may_shrink, self._section, self._device = tokens, may_shrink, section, device

    def fitting(self, phase: str, compute: Callable[[], T], undo: Callable[[], None] = lambda: None) -> T:
        """What ``compute`` gives, which is asked again with half the tokens, behind ``undo``, where it did not fit.
        Raises `DoesNotFit`."""
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                said = str(error).partition("\n")[0]
                if not self._may_shrink or self.tokens // 2 < LEAST_TOKENS:
                    raise DoesNotFit(self._explain(phase, said)) from error
            # Here the exception is gone, and with it what its frames held.
            undo()
            self.tokens //= 2
            if self._device.type == "cuda":
                torch.cuda.empty_cache()
            log.warning(
                "out of memory: micro-batches are halved", phase=phase, tokens=self.tokens,
                key=f"{self._section}.tokens_per_micro_batch", error=said,
            )  # fmt: skip

    def _explain(self, phase: str, said: str) -> str:
        held = ""
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            peak = torch.cuda.max_memory_allocated(self._device)
            held = f" (peak {peak / GIB:.1f} GiB, {free / GIB:.1f} of {total / GIB:.1f} GiB free)"
        key = self._section
        return (
            f"out of memory in the {phase}, with micro-batches of {self.tokens} tokens{held}: {said}. What would help: "
            f"{key}.gradient_checkpointing=true, fewer {key}.tokens_per_micro_batch, more {key}.ranks, or "
            f"{key}.offload (optimizer, or true); penstock plan FILE shows what each part takes"
        )
