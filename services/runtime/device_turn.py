"""Whose turn it is on devices that several processes of a run share: the trainer's alone, or everybody else's.

Two kinds of files in the run's folder, for each device: ``NAME.trainer``, locked by a rank of the trainer that wants
the device or has it, and ``NAME.guest``, locked by a guest (a rollout, the reference) as long as it uses the device. A
guest locks its own file, then looks at the trainers'; a trainer locks its own, then waits for all guests'. So whoever
comes second sees the first. The kernel lets go of the locks of a process that dies, however it dies.
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
LOOK_S = 0.01
"""A guest looks so often whether it is wanted, or may go on."""
TURNS = "turns"
"""Where the files are, in a run's folder."""
TRAINER, GUEST = ".trainer", ".guest"
BEGUN = "begun"
"""A file that is there once the trainer has let somebody else have a device: guests begin after it, since an engine
that measures what memory is free must not see others come and go."""
STARTING = "starting"
"""A file of each device that a guest locks while it begins, for the same reason."""

_open: set[int] = set()


class TurnError(RuntimeError):
    """Somebody did not give a device up in time; says who."""


def devices_here(device: str, count: int = 0) -> tuple[str, ...]:
    """The first ``count`` GPUs that this process may use (0: all of them), or this machine's CPU, each by a name that
    is the same to all containers of the machine."""
    gpus = [] if device.startswith("cpu") else visible_gpus()
    if not gpus:
        return (f"cpu-{_machine()}",)
    known = {name: gpu.uuid for name, gpu in chosen_gpus().items()}
    return tuple(known.get(name, name) for name in gpus[: count or len(gpus)])


def forget_turns(run_folder: Path) -> None:
    """Of a run that begins, or goes on: nobody has had a turn."""
    (run_folder / TURNS / BEGUN).unlink(missing_ok=True)


def _machine() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _close_in_child() -> None:
    """A child that was forked would hold its parent's locks after the parent's death."""
    while _open:
        os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)


class _Lock:
    """One file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._file = path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        self._mine = False
        _open.add(self._file)

    def take(self, shared: bool = False) -> bool:
        """Whether it is this process's now, or was already; who waits for it can read whose it is. Raises `SetupError`
        where the file system has no locks."""
        try:
            fcntl.flock(self._file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        except OSError as error:
            raise SetupError(
                f"run.placement=colocated: {self._path} cannot be locked ({error.strerror}); let run.folder lie on a "
                "file system that has flock"
            ) from None
        if not shared and not self._mine:
            self._mine = True
            os.ftruncate(self._file, 0)
            os.pwrite(self._file, str(os.getpid()).encode(), 0)
        return True

    def give(self) -> None:
        self._mine = False
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
        return f"{self._path.stem} (pid {os.pread(self._file, 20, 0).decode() or '?'})"


class _Others:
    """The locks of one kind of a device, whoever has made them."""

    def __init__(self, folder: Path, kind: str) -> None:
        self._folder, self._kind = folder, kind
        self._known: dict[Path, _Lock] = {}
        folder.mkdir(parents=True, exist_ok=True)

    def busy(self) -> list[_Lock]:
        """Those that are taken."""
        for path in self._folder.iterdir():
            if path.suffix == self._kind and path not in self._known:
                self._known[path] = _Lock(path)
        return [lock for lock in self._known.values() if lock.is_taken()]


class TrainersTurn:
    """A rank's side, called ``name``, at its ``device``; ``patience_s`` is how long guests may take to give that up
    (`run.turn_s`)."""

    def __init__(self, folder: Path, device: str, name: str, patience_s: float) -> None:
        self._folder, self._device, self._patience_s = folder, device, patience_s
        self._own = _Lock(folder / device / f"{name}{TRAINER}")
        self._guests = _Others(folder / device, GUEST)
        self._held: tuple[float, float | None] = 0.0, None
        """Seconds of turns that are over, and since when the present one is; replaced at once, as others read it."""
        self.waited_s = 0.0
        """How long the last turn took to come."""

    @property
    def held_s(self) -> float:
        """For how long guests had to wait, up to now."""
        over, since = self._held
        return over + (time.monotonic() - since if since is not None else 0.0)

    def take(self, wait: Callable[[], None] = health.beat) -> None:
        """Until the device is the trainer's; ``wait`` is called meanwhile. Raises `TurnError`."""
        begun = time.monotonic()
        self._held = self._held[0], begun
        while busy := self._busy():
            if time.monotonic() - begun > self._patience_s:
                self._give()
                raise TurnError(
                    f"{' and '.join(lock.owner for lock in busy)} did not give up {self._device} within "
                    f"{self._patience_s:g} s (run.turn_s)"
                )
            wait()
            time.sleep(POLL_S)
        self.waited_s = time.monotonic() - begun
        log.debug("at work", waited_s=round(self.waited_s, 3))

    def give(self) -> None:
        """From now on the device is everybody else's."""
        log.debug("at rest")
        self._give()
        self.remind()

    def remind(self) -> None:
        """Guests may begin, also where somebody has begun the run's folder anew meanwhile."""
        if not (self._folder / BEGUN).exists():
            (self._folder / BEGUN).touch()

    def _give(self) -> None:
        self._own.give()
        over, since = self._held
        self._held = over + (time.monotonic() - since if since is not None else 0.0), None

    def _busy(self) -> list[_Lock]:
        """Who uses the device. The own lock is taken first, since guests look at it."""
        return self._guests.busy() if self._own.take() else [self._own]


