"""Asking, telling, deadlines, fencing, over real sockets."""

from __future__ import annotations

import gc
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgpack
import pytest
import zmq

from penstock.protocols import connection, wire
from penstock.protocols import mailbox as mb
from penstock.protocols.experience import GroupSummary, as_bytes
from penstock.protocols.keys import BrokerKeys, load_broker, load_client, make
from penstock.protocols.mailbox import AddressError, DeadlineError, FencedError, Mailbox, RefusedError
from penstock.protocols.messages import (
    Ack,
    Credit,
    Fenced,
    Finished,
    Heartbeat,
    HeartbeatAck,
    HelloNeeded,
    Message,
    Refused,
    Stop,
    Take,
    Waits,
    Welcome,
    from_envelope,
    to_envelope,
)
from penstock.protocols.router_server import RouterServer
from tests.protocols.breakable_line import BreakableLine
from tests.weights.channel import until


class Answering:
    """An exchange in a thread that answers by a function."""

    def __init__(self, bind: str = "tcp://127.0.0.1:0", keys: BrokerKeys | None = None) -> None:
        self.exchange = RouterServer(bind, keys)
        self.seen: list[tuple[str, int, object]] = []
        self.answer: Callable[[str, int, Any], Message | None] = lambda identity, request, message: Ack()
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._open:
            for identity, request, message in self.exchange.receive(0.02):
                self.seen.append((identity, request, message))
                reply = self.answer(identity, request, message)
                if reply is not None:
                    self.exchange.send(identity, reply, request)
            self.exchange.flush()

    def close(self) -> None:
        self._open = False
        self._thread.join()
        self.exchange.close()


@pytest.fixture
def broker() -> Iterator[Answering]:
    answering = Answering()
    yield answering
    answering.close()


@pytest.fixture
def box(broker: Answering) -> Iterator[Mailbox]:
    mailbox = Mailbox(broker.exchange.address, "tester#1")
    yield mailbox
    mailbox.close()


def test_ask_is_answered(broker: Answering, box: Mailbox) -> None:
    assert box.ask(Take(step=1), 5) == Ack()
    assert broker.seen[0][0] == "tester#1"


def test_tell_arrives_in_order(broker: Answering, box: Mailbox) -> None:
    broker.answer = lambda *_: None
    for total in range(50):
        box.tell(Credit(total=total))
    deadline = time.monotonic() + 5
    while len(broker.seen) < 50 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [m.total for _, _, m in broker.seen] == list(range(50))


def test_a_refusal_is_an_error(broker: Answering, box: Mailbox) -> None:
    broker.answer = lambda *_: Refused(code="not_ready", reason="no batch yet")
    with pytest.raises(RefusedError, match="no batch yet") as caught:
        box.ask(Take(step=1), 5)
    assert caught.value.code == "not_ready"


def test_no_answer_is_a_deadline_that_names_what_was_asked(broker: Answering, box: Mailbox) -> None:
    broker.answer = lambda *_: None
    with pytest.raises(DeadlineError, match=r"Take: no answer from tcp://"):
        box.ask(Take(step=1), 0.3)


def test_requests_are_sent_again(broker: Answering, box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mb, "RESEND_S", 0.2)
    answers = iter([None, None, Ack()])
    broker.answer = lambda *_: next(answers)
    assert box.ask(Take(step=1), 5) == Ack()
    assert len({request for _, request, _ in broker.seen}) == 1 and len(broker.seen) == 3


def test_a_patient_request_is_sent_again_less_and_less_often(
    broker: Answering, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mb, "RESEND_S", 0.3)
    broker.answer = lambda *_: None
    box.hello = lambda: [Credit(total=1)]
    patient, plain = box.ask_later(Take(step=1), 60, patient=True), box.ask_later(Take(step=2), 60)

    def sent(step: int) -> int:
        return sum(message == Take(step=step) for _, _, message in broker.seen)

    until(lambda: sent(1) == 4, 20, "the patient one")  # at 0, 0.3, 0.9 and 2.1 s
    assert sent(2) > sent(1) and not patient.done() and not plain.done()
    broker.exchange.send("tester#1", HelloNeeded())  # of a broker that has none of it
    until(lambda: sent(1) == 5, 1.5, "the patient one to be said again at once")


