"""Whose turn it is on devices that several processes of a run share: the trainer's alone, or everybody else's.

Two kinds of files in the run's folder, for each device: ``trainer``, locked by a trainer that wants the device or has
it, and ``NAME.guest``, locked by a guest (a rollout, the reference) as long as it uses the device. A guest locks its
own file, then looks at the trainer's; the trainer locks its own, then waits for all guests'. So whoever comes second
sees the first. The kernel lets go of the locks of a process that dies, however it dies.
"""

from __future__ import annotations

import fcntl
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import structlog

from penstock.services.runtime import health
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import chosen_gpus, visible_gpus

log = structlog.get_logger()

POLL_S = 0.005
SAY_EVERY_S = 30.0
TURNS = "turns"
"""Where the files are, in a run's folder."""
TRAINER, GUEST = "trainer", ".guest"


class TurnError(RuntimeError):
    """Somebody did not give a device up in time; says who."""


def devices_here(device: str, count: int) -> tuple[str, ...]:
    """The ``count`` GPUs that this process computes on, or this machine's CPU, each by a name that is the same to all
    containers of the machine."""
    gpus = [] if device.startswith("cpu") else visible_gpus()
    if not gpus:
        return (f"cpu-{_machine()}",)
    known = {name: gpu.uuid for name, gpu in chosen_gpus().items()}
    return tuple(known.get(name, name) for name in gpus[:count])


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


class _Lock:
    """One file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)

    def take(self, shared: bool = False) -> bool:
        """Whether it is this process's now. Raises `SetupError` where the file system has no locks."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SetupError(
                f"run.placement=colocated: {self._path} cannot be locked ({error.strerror}); let run.folder lie on a "
                "file system that has flock"
            ) from None
        return True

    def sign(self) -> None:
        """Says whose it is, to who waits for it."""
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, str(os.getpid()).encode(), 0)

    def give(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def is_taken(self) -> bool:
        """By somebody else."""
        if self.take(shared=True):
            self.give()
            return False
        return True

    @property
    def owner(self) -> str:
        """Who took it last, for people."""
        return f"{self._path.name.removesuffix(GUEST)} (pid {os.pread(self._file, 20, 0).decode() or '?'})"


class TrainersTurn:
    """The trainer's side of it, for all ``devices`` of a machine; ``patience_s`` is how long guests may take to give
    them up (`run.turn_s`)."""

    def __init__(self, folder: Path, devices: tuple[str, ...], patience_s: float) -> None:
        self._folders = [folder / device for device in devices]
        self._locks = [_Lock(each / TRAINER) for each in self._folders]
        self._guests: dict[Path, _Lock] = {}
        self._patience_s = patience_s
        self._since: float | None = None
        self._held_s = 0.0
        self.waited_s = 0.0
        """How long the last turn took to come."""

    @property
    def held_s(self) -> float:
        """For how long guests had to wait, up to now."""
        since = self._since
        return self._held_s + (time.monotonic() - since if since is not None else 0.0)

    def take(self, wait: Callable[[], None] = health.beat) -> None:
        """Until the devices are the trainer's; ``wait`` is called meanwhile. Raises `TurnError`."""
        begun = time.monotonic()
        self._since = begun
        left = list(self._locks)
        while busy := self._busy(left):
            if time.monotonic() - begun > self._patience_s:
                self.give()
                raise TurnError(
                    f"{' and '.join(busy)} did not give up {self._folders[0].name} within {self._patience_s:g} s "
                    "(run.turn_s)"
                )
            wait()
            time.sleep(POLL_S)
        self.waited_s = time.monotonic() - begun
        log.debug("at work", waited_s=round(self.waited_s, 3))

    def give(self) -> None:
        """From now on the devices are everybody else's."""
        log.debug("at rest")
        for lock in self._locks:
            lock.give()
        if self._since is not None:
            self._held_s += time.monotonic() - self._since
            self._since = None

    def _busy(self, left: list[_Lock]) -> list[str]:
        """Who uses a device; of the trainer's own locks, those ``left`` are taken first, since guests look at them."""
        for lock in list(left):
            if lock.take():
                lock.sign()
                left.remove(lock)
        if left:
            return [lock.owner for lock in left]
        for folder in self._folders:
            for path in folder.glob(f"*{GUEST}"):
                if path not in self._guests:
                    self._guests[path] = _Lock(path)
        return [lock.owner for lock in self._guests.values() if lock.is_taken()]


class GuestsTurn:
    """A guest's side: ``name`` is its own among those of the run."""

    def __init__(self, folder: Path, devices: tuple[str, ...], name: str) -> None:
        self._own = [_Lock(folder / device / f"{name}{GUEST}") for device in devices]
        self._trainers = [_Lock(folder / device / TRAINER) for device in devices]

    def wanted(self) -> bool:
        """The trainer has one of the devices, or waits for it."""
        return any(lock.is_taken() for lock in self._trainers)

    def take(self) -> bool:
        """Whether all of the devices may be used, now and until `give`."""
        if not self.wanted():
            if all(lock.take() for lock in self._own):
                for lock in self._own:
                    lock.sign()
                if not self.wanted():
                    return True
            self.give()
        return False

    def give(self) -> None:
        """The devices are not used any more."""
        for lock in self._own:
            lock.give()

    def enter(self) -> None:
        """Waits for the first turn, as long as the trainer works."""
        begun = said = time.monotonic()
        while not self.take():
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                trainers = [lock.owner for lock in self._trainers if lock.is_taken()]
                log.info("waiting for the device", held_by=trainers, waited_s=round(said - begun))
            health.beat()
            time.sleep(POLL_S)


def enter(run_folder: Path, name: str, device: str, count: int = 1) -> GuestsTurn:
    """The turn of the guest ``name`` at the ``count`` devices that it computes on, once that has come."""
    turn = GuestsTurn(run_folder / TURNS, devices_here(device, count), name)
    turn.enter()
    return turn


class Guest:
    """Who sleeps while the trainer works; it has the turn when this is made. ``sleep`` and ``wake`` are called by
    `poll`, in the thread that calls that."""

    def __init__(self, turn: GuestsTurn, sleep: Callable[[], None], wake: Callable[[], None]) -> None:
        self._turn, self._sleep, self._wake = turn, sleep, wake
        self._lock = threading.Lock()
        self.awake = True
        self._slept_s, self._asleep_since = 0.0, 0.0

    def poll(self) -> bool:
        """Gives up the device where the trainer wants it, takes it again where it may; returns whether it has it."""
        if self.awake:
            if self._turn.wanted():
                self._lock.acquire()
                begun = time.monotonic()
                self._sleep()
                self.awake, self._asleep_since = False, time.monotonic()
                log.debug("asleep", took_s=round(self._asleep_since - begun, 3))
                self._turn.give()
        elif self._turn.take():
            begun = time.monotonic()
            self._wake()
            self._slept_s += begun - self._asleep_since
            self.awake = True
            self._lock.release()
            log.debug("awake", took_s=round(time.monotonic() - begun, 3))
        return self.awake

    @property
    def slept_s(self) -> float:
        """Altogether, up to now."""
        return self._slept_s + (0.0 if self.awake else time.monotonic() - self._asleep_since)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Around what another thread does on the device: it waits until this is awake, and is waited for."""
        with self._lock:
            yield
