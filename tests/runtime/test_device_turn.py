"""The trainer and its guests at one device: never both, whoever dies whenever."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from penstock.services.runtime.device_locks import Lock
from penstock.services.runtime.device_turn import Guest, GuestsTurn, LearnersTurn, TurnError, devices_here, forget_turns
from tests.preflight.nvml import FakeNvml

PROGRAM = """
import fcntl, os, pathlib, random, sys, time
from penstock.services.runtime.device_turn import Guest, GuestsTurn, LearnersTurn

kind, name, folder, seed = sys.argv[1], sys.argv[2], pathlib.Path(sys.argv[3]), int(sys.argv[4])
guest = kind == "guest"
rng, here = random.Random(seed), folder / "here"
log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)

devices = set(name.split("+"))

def use(seconds):
    mine = here / f"{kind}.{name}.{os.getpid()}"
    mine.touch()
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for other in os.listdir(here):
            other_kind, where, pid = other.split(".")
            alone = other_kind != kind or not guest and int(pid) != os.getpid()
            if alone and devices & set(where.split("+")) and os.path.exists(f"/proc/{pid}/cwd"):
                if (here / other).exists():
                    os.write(log, f"{mine.name} beside {other}\\n".encode())
        time.sleep(0.0005)
    mine.unlink(missing_ok=True)
    os.write(log, f"{kind}\\n".encode())

if not guest:
    opens, ranks = kind == "trainer", enumerate(sorted(devices))
    turns = [LearnersTurn(folder, device, f"{kind}-{rank}", 20.0, not rank, opens) for rank, device in ranks]
    while True:
        turns[0].queue()
        for turn in turns:
            turn.take()
        use(rng.uniform(0, 0.03))
        for turn in turns:
            turn.give()
        time.sleep(rng.uniform(0, 0.03))
else:
    turn = GuestsTurn(folder, tuple(sorted(devices)), name)
    turn.enter()
    guest = Guest(turn, lambda: None, lambda: None)
    while True:
        if guest.poll():
            use(rng.uniform(0, 0.01))
        time.sleep(0.001)
"""


def test_never_both_and_a_death_gives_back(tmp_path: Path) -> None:
    """A trainer on two devices, a critic on both and another on one, a guest on that, another on both: all are killed
    again and again, and nobody waits for the dead."""
    (tmp_path / "here").mkdir()
    rng, alive = random.Random(0), {}

    def start(kind: str, name: str) -> None:
        command = [sys.executable, "-c", PROGRAM, kind, name, str(tmp_path), str(rng.randrange(999))]
        alive[kind, name] = subprocess.Popen(command)

    everyone = [("trainer", "one+two"), ("critic", "one+two"), ("other", "two"), ("guest", "two"), ("guest", "one+two")]
    try:
        for who in everyone:
            start(*who)
        end = time.monotonic() + 8
        while time.monotonic() < end:
            time.sleep(rng.uniform(0.2, 0.8))
            victim = rng.choice(everyone)
            alive[victim].kill()
            alive[victim].wait()
            start(*victim)
        assert all(process.poll() is None for process in alive.values())
    finally:
        for process in alive.values():
            process.kill()
            process.wait()
    log = (tmp_path / "log").read_text().splitlines()
    assert not [line for line in log if "beside" in line]
    assert min(log.count(kind) for kind in ("trainer", "critic", "other", "guest")) > 10


def test_whoever_does_not_give_up_is_named(tmp_path: Path) -> None:
    guest, trainer = GuestsTurn(tmp_path, ("gpu",), "rollout-0"), LearnersTurn(tmp_path, "gpu", "trainer", 0.1)
    assert guest.take() and guest.take(), "it has it still"
    with pytest.raises(TurnError, match=r"rollout-0 \(pid \d+\) did not give up gpu within 0.1 s \(run.turn_s\)"):
        trainer.take()
    assert not guest.wanted(), "who has given up wants nothing"
    guest.give()
    trainer.take()
    assert trainer.waited_s < 0.1 and guest.wanted() and not guest.take()
    held = trainer.held_s
    assert held > 0.1, "also what was in vain"
    trainer.give()
    assert trainer.held_s == trainer.held_s >= held and guest.take()
    second = LearnersTurn(tmp_path, "gpu", "trainer", 0.1)
    guest.give()
    trainer.take()
    with pytest.raises(TurnError, match=r"trainer \(pid \d+\) did not give up gpu"):
        second.take()


def test_a_learner_waits_for_another_however_long_that_works_and_each_second_is_counted_once(tmp_path: Path) -> None:
    trainer = LearnersTurn(tmp_path, "gpu", "trainer", 0.05)
    critic = LearnersTurn(tmp_path, "gpu", "critic", 0.05, opens=False)
    critic.queue()
    critic.take()
    begun = time.monotonic()
    trainer.remind()
    time.sleep(0.05)
    trainer.remind()
    assert 0.04 < trainer.held_s < 0.2 and trainer.wanted()
    queueing = threading.Thread(target=trainer.queue)
    queueing.start()
    time.sleep(0.3)
    assert queueing.is_alive(), "longer than run.turn_s"
    critic.give()
    queueing.join(5)
    trainer.take()
    trainer.give()
    assert trainer.waited_s > 0.25 and trainer.held_s <= time.monotonic() - begun + 0.01


def test_who_has_waited_goes_before_who_has_given(tmp_path: Path) -> None:
    trainer, critic = (LearnersTurn(tmp_path, "gpu", name, 5.0) for name in ("trainer", "critic"))
    critic.queue()
    critic.take()
    assert not trainer.leads()
    critic.give()
    assert not critic.leads(), "the trainer waits"
    assert trainer.leads()
    trainer.take()
    assert not critic.leads()
    trainer.give()
    assert not trainer.leads() and critic.leads()


def test_a_wish_is_not_lost_where_a_guest_looks_at_that_moment(tmp_path: Path) -> None:
    rank, guest = (
        LearnersTurn(tmp_path, "gpu", "trainer-1", 5.0, first=False),
        GuestsTurn(tmp_path, ("gpu",), "rollout-0"),
    )
    looked_at = Lock(tmp_path / "gpu" / "trainer-1.learner")
    assert looked_at.take(shared=True)
    threading.Timer(0.05, looked_at.give).start()
    rank.want()
    assert not guest.take()


def test_a_guest_sleeps_and_wakes_and_other_threads_wait_for_it(tmp_path: Path) -> None:
    did: list[str] = []
    turn, trainer = GuestsTurn(tmp_path, ("gpu",), "rollout-0"), LearnersTurn(tmp_path, "gpu", "trainer", 5)
    assert turn.take()
    guest = Guest(turn, lambda: did.append("sleep"), lambda: did.append("wake"))
    assert guest.poll() and guest.awake
    taking = threading.Thread(target=trainer.take)
    taking.start()
    while guest.poll():
        time.sleep(0.001)
    taking.join()

    def prepare() -> None:
        with guest.at_work():
            did.append("prepare")

    preparing = threading.Thread(target=prepare)
    preparing.start()
    time.sleep(0.05)
    assert did == ["sleep"] and not guest.poll() and guest.slept_s > 0.04
    trainer.give()
    assert guest.poll()
    preparing.join()
    slept = guest.slept_s
    assert did == ["sleep", "wake", "prepare"] and slept == guest.slept_s


def test_guests_begin_after_the_trainer(tmp_path: Path) -> None:
    folder = tmp_path / "turns"
    turn, trainer = GuestsTurn(folder, ("gpu",), "rollout-0"), LearnersTurn(folder, "gpu", "trainer", 5)
    entering = threading.Thread(target=turn.enter)
    entering.start()
    time.sleep(0.05)
    trainer.take()
    assert entering.is_alive()
    trainer.give()
    entering.join(5)
    assert not entering.is_alive()
    forget_turns(tmp_path)
    threading.Thread(target=(later := GuestsTurn(folder, ("gpu",), "rollout-1")).enter, daemon=True).start()
    time.sleep(0.05)
    turn.give()
    trainer.take()
    assert later.wanted(), "it waits"
    trainer.give()


def test_a_child_does_not_keep_its_parents_locks(tmp_path: Path) -> None:
    program = f"""