def test_by_a_line_that_broke_the_actor_is_introduced_anew_and_all_that_waits_is_asked_again(broker: Answering) -> None:
    """The broker is the same one, and knows it: by itself it would never say that anything was lost."""
    line = BreakableLine(broker.exchange.address)
    box = Mailbox(line.address, "tester#1")
    assert box.ask(Take(step=1), 5) == Ack()
    box.hello, broker.answer = lambda: [Credit(total=7)], lambda *_: None
    waits = box.ask_later(Take(step=2), 60, again=False)
    until(lambda: broker.seen[-1][2] == Take(step=2), 5, "the question")
    line.cut()
    broker.answer = lambda *_: Ack()
    assert waits.result(5) == Ack()
    assert [message for _, _, message in broker.seen[-2:]] == [Credit(total=7), Take(step=2)]
    assert box.inbox.get(timeout=1) == HelloNeeded()
    box.close()
    line.close()


def test_what_breaks_the_line_is_said_again_less_and_less_often(broker: Answering) -> None:
    """Such as a frame that the broker does not take: at once, half a second later, then after a second and two."""
    line = BreakableLine(broker.exchange.address, word=b"Take", again=True)
    box = Mailbox(line.address, "tester#1")
    box.hello = lambda: [Credit(total=7)]
    with pytest.raises(DeadlineError):
        box.ask(Take(step=2), 3)
    assert 2 <= line.cuts <= 5
    box.close()
    line.close()


def test_what_had_come_before_its_line_ended_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "ANEW_S", 0.0)
    server, context, poller = RouterServer("tcp://127.0.0.1:0"), zmq.Context(), zmq.Poller()
    line = connection.Connection(context, poller, server.address, "tester#1", None)
    line.send(wire.encode(to_envelope(Take(step=1), id=1)))
    until(lambda: server.receive(0.05), 5, "the question")
    server.send_now("tester#1", Stop(reason="the run is over"))
    time.sleep(0.1)
    server.close()
    time.sleep(0.1)  # neither was looked at yet
    line.look()
    parts = line.receive()
    assert parts and from_envelope(wire.decode([part.buffer for part in parts])) == Stop(reason="the run is over")
    line.close()
    context.term()


def test_being_fenced_ends_every_wait(broker: Answering, box: Mailbox) -> None:
    broker.answer = lambda *_: Fenced(by="tester#2")
    with pytest.raises(FencedError, match="replaced by tester#2"):
        box.ask(Take(step=1), 5)
    with pytest.raises(FencedError):
        box.tell(Credit(total=1))


def test_unasked_messages_go_to_the_inbox(broker: Answering, box: Mailbox) -> None:
    box.ask(Take(step=1), 5)
    broker.exchange.send("tester#1", Stop(reason="enough"))
    assert box.inbox.get(timeout=5) == Stop(reason="enough")


def test_the_heart_beats_while_the_owner_is_busy(broker: Answering, box: Mailbox) -> None:
    broker.answer = lambda *_: None
    box.beat_s, box.beat = 0.05, lambda: Heartbeat(gauges={"x": 1.0})
    time.sleep(1.5)
    assert sum(isinstance(m, Heartbeat) for _, _, m in broker.seen) >= 5


def test_a_malformed_message_costs_only_itself(broker: Answering, box: Mailbox) -> None:
    context = zmq.Context()
    rogue = context.socket(zmq.DEALER)
    rogue.connect(broker.exchange.address)
    for frames in ([b"nonsense"], [b""], [b"\x95\x01\xa1X\x00\x00\x80"], [b"x"] * 100):
        rogue.send_multipart(frames)
        assert rogue.poll(5000)
        rogue.recv_multipart()
    assert box.ask(Take(step=1), 5) == Ack()
    assert broker.exchange.refused == 4
    rogue.close()
    context.term()


