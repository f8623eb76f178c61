"""NVIDIA's management library, as a machine with GPUs has it: faked at its own functions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

GIB = 1 << 30


class FakeNvml:
    """``gpus``: GiB of each. ``error``: what every call then says."""

    def __init__(self, patch: pytest.MonkeyPatch, gpus: tuple[float, ...], driver: str, cuda: int) -> None:
        self.error: int | None = None
        self.free = 0.99
        """The share of each GPU's memory that nobody uses."""
        self.gpus, self.driver, self.cuda = gpus, driver, cuda
        self.others: set[int] = set()
        """Those that this process may not open."""
        answers: dict[str, Any] = {
            "nvmlInit": lambda: None,
            "nvmlShutdown": lambda: None,
            "nvmlSystemGetDriverVersion": lambda: self.driver,
            "nvmlSystemGetCudaDriverVersion_v2": lambda: self.cuda,
            "nvmlDeviceGetCount": lambda: len(self.gpus),
            "nvmlDeviceGetHandleByIndex": self._handle,
            "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
            "nvmlDeviceGetName": lambda handle: "NVIDIA H100 80GB HBM3",
            "nvmlDeviceGetMemoryInfo": self._memory,
        }
        for name, answer in answers.items():
            patch.setattr(pynvml, name, self._or_error(answer))
        patch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def _handle(self, index: int) -> int:
        if index in self.others:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)
        return index

    def _memory(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=int(self.gpus[handle] * GIB), free=int(self.gpus[handle] * GIB * self.free))

    def _or_error(self, answer: Any) -> Any:
        def called(*arguments: Any) -> Any:
            if self.error is not None:
                raise pynvml.NVMLError(self.error)
            return answer(*arguments)

        return called
