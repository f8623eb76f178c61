"""Host memory that is registered with CUDA: copies from and to a GPU then run beside everything else."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import structlog
import torch

log = structlog.get_logger()


def pin(memory: torch.Tensor) -> bool:
    """Registers ``memory`` (contiguous, on the host), where there is a GPU, at its own size: torch's own pinned memory
    comes in powers of two. False where the driver refuses, which is said: copies are slower then. Who frees the memory
    before the process ends calls `unpin` first."""
    if not torch.cuda.is_available() or not memory.numel():
        return False
    nbytes = memory.numel() * memory.element_size()
    code = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), nbytes, 0))
    if code:
        _forget_error()
        log.warning("host memory is not registered with CUDA: copies are slower (limits: ulimit -l)", code=code,
                    mib=nbytes >> 20)  # fmt: skip
    return code == 0


def to_device(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``value``, of the host, on ``device``: without waiting for what a GPU has to do before."""
    return value.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else value.to(device)


def to_host(value: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Begins to copy ``value`` to the host. What is returned waits for it, and for nothing that a GPU is given after
    this."""
    if not value.is_cuda:
        return lambda: value
    copied = torch.empty(value.shape, dtype=value.dtype, pin_memory=True)
    copied.copy_(value, non_blocking=True)
    done = torch.cuda.current_stream(value.device).record_event()

    def wait() -> torch.Tensor:
        done.synchronize()
        return copied

    return wait


def unpin(memory: torch.Tensor) -> None:
    """Ends what `pin` began."""
    if int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())):
        _forget_error()


def _forget_error() -> None:
    """Or CUDA would report it at the next kernel of this thread, whoever's that is."""
    try:
        ctypes.CDLL(f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}").cudaGetLastError()
    except (OSError, AttributeError):
        pass
