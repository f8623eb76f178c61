"""Tensors that lie in host memory while their device is somebody else's."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from penstock.services.modeling.pinned import pin

PATIENCE_S, RETRY_S = 30.0, 0.5
WORTH_PINNING = 1 << 16
"""Bytes: registering a page takes longer than copying a few numbers."""


class Resting:
    """By memory, not by tensors: whoever holds a tensor or a view of it, such as what cuts a model over ranks, holds
    the same one afterwards. In between, nobody may read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        """What is away, and what was in it."""
        self._constant: dict[int, tuple[torch.UntypedStorage, torch.Tensor]] = {}
        """What never changes, by torch's address of it, and what is in it."""
        self._pages: dict[int, list[torch.Tensor]] = defaultdict(list)
        """Of host memory that is pinned, which is dear to make, by their size."""

    @torch.no_grad()
    def rest(self, tensors: Iterable[torch.Tensor], constant: Iterable[torch.Tensor] = ()) -> None:
        """Moves ``tensors`` away, and gives their memory back to the device; of ``constant`` ones, which never change,
        what is in them is copied once. Those of another device, and those whose memory is not torch's own (mapped
        files), stay where they are."""
        seen, still = set(), {storage._cdata for storage in _storages(constant)}
        for storage in _storages([*constant, *tensors]):
            here = storage.device.type == self._device.type and storage.resizable() and storage.nbytes()
            if not here or storage.data_ptr() in seen:
                continue
            seen.add(storage.data_ptr())
            if storage._cdata in self._constant:
                self._kept.append(self._constant[storage._cdata])
                continue
            size = storage.nbytes()
            page = self._pages[size].pop() if self._pages[size] else self._page(size)
            page.copy_(_bytes(storage), non_blocking=True)
            self._kept.append((storage, page))
            if storage._cdata in still:
                self._constant[storage._cdata] = storage, page
        self._synchronize()
        for storage, _ in self._kept:
            storage.resize_(0)
        release(self._device)

    @torch.no_grad()
    def wake(self) -> None:
        """Brings back what `rest` has moved away."""
        for storage, page in self._kept:
            _grow(storage, page.numel(), self._device)
            _bytes(storage).copy_(page, non_blocking=True)
        self._synchronize()
        if self._device.type == "cuda":
            for storage, page in self._kept:
                if storage._cdata not in self._constant:
                    self._pages[page.numel()].append(page)
        self._kept = []

    def forget(self) -> None:
        """What was said never to change is not there any more."""
        for _, page in self._constant.values():
            self._pages[page.numel()].append(page)
        self._constant.clear()

    def _synchronize(self) -> None:
        """With all devices that something is kept of."""
        for device in {storage.device for storage, _ in self._kept if storage.device.type == "cuda"}:
            torch.cuda.synchronize(device)

    def _page(self, size: int) -> torch.Tensor:
        page = torch.empty(size, dtype=torch.uint8)
        if self._device.type == "cuda" and size >= WORTH_PINNING:
            pin(page)
        return page


def forget(tensors: Iterable[torch.Tensor]) -> None:
    """Gives the memory of ``tensors`` back to their device; what was in them is lost. See `remember`."""
    for tensor in tensors:
        tensor.untyped_storage().resize_(0)


def remember(tensors: Iterable[torch.Tensor]) -> None:
    """Gives ``tensors``, which were forgotten, their memory again, all zero."""
    for tensor in tensors:
        _grow(tensor.untyped_storage(), tensor.numel() * tensor.element_size(), tensor.device)
        tensor.zero_()


def release(device: torch.device) -> None:
    """What nobody holds of ``device``'s memory is free for other processes."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _grow(storage: torch.UntypedStorage, size: int, device: torch.device) -> None:
    """Waits where the memory is not free yet: a process that was killed a moment ago may still have it."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            storage.resize_(size)
            return
        except torch.OutOfMemoryError:
            if time.monotonic() > deadline:
                raise
            release(device)
            time.sleep(RETRY_S)


def _storages(tensors: Iterable[torch.Tensor]) -> Iterator[torch.UntypedStorage]:
    return (part.untyped_storage() for tensor in tensors for part in _plain(tensor))


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """The tensors with memory that ``tensor`` is made of: a DTensor's local part, the parts of a quantized one."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(part := getattr(tensor, name), torch.Tensor):
            yield from _plain(part)


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