import os, pathlib, time
from penstock.services.runtime.device_turn import GuestsTurn
GuestsTurn(pathlib.Path({str(tmp_path)!r}), ("gpu",), "rollout-0").take()
if os.fork() == 0:
    time.sleep(5)
os.kill(os.getpid(), 9)
"""
    subprocess.run([sys.executable, "-c", program], check=False)
    LearnersTurn(tmp_path, "gpu", "trainer", 0.5).take()


def test_devices_have_one_name_for_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeNvml(monkeypatch, (80.0, 80.0), "580.65.06", 13000)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    both = devices_here("auto", 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert devices_here("cuda", 1) == devices_here("auto") == both[1:] and len(set(both)) == 2
    assert devices_here("cpu", 1)[0].startswith("cpu-")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert devices_here("auto", 1) == devices_here("cpu", 1)


STARTS = """
import pathlib, sys, time
from penstock.services.runtime.device_turn import Guest, GuestsTurn

turn = GuestsTurn(pathlib.Path(sys.argv[1]), tuple(sys.argv[2].split("+")), f"guest-{sys.argv[3]}")
turn.enter()
begun = time.monotonic()
time.sleep(0.3)
guest = Guest(turn, lambda: None, lambda: None)
print(begun, time.monotonic(), flush=True)
guest.poll()
time.sleep(60)
"""


def test_guests_begin_one_after_the_other(tmp_path: Path) -> None:
    """Each measures what memory is free on its devices; one that dies while it begins holds up nobody."""
    LearnersTurn(tmp_path, "one", "trainer", 1.0).remind()
    kinds = ["one", "one+two", "two"]
    started = [
        subprocess.Popen([sys.executable, "-c", STARTS, str(tmp_path), kind, str(number)], stdout=subprocess.PIPE)
        for number, kind in enumerate([*kinds, "one"])
    ]
    try:
        time.sleep(0.6)
        started[-1].kill()
        found = {}
        for kind, process in zip(kinds, started, strict=False):
            assert process.stdout
            found[kind] = [float(word) for word in process.stdout.readline().split()]
        for kind in ("one", "two"):
            (_, end), (begin, _) = sorted((found[kind], found["one+two"]))
            assert end <= begin, "on one device one at a time"
    finally:
        for process in started:
            process.kill()
            process.wait()


def test_nobody_leaves_a_device_while_another_measures_it(tmp_path: Path) -> None:
    trainer, slept = LearnersTurn(tmp_path, "one", "trainer", 5.0), []
    trainer.remind()
    first, second = (GuestsTurn(tmp_path, ("one",), name) for name in ("first", "second"))
    first.enter()
    guest = Guest(first, lambda: slept.append(1), lambda: None)
    second.enter()
    taking = threading.Thread(target=trainer.take)
    taking.start()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        assert guest.poll() and not slept, "the trainer waits for both"
    other = Guest(second, lambda: slept.append(2), lambda: None)
    while taking.is_alive():
        guest.poll()
        other.poll()
    assert sorted(slept) == [1, 2]