def test_a_malformed_message_is_not_quoted_whole(broker: Answering, box: Mailbox) -> None:
    """Its text, escaped, would be larger than any message may be."""
    lie = msgpack.ExtType(1, msgpack.packb(["\0" * (20 << 20), [1], b"x"]))
    context = zmq.Context()
    rogue = context.socket(zmq.DEALER)
    rogue.connect(broker.exchange.address)
    rogue.send(msgpack.packb([wire.PROTOCOL, "Take", 1, 0, {"step": lie}]))
    assert rogue.poll(5000)
    refused = from_envelope(wire.decode(rogue.recv_multipart()))
    assert isinstance(refused, Refused) and "dtype" in refused.reason and len(refused.reason) < 3000
    assert box.ask(Take(step=1), 5) == Ack()
    rogue.close(0)
    context.term()


def test_a_busy_port_is_a_clear_error(broker: Answering) -> None:
    with pytest.raises(AddressError, match=r"broker.bind: cannot bind .*another process has this port"):
        RouterServer(broker.exchange.address)


def again(address: str, keys: BrokerKeys | None = None) -> Answering:
    """Another broker, where the one before has just closed its door."""
    deadline = time.monotonic() + 5
    while True:
        try:
            return Answering(address, keys)
        except AddressError:
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_free_port_is_none_that_may_be_lent_while_its_server_is_gone() -> None:
    """Not even to those who ask there for it again and again."""
    doors = [RouterServer("tcp://127.0.0.1:0") for _ in range(8)]
    ports = {int(door.address.rpartition(":")[2]) for door in doors}
    assert len(ports) == 8
    for door in doors:
        door.close()
    lent = set()
    for _ in range(200):
        with socket.socket() as asking:
            asking.bind(("127.0.0.1", 0))
            lent.add(asking.getsockname()[1])
    assert min(lent) > max(ports)
    assert RouterServer(doors[0].address).address == doors[0].address


def test_an_actor_outlives_its_broker() -> None:
    first = Answering()
    address = first.exchange.address
    box = Mailbox(address, "tester#1")
    assert box.ask(Take(step=1), 5) == Ack()
    first.close()
    waiting = box.ask_later(Take(step=2), 20)
    second = again(address)
    assert waiting.result(20) == Ack()
    box.close()
    second.close()


@pytest.mark.parametrize("has_keys", [False, True])
def test_an_actor_outlives_a_peer_that_refuses_its_keys(tmp_path: Path, has_keys: bool) -> None:
    """For some seconds something else has the broker's port: with keys where it has none, or without."""
    make(tmp_path)
    served = load_broker(tmp_path / "broker.json")
    right = served if has_keys else None
    first = Answering(keys=right)
    address = first.exchange.address
    box = Mailbox(address, "tester#1", load_client(tmp_path / "client.json") if has_keys else None)
    box.beat_s, box.beat = 0.1, lambda: Heartbeat(gauges={})
    introduction = Credit(total=7)
    box.hello = lambda: [introduction]
    assert box.ask(Take(step=1), 5) == Ack()
    first.close()
    other = RouterServer(address, None if has_keys else served)
    with pytest.raises(DeadlineError, match=r"Take: no answer from tcp://.* in time$"):
        refused = box.ask_later(Take(step=2), 1.5)
        while not refused.done():
            assert not other.receive(0.05)
        refused.result(0)
    other.close()
    second = again(address, right)
    until(lambda: any(message == introduction for _, _, message in second.seen), 5, "a hello that nobody asked for")
    assert box.ask(Take(step=3), 10) == Ack()
    until(lambda: any(isinstance(message, Heartbeat) for _, _, message in second.seen), 5, "a heartbeat")
    box.close()
    second.close()


@pytest.mark.parametrize(
    "address",
    ["tcp://127.0.0.1", "http://127.0.0.1:5555", "tcp://127.0.0.1:5555/", "10.1.0.7:5555", "tcp://127.0.0.1:99999"],
)
def test_what_is_no_address_is_said_at_once(address: str) -> None:
    with pytest.raises(AddressError, match=r"is not an address such as tcp://127\.0\.0\.1:5555"):
        Mailbox(address, "tester#1")


