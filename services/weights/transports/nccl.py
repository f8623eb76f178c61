"""NCCL by its own C interface: a group that may fail, and costs nobody but itself.

torch's process group makes its communicator inside the first broadcast, where nothing limits the wait, and its watchdog
ends the whole process over a stalled peer. Here every call is made in a thread that may be left behind; no call
blocks (``ncclConfig_t.blocking = 0``): it has happened once NCCL's report says so, and nothing may be asked before;
broadcasts are followed by events on a stream of their own; whoever waits looks at the clock and at that report of
errors; and what failed is aborted by us.
"""

from __future__ import annotations

import ctypes
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import AbstractContextManager, nullcontext
from ctypes import c_char, c_char_p, c_int, c_size_t, c_uint, c_void_p
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog
import torch

from penstock.services.weights.queues import Event, Queue, use_device

log = structlog.get_logger()

LIBRARY = "PENSTOCK_NCCL"
"""Path of a libnccl.so to use instead of the one that torch brings."""
SUCCESS, IN_PROGRESS = 0, 7
UINT8 = 1
UNDEFINED = -(1 << 31)
MAGIC, CONFIG_VERSION = 0xCAFEBEEF, 21800
POLL_S = 0.0001
ABORT_S = 5.0


around_meeting: Callable[[], AbstractContextManager[None]] = nullcontext
"""Around the making of a group: who has set variables of NCCL's for groups of its own takes them away there, since all
members of a group must have the same."""


class NcclError(RuntimeError):
    """What NCCL says, or that it says nothing."""


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", c_char * 128)]


class _Config(ctypes.Structure):
    """``ncclConfig_t`` as of NCCL 2.18; a newer NCCL takes what is missing as its defaults."""

    _fields_ = [
        ("size", c_size_t), ("magic", c_uint), ("version", c_uint), ("blocking", c_int), ("cga_cluster_size", c_int),
        ("min_ctas", c_int), ("max_ctas", c_int), ("net_name", c_char_p), ("split_share", c_int),
    ]  # fmt: skip


class Nccl:
    """The library. Raises `NcclError` where there is none."""

    def __init__(self) -> None:
        path = os.environ.get(LIBRARY) or _bundled()
        try:
            self._library = ctypes.CDLL(path)
        except OSError as error:
            raise NcclError(f"no NCCL: {error} ({LIBRARY} may name another libnccl.so)") from None
        self._library.ncclGetErrorString.restype = c_char_p
        self._library.ncclCommInitRankConfig.argtypes = [c_void_p, c_int, _UniqueId, c_int, c_void_p]
        self._library.ncclBroadcast.argtypes = [c_void_p, c_void_p, c_size_t, c_int, c_int, c_void_p, c_void_p]
        for name in ("ncclCommAbort", "ncclCommDestroy"):
            getattr(self._library, name).argtypes = [c_void_p]
        self._library.ncclCommGetAsyncError.argtypes = [c_void_p, c_void_p]

    def unique_id(self) -> bytes:
        """A new group's name, 128 bytes, made by its rank 0."""
        made = _UniqueId()
        self._check(self._library.ncclGetUniqueId(ctypes.byref(made)))
        return bytes(made)

    def begin(self, size: int, name: bytes, rank: int) -> c_void_p:
        """Begins to make a communicator; it may be used once `state` is `SUCCESS`."""
        config = _Config(
            ctypes.sizeof(_Config), MAGIC, CONFIG_VERSION, 0, UNDEFINED, UNDEFINED, UNDEFINED, None, UNDEFINED
        )
        communicator = c_void_p()
        code = self._library.ncclCommInitRankConfig(
            ctypes.byref(communicator), size, _UniqueId.from_buffer_copy(name), rank, ctypes.byref(config)
        )
        self._check(code)
        return communicator

    def state(self, communicator: c_void_p) -> int:
        """`SUCCESS`, `IN_PROGRESS` or an error's code."""
        found = c_int()
        self._check(self._library.ncclCommGetAsyncError(communicator, ctypes.byref(found)))
        return found.value

    def broadcast(self, buffer: torch.Tensor, root: int, communicator: c_void_p, stream: int) -> None:
        """Puts it in line: ``root``'s bytes into everybody's ``buffer`` (contiguous)."""
        place, count = buffer.data_ptr(), buffer.numel() * buffer.element_size()
        self._check(self._library.ncclBroadcast(place, place, count, UINT8, root, communicator, stream))

    def abort(self, communicator: c_void_p) -> None:
        """Ends it and whatever it does."""
        self._library.ncclCommAbort(communicator)

    def destroy(self, communicator: c_void_p) -> None:
        """Lets go of one that has nothing to do."""
        self._library.ncclCommDestroy(communicator)

    def say(self, code: int) -> str:
        """What an error's code means."""
        said: bytes = self._library.ncclGetErrorString(code)
        return said.decode()

    def _check(self, code: int) -> None:
        if code not in (SUCCESS, IN_PROGRESS):
            raise NcclError(self.say(code))


