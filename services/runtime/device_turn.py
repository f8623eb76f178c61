"""Whose turn it is on devices that several processes of a run share: a learner's alone (the trainer, the critic), or
the guests' (rollouts, the reference).

Files in the run's folder, for each device: ``NAME.learner``, locked by a rank of a learner that wants the device or has
it, and ``NAME.guest``, locked by a guest as long as it uses the device. A guest locks its own file, then looks at the
learners'; a learner locks its own, then waits for all guests'. So whoever comes second sees the first. Of two learners
one has ``first``, a lock of the device of rank 0, which takes it before the other ranks ask for their devices: or each
learner could have some, and wait for the rest. ``NAME.working`` is locked by a rank that has its device: one whose
rank 0 has died may have it still. The kernel lets go of the locks of a process that dies, however it dies.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import structlog

from penstock.protocols.run_lock import machine
from penstock.services.runtime import health
from penstock.services.runtime.device_locks import Lock, Others
from penstock.services.runtime.gpus import chosen_gpus, visible_gpus

log = structlog.get_logger()

POLL_S = 0.005
MOST_POLL_S = 1.0
LOOKED_AT_S = 1.0
"""A lock that somebody looks at cannot be taken in that instant."""
YIELD_S = 1.0
SAY_EVERY_S = 30.0
LOOK_S = 0.01
"""A guest looks so often whether it is wanted, or may go on."""
TURNS = "turns"
"""Where the files are, in a run's folder."""
LEARNER, GUEST = ".learner", ".guest"
WORKING = ".working"
FIRST = "first"
BEGUN = "begun"
"""A file that is there once the trainer has let somebody else have a device: guests begin after it, since an engine
that measures what memory is free must not see others come and go."""
STARTING = "starting"
"""A file of each device that a guest locks while it begins, for the same reason."""


class TurnError(RuntimeError):
    """Somebody did not give a device up in time; says who."""


def devices_here(device: str, count: int = 0) -> tuple[str, ...]:
    """The first ``count`` GPUs that this process may use (0: all of them), or this machine's CPU, each by a name that
    is the same to all containers of the machine."""
    gpus = [] if device.startswith("cpu") else visible_gpus()
    if ":" in device:  # one by its number, which is not looked for here
        count = 0
    return named(gpus[: count or len(gpus)])


def named(gpus: Sequence[str]) -> tuple[str, ...]:
    """GPUs of this process, as CUDA_VISIBLE_DEVICES has them, or where there are none this machine's CPU, by such
    names."""
    if not gpus:
        return (f"cpu-{machine()}",)
    known = {name: gpu.uuid for name, gpu in chosen_gpus().items()}
    return tuple(known.get(name, name) for name in gpus)


def forget_turns(run_folder: Path) -> None:
    """Of a run that begins, or goes on: nobody has had a turn."""
    (run_folder / TURNS / BEGUN).unlink(missing_ok=True)