def test_an_address_that_zeromq_does_not_take_is_told_to_all_who_wait() -> None:
    box = Mailbox("tcp://*:1", "tester#1")
    with pytest.raises(DeadlineError, match="the mailbox failed: ZMQError"):
        box.ask(Take(step=1), 60)
    assert isinstance(box.inbox.get(timeout=5), DeadlineError), "nor does its actor wait for ever"


def test_a_peer_of_an_older_version_is_told_so_in_its_own_words(broker: Answering) -> None:
    """What an actor of protocol 1 sends, and is answered: it can read that."""
    context = zmq.Context()
    old = context.socket(zmq.DEALER)
    old.setsockopt(zmq.IDENTITY, b"old#1")
    old.connect(broker.exchange.address)
    old.send_multipart([msgpack.packb([1, "Hello", 7, 0, {"kind": "rollout", "name": "old", "host": "", "pid": 1}])])
    assert old.poll(5000)
    protocol, kind, _, reply_to, body = msgpack.unpackb(old.recv_multipart()[0])
    assert (protocol, kind, reply_to) == (1, "Refused", 7)
    assert f"the peer speaks protocol 1, this process speaks {wire.PROTOCOL}" in body["reason"]
    assert "start both from the same one" in body["reason"]
    old.close(0)
    context.term()


def test_a_broker_of_an_older_version_ends_the_asking_at_once() -> None:
    context = zmq.Context()
    old = context.socket(zmq.ROUTER)
    port = old.bind_to_random_port("tcp://127.0.0.1")
    box = Mailbox(f"tcp://127.0.0.1:{port}", "new#1")
    asked = box.ask_later(Take(step=1), 30)
    assert old.poll(5000)
    sender, _ = old.recv_multipart()
    old.send_multipart([sender, msgpack.packb([1, "Refused", 0, 0, {"code": "bad_message", "reason": "protocol"}])])
    with pytest.raises(wire.ProtocolError, match=f"the peer speaks protocol 1, this process speaks {wire.PROTOCOL}"):
        asked.result(5)
    box.close()
    old.close(0)
    context.term()


def test_messages_that_have_a_handler_go_to_it_and_not_to_the_inbox(broker: Answering, box: Mailbox) -> None:
    heard: list[object] = []
    box.handlers[Stop] = heard.append
    box.ask(Take(step=1), 5)
    broker.answer = lambda identity, request, message: Stop(reason="over")
    box.tell(Credit(total=1))
    deadline = time.monotonic() + 5
    while not heard and time.monotonic() < deadline:
        time.sleep(0.01)
    assert heard == [Stop(reason="over")] and box.inbox.empty()


def test_a_heartbeat_that_cannot_be_made_costs_itself_alone(broker: Answering, box: Mailbox) -> None:
    made: list[int] = []

    def beat() -> Heartbeat:
        made.append(len(made))
        if len(made) < 3:
            raise RuntimeError("dictionary changed size during iteration")
        return Heartbeat(gauges={})

    box.beat_s, box.beat = 0.02, beat
    deadline = time.monotonic() + 10
    while not any(isinstance(message, Heartbeat) for _, _, message in broker.seen) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert isinstance(box.ask(Take(step=1), 5), Ack) and len(made) >= 3


def test_a_mailbox_that_fails_says_so_to_all_who_wait(broker: Answering, box: Mailbox) -> None:
    """Its thread is the only one that could answer, or see a deadline pass."""
    broker.answer = lambda identity, request, message: None
    waiting = box.ask_later(Take(step=0), 60)

    def fails() -> list[object]:
        raise RuntimeError("no introduction")

    box.hello = fails  # type: ignore[assignment]
    broker.answer = lambda identity, request, message: HelloNeeded()
    box.tell(Credit(total=1))
    with pytest.raises(DeadlineError, match="the mailbox failed: RuntimeError: no introduction"):
        waiting.result(10)
    with pytest.raises(DeadlineError, match="the mailbox failed"):
        box.ask(Take(step=1), 60)


