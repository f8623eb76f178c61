"""The weight channel's protocol where messages are lost, repeated, reordered and damaged, and processes die: nobody
ever serves bytes that are not a committed version's, and everybody who lives ends at the latest one."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from penstock.protocols.digests import Gmac
from penstock.protocols.versions import DigestError, Digests, digests_of, lay_out
from penstock.protocols.weight_channel import BucketError, PublishState, VersionAssembly
from penstock.services.weights.config import WeightsConfig

GMAC = Gmac.of_run("test")


EXAMPLES = int(os.environ.get("PENSTOCK_EXAMPLES", "1000")) // 2
LAYOUT = lay_out([("w", "float32", (48,), 192)], 64)
BUCKETS = len(LAYOUT.spans)
DEADLINE_S = 10.0


@dataclass
class Version:
    number: int
    content: bytes
    digests: Digests


@dataclass
class Receiver:
    """What `services.weights.receiver.receiver` does around an `VersionAssembly`, without threads."""

    identity: str
    world: World
    newest: tuple[int, int] | None = None
    intake: VersionAssembly | None = None
    shadow: bytearray = field(default_factory=lambda: bytearray(LAYOUT.nbytes))
    commits: dict[tuple[int, int], Digests] = field(default_factory=dict)
    serving: tuple[int, str, bytes] | None = None
    opened_at: float = 0.0

    def propose(self, epoch: int, version: int) -> None:
        if self.newest is not None and (epoch, version) <= self.newest:
            return
        self.newest, self.opened_at = (epoch, version), self.world.now
        self.intake, self.shadow = VersionAssembly(epoch, version, LAYOUT, GMAC), bytearray(LAYOUT.nbytes)
        self.settle()

    def bucket(self, epoch: int, version: int, index: int, data: bytes) -> None:
        if self.intake is None:
            return
        try:
            self.accept(epoch, version, index, data)
        except BucketError:
            return
        start, end = LAYOUT.spans[index]
        self.shadow[start:end] = data
        self.settle()

    def accept(self, epoch: int, version: int, index: int, data: bytes) -> None:
        assert self.intake
        self.intake.bucket(epoch, version, index, memoryview(data))

    def commit(self, epoch: int, version: int, digests: Digests) -> None:
        self.commits[epoch, version] = digests
        self.settle()

    def settle(self) -> None:
        intake = self.intake
        if intake is None or (intake.epoch, intake.version) not in self.commits:
            return
        if intake.expected is None:
            try:
                intake.commit(intake.epoch, intake.version, self.commits[intake.epoch, intake.version])
            except DigestError:
                self.fail()
                return
        if self.complete(intake):
            assert intake.expected
            self.serving = intake.version, intake.expected.whole, bytes(self.shadow)
            self.world.say("loaded", self.identity, intake.epoch, intake.version, intake.expected.whole)
            self.intake = None

    def complete(self, intake: VersionAssembly) -> bool:
        return intake.whole() is not None

    def ask_again(self) -> None:
        """For what is missing, from the snapshot."""
        if self.intake and self.intake.expected:
            for index in self.intake.missing:
                self.world.say("fetch", self.identity, self.intake.epoch, self.intake.version, index)

    def fail(self) -> None:
        if self.intake:
            self.world.say("failed", self.identity, self.intake.epoch, self.intake.version)
            self.intake = None

    def late(self) -> None:
        if self.intake and self.world.now - self.opened_at > DEADLINE_S:
            self.fail()


class World:
    """A trainer, a broker that knows who lives, receivers, and a network that keeps no promises."""

    receiver: type[Receiver] = Receiver

    def __init__(self, random: Any, receivers: int) -> None:
        self.random, self.now, self.started = random, 0.0, 0
        self.network: list[tuple[Any, ...]] = []
        self.lossy = True
        self.committed: set[tuple[int, str]] = set()
        self.version = 0
        self.receivers: dict[str, Receiver] = {}
        self.start_trainer()
        for _ in range(receivers):
            self.join()

    def say(self, *message: Any) -> None:
        self.network.append(message)

    # --- processes ---------------------------------------------------------------------------------------------------

    def start_trainer(self) -> None:
        """Also again, from a checkpoint: versions are made anew, with other bytes."""
        self.started += 1
        self.sender = PublishState(1000 * self.started, lambda slowest_s: DEADLINE_S)
        self.snapshot: Version | None = None
        self.version = max(0, self.version - self.random.randrange(3))
        self.network = [message for message in self.network if message[0] not in ("fetch", "loaded", "failed")]

    def join(self) -> None:
        identity = f"rollout#{len(self.committed)}-{self.random.random()}"
        self.receivers[identity] = self.receiver(identity, self)

    def die(self) -> None:
        if len(self.receivers) > 1:
            del self.receivers[self.random.choice(sorted(self.receivers))]

    # --- trainer -----------------------------------------------------------------------------------------------------

    def hear_who_lives(self) -> None:
        """From the broker, which knows what each has acknowledged."""
        latest = {(v.number, v.digests.whole) for v in [self.snapshot] if v}
        serves = {}
        for identity, receiver in self.receivers.items():
            served = receiver.serving[:2] if receiver.serving else (-1, "")
            serves[identity] = served if served in latest else (-1, "")
        self.sender.present(serves)

    def invite(self) -> None:
        for identity in self.sender.invitations(self.now):
            self.say("invite", identity)

    def publish(self) -> None:
        content = self.random.randbytes(LAYOUT.nbytes)
        version = Version(self.version, content, digests_of(LAYOUT, memoryview(content), GMAC))
        self.version += 1
        epoch = self.sender.open(version.number, self.now)
        for identity in epoch.members:
            self.say("propose", identity, epoch.number, version.number)
            for index in range(BUCKETS):
                self.send_bucket(identity, epoch.number, version, index)
        if self.random.random() < 0.1:  # dies before the version is committed: it never existed
            self.start_trainer()
            return
        self.snapshot = version
        self.committed.add((version.number, version.digests.whole))
        self.sender.committed(version.number, version.digests.whole)
        for identity in epoch.members:
            self.say("commit", identity, epoch.number, version.number, version.digests)

    def seed(self) -> None:
        for identity, epoch, _ in self.sender.seeds(self.now):
            assert self.snapshot
            self.say("propose", identity, epoch, self.snapshot.number)
            self.say("commit", identity, epoch, self.snapshot.number, self.snapshot.digests)

    def send_bucket(self, identity: str, epoch: int, version: Version, index: int) -> None:
        start, end = LAYOUT.spans[index]
        data = bytearray(version.content[start:end])
        if self.lossy and self.random.random() < 0.1:
            data[self.random.randrange(len(data))] ^= 1 << self.random.randrange(8)
        self.say("bucket", identity, epoch, version.number, index, bytes(data))

    # --- network -----------------------------------------------------------------------------------------------------

    def deliver(self) -> None:
        if not self.network:
            return
        place = self.random.randrange(len(self.network)) if self.lossy else 0
        message = self.network[place]
        fate = self.random.random() if self.lossy else 1.0
        if fate > 0.1:  # else it comes again later
            del self.network[place]
        if 0.1 < fate < 0.2:
            return  # lost
        self.arrive(*message)

    def arrive(self, kind: str, identity: str, *rest: Any) -> None:
        receiver = self.receivers.get(identity)
        if kind == "invite" and receiver:
            self.say("reach", identity)
        elif kind == "reach":
            self.sender.reached(identity, "gloo")
        elif kind == "loaded":
            self.sender.loaded(identity, *rest, self.now)
        elif kind == "failed":
            self.sender.failed(identity, *rest, self.now)
        elif kind == "fetch":
            epoch, version, index = rest
            if self.snapshot and self.snapshot.number == version:
                self.send_bucket(identity, epoch, self.snapshot, index)
        elif receiver:
            getattr(receiver, kind)(*rest)

    def forget(self) -> None:
        """The broker was started again, and has not heard of everybody yet."""
        known = sorted(self.receivers)[1:]
        self.sender.present(dict.fromkeys(known, (-1, "")))

    def pass_time(self) -> None:
        self.now += self.random.choice((0.05, 1.0, DEADLINE_S / 2))
        self.sender.late(self.now)
        for receiver in self.receivers.values():
            receiver.late()

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        for receiver in self.receivers.values():
            if receiver.serving:
                version, digest, content = receiver.serving
                assert digests_of(LAYOUT, memoryview(content), GMAC).whole == digest, "unverified bytes are served"
                assert (version, digest) in self.committed, "a version that never was is served"

    def converge(self) -> None:
        """From now on the network delivers: everybody ends at the latest version."""
        self.lossy = False
        if self.snapshot is None:
            self.publish()
        while self.snapshot is None:
            self.publish()
        for _ in range(200):
            self.hear_who_lives()
            wanted = self.snapshot.number, self.snapshot.digests.whole
            if all(r.serving and r.serving[:2] == wanted for r in self.receivers.values()):
                return
            self.invite()
            self.seed()
            while self.network:
                self.deliver()
                self.check()
            for receiver in self.receivers.values():
                receiver.ask_again()
            self.pass_time()
        raise AssertionError("somebody never came to the latest version")


def play(kind: type[World], random: Any, receivers: int) -> None:
    world = kind(random, receivers)
    moves = [
        (30, world.deliver), (8, world.hear_who_lives), (8, world.invite), (3, world.publish), (8, world.seed),
        (4, world.pass_time), (1, world.join), (1, world.die), (1, world.forget), (0.3, world.start_trainer),
        (6, lambda: random.choice(list(world.receivers.values())).ask_again()),
    ]  # fmt: skip
    weights = [weight for weight, _ in moves]
    for _ in range(150):
        random.choices(moves, weights)[0][1]()
        world.check()
    world.converge()


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(random=st.randoms(use_true_random=True), receivers=st.integers(1, 4))
def test_nobody_serves_what_was_not_published_and_all_converge(random: Any, receivers: int) -> None:
    play(World, random, receivers)


def test_epochs_only_rise_for_a_rollout_that_was_forgotten_and_is_back() -> None:
    sender = PublishState(100, lambda slowest_s: DEADLINE_S)
    here = {"a": (-1, ""), "b": (-1, "")}
    sender.present(here)
    sender.invitations(0.0)
    assert sender.reached("a", "gloo") and sender.reached("b", "gloo")
    first = sender.open(5, 0.0)
    sender.committed(5, "five")
    sender.loaded("b", first.number, 5, "five", 0.5)
    sender.present({"b": (5, "five")})  # a broker that was started again has not seen a yet
    sender.present({"a": (-1, ""), "b": (5, "five")})
    assert sender.invitations(1.0) == ["a"] and sender.reached("a", "gloo")
    ((identity, seeded, _),) = sender.seeds(1.0)
    assert identity == "a" and seeded > first.number
    sender.loaded("a", seeded, 5, "five", 1.5)
    assert sender.open(6, 2.0).number > seeded


def ready(names: str, patience_s: Any = lambda slowest_s: DEADLINE_S) -> PublishState:
    """A sender all of whose rollouts are reached."""
    sender = PublishState(100, patience_s)
    sender.present(dict.fromkeys(names, (-1, "")))
    for name in sender.invitations(0.0):
        assert sender.reached(name, "gloo")
    return sender


def test_a_rollout_has_the_deadline_that_its_own_loads_say() -> None:
    sender = ready("ab", lambda slowest_s: 100.0 if slowest_s is None else 1 + 4 * slowest_s)
    epoch = sender.open(0, 0.0)
    assert sender.loaded("a", epoch.number, 0, "zero", 0.5) == 0.5
    assert [late.identity for late in sender.late(60.0)] == [], "a is fast, and b is not known yet"
    assert sender.loaded("b", epoch.number, 0, "zero", 60.0) == 60.0
    sender.committed(0, "zero")
    sender.present(dict.fromkeys("ab", (0, "zero")))
    sender.open(1, 100.0)
    assert [late.identity for late in sender.late(104.0)] == ["a"]
    assert [late.identity for late in sender.late(300.0)] == []
    assert [late.identity for late in sender.late(342.0)] == ["b"]
    sender.invitations(1000.0)
    assert sender.reached("b", "gloo")
    sender.open(2, 1000.0)
    assert sender.late(1099.0) == [], "who was voted out may be slower than it was"


def test_who_takes_longer_than_its_deadline_is_given_that_time_from_then_on() -> None:
    sender = ready("a", partial(WeightsConfig().patience_s, 1_000_000_000))
    epochs = [sender.open(0, 0.0).number]
    sender.committed(0, "zero")
    for now in (81.0, 181.0):
        assert [late.epoch for late in sender.late(now)] == epochs[-1:]
        assert sender.invitations(now + 10) == ["a"] and sender.reached("a", "gloo")
        epochs += [epoch for _, epoch, _ in sender.seeds(now + 10)]
    assert len(epochs) == 3 and sender.loaded("a", epochs[0], 0, "zero", 230.0) == 230.0
    assert sender.loaded("a", epochs[2], 0, "zero", 231.0) is None, "it is the one that it was offered again"
    assert not sender.seeds(232.0) and "a" in (second := sender.open(1, 300.0)).members
    assert not sender.late(300.0 + 289.0) and sender.late(300.0 + 291.0)
    for version in (2, 3):  # are published while it ends what it has
        sender.committed(version, str(version))
        now = 500.0 + 100 * version
        assert sender.invitations(now) == ["a"] and sender.reached("a", "gloo") and sender.seeds(now)
        assert sender.late(now + 81)
    assert sender.loaded("a", second.number, 1, "one", 1000.0) == 700.0


@pytest.mark.parametrize("way", ["fails", "is late"])
def test_a_rollout_may_fail_for_ever(way: str) -> None:
    sender, now = ready("a"), 0.0
    for _ in range(1100):
        epoch = sender.open(1, now)
        assert epoch.members, "it is tried again"
        if way == "fails":
            assert sender.failed("a", epoch.number, 1, now)
        else:
            assert sender.late(now + 1.01 * DEADLINE_S)
        now += 3 * DEADLINE_S
        for name in sender.invitations(now):
            sender.reached(name, "gloo")


def test_who_fails_by_shared_memory_again_is_asked_anew_how_it_is_reached() -> None:
    sender = ready("a")
    sender.peers["a"].transport = "shm"
    for now in (0.0, 10.0):
        assert sender.invitations(now) == []
        assert sender.failed("a", sender.open(1, now).number, 1, now)
    assert sender.invitations(20.0) == ["a"] and sender.reached("a", "gloo")


def test_whose_groups_do_not_meet_asks_by_itself_and_is_tried_again_ever_more_rarely() -> None:
    sender, now, tried = ready("ab"), 0.0, []
    for version in range(2000):
        epoch = sender.open(version, now)
        assert sorted(epoch.members) == ["a", "b"]
        alone = sender.met(now, epoch.by("gloo"))
        tried += [now] if epoch.by("gloo") else []
        assert alone in ([], ["a", "b"])
        for name in "ab":
            sender.loaded(name, epoch.number, version, str(version), now)
        now += 10.0
        for name in sender.invitations(now):
            assert sender.reached(name, "gloo")
    assert tried == [0.0, 10.0, 610.0, 620.0, 1820.0, 1830.0, 4230.0, 4240.0, 9040.0, 9050.0, 18650.0, 18660.0]


def test_a_group_that_meets_once_in_two_times_is_kept() -> None:
    sender = ready("a")
    for version in range(20):
        epoch = sender.open(version, version)
        assert epoch.by("gloo") and not sender.met(version, epoch.by("gloo") if version % 2 else [])
        sender.loaded("a", epoch.number, version, str(version), version)


def test_epochs_are_above_those_that_a_rollout_has_seen() -> None:
    sender = ready("a")
    first = sender.open(0, 0.0)
    sender.loaded("a", first.number, 0, "zero", 0.0)
    sender.after(first.number)
    assert sender.open(1, 1.0).number == first.number, "its own epochs change nothing"
    sender.loaded("a", first.number, 1, "one", 1.0)
    sender.after(7000)
    assert sender.open(2, 2.0).number == 7001


class Trusting(Receiver):
    """Takes a version for whole once all buckets are here."""

    def accept(self, epoch: int, version: int, index: int, data: bytes) -> None:
        assert self.intake
        self.intake.found[index] = ""

    def settle(self) -> None:
        if self.intake:
            self.intake.expected = self.commits.get((self.intake.epoch, self.intake.version))
        super().settle()

    def complete(self, intake: VersionAssembly) -> bool:
        return not intake.missing


class Hasty(Receiver):
    """Serves before the commit."""

    def settle(self) -> None:
        if self.intake:
            self.intake.expected = self.commits.get((self.intake.epoch, self.intake.version))
        if self.intake and not self.intake.missing:
            content = bytes(self.shadow)
            self.serving = self.intake.version, digests_of(LAYOUT, memoryview(content), GMAC).whole, content
            self.world.say("loaded", self.identity, self.intake.epoch, self.intake.version, self.serving[1])
            self.intake = None


class Stubborn(Receiver):
    """Gives up without a word."""

    def fail(self) -> None:
        self.intake = None


class Forgetful(PublishState):
    """Never votes out who is late."""

    def late(self, now: float) -> list[Any]:
        return []


class ForgetfulWorld(World):
    receiver = Stubborn

    def start_trainer(self) -> None:
        super().start_trainer()
        self.sender = Forgetful(1000 * self.started, DEADLINE_S)


def world_of(kind: type[Receiver]) -> type[World]:
    return type("Mutation", (World,), {"receiver": kind})


@pytest.mark.parametrize(
    ("mutation", "reason"),
    [
        (world_of(Trusting), "unverified bytes are served"),
        (world_of(Hasty), "a version that never was is served"),
        (ForgetfulWorld, "somebody never came"),
    ],
)
def test_every_rule_is_needed(mutation: type[World], reason: str) -> None:
    @settings(
        max_examples=300, deadline=None, database=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(random=st.randoms(use_true_random=True), receivers=st.integers(1, 4))
    def broken(random: Any, receivers: int) -> None:
        play(mutation, random, receivers)

    with pytest.raises(AssertionError, match=reason):
        broken()