class NcclLane:
    """One communicator: as much of a process group as `broadcast_group` uses. Raises `NcclError` where it is not made
    by ``deadline`` (monotonic)."""

    def __init__(
        self,
        name: Callable[[Callable[[], bytes]], bytes],
        rank: int,
        size: int,
        device: torch.device,
        device_queue: Queue,
        deadline: float,
        gone: Callable[[], None] = lambda: None,
    ) -> None:
        """``name`` is given what makes a name, which it calls on rank 0 alone, and returns the group's. Broadcasts go
        into ``device_queue``, a queue of ``device``; ``gone`` is called, in whatever thread, once the group has nothing
        to do there any more, however it ended."""
        self._device, self._queue, self._gone = device, device_queue, gone
        try:
            self._nccl = Nccl()
        except NcclError:
            gone()
            raise
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._communicator: c_void_p | None = None
        self._left = False
        self._held: deque[_Given] = deque()
        """What NCCL may not be done with: freed, its memory would be somebody else's while a broadcast that does not
        end may still write there. A group that is left behind has it for good."""
        self._letting = threading.Lock()
        self._asking = threading.Lock()
        """The communicator is there: nobody asks it once it is being ended."""
        threading.Thread(target=self._run, name=f"nccl-{rank}", daemon=True).start()
        try:
            made = name(self._nccl.unique_id)
            with around_meeting():
                self._communicator = self._call(lambda: self._nccl.begin(size, made, rank), deadline, "be made")
                self._until(lambda: self._state() == SUCCESS, deadline, "be made: some rank does not answer")
        except BaseException:
            self.abort()
            raise

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> NcclWork:
        """Puts it in line."""
        (tensor,) = tensors
        deadline = time.monotonic() + options.timeout.total_seconds()

        def put() -> Event:
            assert self._communicator
            self.let_go()
            self._held.append(given := _Given(tensor))
            self._nccl.broadcast(tensor, options.rootRank, self._communicator, self._queue.handle)
            # It is in the queue by then; before, the event would lie before it, and the next call be refused.
            self._until(lambda: self._state() == SUCCESS, deadline, "take a broadcast")
            given.done = self._queue.mark()
            return given.done

        return NcclWork(self, self._call(put, deadline, "take a broadcast"))

    def let_go(self) -> None:
        """Of what NCCL is done with."""
        with self._letting:
            while self._held and (before := self._held[0].done) and before.query():
                self._held.popleft()

    def check(self) -> None:
        """Raises `NcclError` where NCCL reports that something is wrong."""
        self._state()

    def abort(self) -> None:
        """Ends the group. Waits for NCCL no longer than `ABORT_S`, and leaves it to itself then, with its queue."""
        with self._asking:
            if self._left:
                return
            self._left = True
        self._calls.put(None)
        if not self._communicator:
            self._gone()
        else:
            communicator = self._communicator

            def end() -> None:
                use_device(self._device)
                self._nccl.abort(communicator)
                self._gone()

            ending = threading.Thread(target=end, name="nccl-abort", daemon=True)
            ending.start()
            ending.join(ABORT_S)
            if ending.is_alive():
                log.warning("NCCL does not end its group: left behind", after_s=ABORT_S)

    def close(self) -> None:
        """Lets go of a group in good order, where it was not ended before."""
        with self._asking:
            if self._left or not self._communicator:
                return
            self._left = True
            communicator = self._communicator

        def end() -> None:
            self._nccl.destroy(communicator)
            self._gone()

        self._calls.put((end, Future()))
        self._calls.put(None)

    def _state(self) -> int:
        with self._asking:
            if self._left or not self._communicator:
                raise NcclError("the group was ended")
            state = self._nccl.state(self._communicator)
        if state not in (SUCCESS, IN_PROGRESS):
            raise NcclError(self._nccl.say(state))
        return state

    def _run(self) -> None:
        use_device(self._device)  # where NCCL makes the communicator
        while (entry := self._calls.get()) is not None:
            call, future = entry
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)

    def _call(self, call: Callable[[], Any], deadline: float, what: str) -> Any:
        future: Future[Any] = Future()
        self._calls.put((call, future))
        self._until(future.done, deadline, what)
        return future.result()

    def _until(self, condition: Callable[[], bool], deadline: float, what: str) -> None:
        while not condition():
            if time.monotonic() > deadline:
                raise NcclError(f"the group did not {what}")
            time.sleep(POLL_S)


@dataclass
class _Given:
    """What a broadcast reads or fills; and when that is done, once it is in line."""

    tensor: torch.Tensor
    done: Event | None = None


class NcclWork:
    """A broadcast in line."""

    def __init__(self, lane: NcclLane, event: Event) -> None:
        self._lane, self._event = lane, event

    def is_completed(self) -> bool:
        """Whether its bytes are there. Raises `NcclError` where NCCL has given it up."""
        self._lane.check()
        if done := self._event.query():
            self._lane.let_go()
        return done

    def wait(self) -> None:
        """Nothing is left to wait for once it `is_completed`."""


def _bundled() -> str:
    """The NCCL that torch brings, of whichever CUDA."""
    spec = find_spec("nvidia")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for found in sorted(Path(folder).glob("nccl/lib/libnccl.so*")):
            return str(found)
    return "libnccl.so.2"