def test_a_hello_that_is_on_its_way_behind_what_is_large_is_not_said_again(
    broker: Answering, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mb, "REHELLO_S", 0.05)
    monkeypatch.setattr(mb, "SLOW_LINE", 100_000)
    said: list[float] = []

    def hello() -> list[Message]:
        said.append(time.monotonic())
        return [Credit(total=1)]

    box.hello, broker.answer = hello, lambda *_: HelloNeeded()
    summary = GroupSummary(trajectories=1, tokens=1, sampled=1, oldest=0, newest=0)
    experience = as_bytes(bytes(1_000_000))
    box.ask_later(Finished(purpose="train", number=1, attempt=1, summary=summary, experience=experience), 60)
    box.beat_s, box.beat = 0.1, lambda: Heartbeat(gauges={})
    time.sleep(1.5)  # of the ten seconds that such a line takes
    assert len(said) == 1 and sum(isinstance(m, Heartbeat) for _, _, m in broker.seen) >= 3
    broker.exchange.send("tester#1", Welcome(run="test", heartbeat_s=1.0))  # and one that is started once more
    until(lambda: len(said) == 2, 5, "another hello")


def test_time_in_which_the_broker_waits_for_its_store_is_nobodys(
    broker: Answering, box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mb, "WAITS_S", 1.2)
    monkeypatch.setattr(mb, "RESEND_S", 0.1)
    began = time.monotonic()

    def answer(*_: Any) -> Message | None:
        passed = time.monotonic() - began
        return Ack() if passed > 1.5 else Waits() if passed < 1.2 else None

    broker.answer = answer
    with pytest.raises(DeadlineError):  # whoever looks after the store must not wait for it
        box.ask(Take(step=0), 0.2)
    box.waits_along = True
    assert box.ask(Take(step=1), 0.3) == Ack() and time.monotonic() - began > 1.4
    broker.answer = lambda *_: None
    with pytest.raises(DeadlineError, match="Take: no answer"):
        box.ask(Take(step=2), 0.3)


def throttled(port: int, bytes_s: int) -> int:
    """The port of a line to ``port`` that is this slow, for each connection."""
    door = socket.create_server(("127.0.0.1", 0))

    def pump(source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(10_000):
                sink.sendall(data)
                time.sleep(len(data) / bytes_s)

    def accept() -> None:
        with suppress(OSError):
            while True:
                inside, _ = door.accept()
                outside = socket.create_connection(("127.0.0.1", port))
                for ends in ((inside, outside), (outside, inside)):
                    threading.Thread(target=pump, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return int(door.getsockname()[1])


def test_what_is_long_on_its_way_keeps_no_heartbeat_back(broker: Answering) -> None:
    """Nor its answer: whoever is not heard of counts as dead, and what it then says is thrown away."""
    heard: list[float] = []

    def answer(identity: str, request: int, message: Message) -> Message | None:
        if isinstance(message, Heartbeat):
            heard.append(time.monotonic())
            return HeartbeatAck()
        return Ack()

    broker.answer = answer
    port = throttled(int(broker.exchange.address.rpartition(":")[2]), 500_000)
    slow = Mailbox(f"tcp://127.0.0.1:{port}", "rollout-0#1")
    slow.beat_s, slow.beat = 0.1, lambda: Heartbeat(gauges={})
    summary = GroupSummary(trajectories=1, tokens=1, sampled=1, oldest=0, newest=0)
    large = Finished(purpose="train", number=1, attempt=1, summary=summary, experience=as_bytes(bytes(1_500_000)))
    began, silent = time.monotonic(), 0.0
    asked = slow.ask_later(large, 20)
    while not asked.done():
        time.sleep(0.05)
        silent = max(silent, time.monotonic() - slow.heard_at)
    assert asked.result() == Ack() and time.monotonic() - began > 2.0
    between = [later - earlier for earlier, later in pairwise([began, *heard])]
    assert max(between) < 1.5 and silent < 1.5
    slow.close()


def test_a_door_that_is_dropped_in_a_circle_is_closed(tmp_path: Path) -> None:
    """Whichever of its parts is collected first: ZeroMQ would wait for ever for a socket that is still open."""
    make(tmp_path)
    for keys in (None, load_broker(tmp_path / "broker.json")):
        door: Any = RouterServer("tcp://127.0.0.1:0", keys)
        address, door.itself = door.address, door
        del door
        gc.collect()
        RouterServer(address, keys).close()