class GuestsTurn:
    """A guest's side: ``name`` is its own among those of the run."""

    def __init__(self, folder: Path, devices: tuple[str, ...], name: str) -> None:
        self._folder = folder
        self._own = [_Lock(folder / device / f"{name}{GUEST}") for device in devices]
        self._trainers = [_Others(folder / device, TRAINER) for device in devices]
        self._starting = [_Lock(folder / device / STARTING) for device in sorted(devices)]

    def wanted(self) -> bool:
        """The trainer has one of the devices, or waits for it."""
        return any(others.busy() for others in self._trainers)

    def take(self) -> bool:
        """Whether all of the devices may be used, now and until `give`."""
        if not self.wanted():
            if all(lock.take() for lock in self._own) and not self.wanted():
                return True
            self.give()
        return False

    def give(self) -> None:
        """The devices are not used any more."""
        for lock in self._own:
            lock.give()

    def enter(self) -> None:
        """Waits for the first turn, as long as the trainer works, or another guest begins, until `started`."""
        begun = said = time.monotonic()
        while not ((self._folder / BEGUN).exists() and self._may_start()):
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                owners = [lock.owner for others in self._trainers for lock in others.busy()]
                starting = [lock.owner for lock in self._starting if lock.is_taken()]
                log.info("waiting for the device", trainers=owners, starting=starting, waited_s=round(said - begun))
            health.beat()
            time.sleep(POLL_S)

    def _may_start(self) -> bool:
        if all(lock.take() for lock in self._starting) and self.take():
            return True
        self.started()
        return False

    def others_start(self) -> bool:
        """Another guest begins on one of the devices: the trainer waits for it, and it measures what is free."""
        return any(lock.is_taken() for lock in self._starting)

    def started(self) -> None:
        """It has on its devices what it will have there: the next guest may begin."""
        for lock in self._starting:
            lock.give()


def enter(run_folder: Path, name: str, device: str, count: int = 0) -> GuestsTurn:
    """The turn of the guest ``name`` at the devices that it computes on (`devices_here`), once that has come. Who has
    it begins alone there, until a `Guest` is made of it."""
    turn = GuestsTurn(run_folder / TURNS, devices_here(device, count), name)
    turn.enter()
    return turn


class Guest:
    """Who sleeps while the trainer works; it has the turn when this is made. ``sleep`` and ``wake`` are called by
    `poll`, in the thread that calls that."""

    def __init__(self, turn: GuestsTurn, sleep: Callable[[], None], wake: Callable[[], None]) -> None:
        self._turn, self._sleep, self._wake = turn, sleep, wake
        turn.started()
        self._lock = threading.Lock()
        self.awake = True
        self._slept_s, self._asleep_since, self._looked_at = 0.0, 0.0, 0.0

    def poll(self) -> bool:
        """Gives up the device where the trainer wants it, takes it again where it may; returns whether it has it."""
        if self.awake:
            now = time.monotonic()
            if now - self._looked_at < LOOK_S:  # locks on a network's disk are not asked for each token
                return True
            self._looked_at = now
            if self._turn.wanted() and not self._turn.others_start():
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
