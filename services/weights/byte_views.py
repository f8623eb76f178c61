"""The bytes of buffers as numpy, torch and memoryview see them, without a copy; and their one copy."""

from __future__ import annotations

import warnings

import numpy as np
import torch


def copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Bytes (uint8 ``[bytes]``) from one buffer to another. On the host by the C library's memcpy, in one thread:
    torch's copy takes longer in one, and in several it takes cores from what computes beside."""
    if source.is_cpu and target.is_cpu:
        np.copyto(target.numpy(), source.numpy())
    else:
        target.copy_(source)


def as_memory(buffer: torch.Tensor) -> memoryview:
    """The bytes of a host buffer."""
    return memoryview(buffer.numpy())


def as_array(memory: memoryview) -> np.ndarray:
    """uint8 over ``memory``, without a copy."""
    return np.frombuffer(memory, np.uint8)


def from_memory(memory: memoryview) -> torch.Tensor:
    """A uint8 tensor over ``memory``, without a copy; where that is read-only, writing to it ends the process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given buffer is not writable")
        return torch.frombuffer(memory, dtype=torch.uint8)