class LearnersTurn:
    """A rank's side, called ``name`` (``trainer``, ``trainer-1`` of several), at its ``device``; ``first`` is rank 0.
    ``patience_s`` is how long others may take to give that up (`run.turn_s`). Guests begin once one that ``opens`` has
    let them."""

    def __init__(
        self, folder: Path, device: str, name: str, patience_s: float, first: bool = True, opens: bool = True
    ) -> None:
        self._folder, self._device, self._patience_s, self._opens = folder, device, patience_s, opens
        here, learner = folder / device, name.partition("-")[0]
        self._own = Lock(here / f"{name}{LEARNER}", name)
        self._first = Lock(here / FIRST, name) if first else None
        self._working = Lock(here / f"{name}{WORKING}", name)
        self._guests = Others(here, GUEST)
        self._learners, self._workers = (Others(here, kind, besides=learner) for kind in (LEARNER, WORKING))
        self._held: tuple[float, float | None] = 0.0, None
        """Seconds of turns that are over, and since when the present one is; replaced at once, as others read it."""
        self._another: float | None = None
        """When another learner was last seen at work, if it was when it was last looked for."""
        self._yields_until = 0.0
        """Until then another learner, which was waiting when this one gave, may go first."""
        self.waited_s = 0.0
        """How long the last turn took to come."""

    @property
    def held_s(self) -> float:
        """For how long guests had to wait, up to now: also for another learner, as far as `remind` has seen."""
        over, since = self._held
        return over + (time.monotonic() - since if since is not None else 0.0)

    def wanted(self) -> bool:
        """Another learner has the device, or waits for it."""
        return bool(self._learners.busy())

    def want(self) -> None:
        """Guests give the device up, and do not take it again."""
        until = time.monotonic() + LOOKED_AT_S
        while not self._wants() and time.monotonic() < until:
            time.sleep(POLL_S)

    def leads(self) -> bool:
        """Whether no other learner may work here, from now on until `give`."""
        return not self._ahead()

    def queue(self, wait: Callable[[], None] = health.beat) -> None:
        """Until `leads`, however long another learner works, which is said each `SAY_EVERY_S`; ``wait`` is called
        meanwhile."""
        begun = said = time.monotonic()
        while ahead := self._ahead():
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                log.info("waiting for another learner", who=ahead[0].owner, waited_s=round(said - begun))
            wait()
            time.sleep(POLL_S)

    def take(self, wait: Callable[[], None] = health.beat) -> None:
        """Until the device is the learner's; ``wait`` is called meanwhile. Raises `TurnError`."""
        waited_s = 0.0
        while there := self._busy():
            if waited_s > self._patience_s:
                self._give()
                raise TurnError(
                    f"{' and '.join(lock.owner for lock in there)} did not give up {self._device} within "
                    f"{self._patience_s:g} s (run.turn_s)"
                )
            begun = time.monotonic()
            wait()
            time.sleep(POLL_S)
            waited_s += min(time.monotonic() - begun, MOST_POLL_S)  # it may have been stopped itself meanwhile
        self.waited_s = time.monotonic() - (self._held[1] or 0.0)
        log.debug("at work", waited_s=round(self.waited_s, 3))

    def give(self) -> None:
        """From now on the device is everybody else's."""
        log.debug("at rest")
        self._yields_until = time.monotonic() + YIELD_S if self.wanted() else 0.0
        self._give()
        self.remind()

    def remind(self) -> None:
        """While it is not this one's: guests may begin, also where somebody has begun the run's folder anew
        meanwhile."""
        if self._opens and not (self._folder / BEGUN).exists():
            (self._folder / BEGUN).touch()
        if self._held[1] is None:
            self._look(bool(self._workers.busy()))

    def _look(self, another: bool) -> None:
        """Counts how long another learner was at work, which is there now, or is not."""
        seen, now = self._another, time.monotonic()
        self._another = now if another else None
        self._held = self._held[0] + (now - seen if seen is not None else 0.0), None

    def _wants(self) -> bool:
        if self._held[1] is None:
            self._look(another=False)  # from here on it is counted as this one's
            self._held = self._held[0], time.monotonic()
        return self._own.take()

    def _give(self) -> None:
        for lock in (self._working, self._first, self._own):
            if lock:
                lock.give()
        over, since = self._held
        self._held = over + (time.monotonic() - since if since is not None else 0.0), None

    def _ahead(self) -> list[Lock]:
        """Who is to be waited for before guests are. Own locks are taken first, since others look at them."""
        if not self._wants():
            return [self._own]
        if waiting := self._goes_first():
            return waiting
        for lock in filter(None, (self._first, self._working)):
            if not lock.take():
                return [lock]
        others = self._workers.busy()
        if others and not self._first:  # else each of two could wait for the other
            self._working.give()
        return others

    def _goes_first(self) -> list[Lock]:
        """Another learner that was waiting when this one gave, and has not had its turn."""
        if time.monotonic() > self._yields_until:
            return []
        waiting = [] if self._workers.busy() else self._learners.busy()
        if not waiting:
            self._yields_until = 0.0
        return waiting

    def _busy(self) -> list[Lock]:
        """Who uses the device."""
        return self._ahead() or self._guests.busy()


class GuestsTurn:
    """A guest's side: ``name`` is its own among those of the run."""

    def __init__(self, folder: Path, devices: tuple[str, ...], name: str) -> None:
        self._folder = folder
        self._own = [Lock(folder / device / f"{name}{GUEST}", name) for device in devices]
        self._learners = [Others(folder / device, LEARNER) for device in devices]
        self._starting = [Lock(folder / device / STARTING, name) for device in sorted(devices)]

    def wanted(self) -> bool:
        """A learner has one of the devices, or waits for it."""
        return any(others.busy() for others in self._learners)

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

    def enter(self, goes_on: Callable[[], bool] = lambda: True) -> None:
        """Waits for the first turn, as long as a learner works, or another guest begins, until `started`; or where
        ``goes_on`` says no."""
        begun = said = time.monotonic()
        while goes_on() and not ((self._folder / BEGUN).exists() and self._may_start()):
            if time.monotonic() - said > SAY_EVERY_S:
                said = time.monotonic()
                owners = [lock.owner for others in self._learners for lock in others.busy()]
                starting = [lock.owner for lock in self._starting if lock.is_taken()]
                log.info("waiting for the device", learners=owners, starting=starting, waited_s=round(said - begun))
            health.beat()
            time.sleep(POLL_S)

    def _may_start(self) -> bool:
        if all(lock.take() for lock in self._starting) and self.take():
            return True
        self.started()
        return False

    def others_start(self) -> bool:
        """Another guest begins on one of the devices: a learner waits for it, and it measures what is free."""
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
    """Who sleeps while a learner works; it has the turn when this is made. ``sleep`` and ``wake`` are called by
    `poll`, in the thread that calls that."""

    def __init__(self, turn: GuestsTurn, sleep: Callable[[], None], wake: Callable[[], None]) -> None:
        self._turn, self._sleep, self._wake = turn, sleep, wake
        turn.started()
        self._lock = threading.Lock()
        self.awake = True
        self._slept_s, self._asleep_since, self._looked_at = 0.0, 0.0, 0.0

    def poll(self) -> bool:
        """Gives up the device where a learner wants it, takes it again where it may; returns whether it has it."""
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
