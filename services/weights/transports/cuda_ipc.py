"""A flat buffer in GPU memory that another process of the same host maps. Not yet measured on a GPU."""

from __future__ import annotations

from pathlib import Path

import torch

from penstock.protocols.versions import CudaIpcRoute


def gpu_of(device: torch.device) -> str:
    """The UUID of the GPU, and after an ``@`` the PID namespace, beyond which CUDA IPC does not reach (another
    container); empty for a CPU. Two processes may number the same GPU differently."""
    if device.type != "cuda":
        return ""
    try:
        namespace = Path("/proc/self/ns/pid").readlink().name
    except OSError:
        namespace = ""
    return f"{torch.cuda.get_device_properties(device).uuid}@{namespace}"


def uuid_of(gpu: str) -> str:
    """The GPU of `gpu_of`, whatever process sees it."""
    return gpu.partition("@")[0]


def namespace_of(gpu: str) -> str:
    """The PID namespace of `gpu_of`: another container has another."""
    return gpu.partition("@")[2]


def share(buffer: torch.Tensor) -> CudaIpcRoute:
    """How another process maps ``buffer`` (uint8 ``[bytes]`` on a GPU), which must live until it has let go."""
    device, handle, size, offset, counter, counter_offset, event, event_sync = buffer.untyped_storage()._share_cuda_()
    return CudaIpcRoute(
        device=device,
        handle=handle.hex(),
        storage_bytes=size,
        storage_offset=offset,
        counter=counter.hex(),
        counter_offset=counter_offset,
        event=event.hex(),
        event_sync=event_sync,
    )


def map_shared(route: CudaIpcRoute, nbytes: int, device: torch.device) -> torch.Tensor:
    """The sender's buffer, uint8 ``[nbytes]``, without a copy."""
    torch.cuda.init()
    storage = torch.UntypedStorage._new_shared_cuda(
        device.index or 0,
        bytes.fromhex(route.handle),
        route.storage_bytes,
        route.storage_offset,
        bytes.fromhex(route.counter),
        route.counter_offset,
        bytes.fromhex(route.event),
        route.event_sync,
    )
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)[:nbytes]
