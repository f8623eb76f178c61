"""A broker that waits for its store answers heartbeats, however much is said to it."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.protocols import messages as m
from penstock.protocols.mailbox import Mailbox, incarnation_of
from penstock.protocols.router_server import RouterServer
from penstock.services.broker import meanwhile
from penstock.services.broker.meanwhile import Meanwhile

LARGE = 1 << 20


@pytest.fixture
def router(monkeypatch: pytest.MonkeyPatch) -> Iterator[RouterServer]:
    monkeypatch.setattr(meanwhile, "TURN_BYTES", 9 * LARGE // 2)  # the fifth fits, come when it may
    made = RouterServer("tcp://127.0.0.1:0")
    yield made
    made.close()


def test_what_is_large_and_will_be_said_again_is_left_out_where_there_is_no_more_room(router: RouterServer) -> None:
    heard, reward = Meanwhile(router), Mailbox(router.address, incarnation_of("reward-0"))
    reward.beat, reward.beat_s = m.Heartbeat, 0.05
    score = m.Score(purpose="train", number=1, values=np.zeros(LARGE // 4, np.float32))
    until = time.monotonic() + 20
    said = []
    try:
        for count in (5, 7):
            said += [reward.ask_later(m.Scores(column="reward", scores=[score]), 60) for _ in range(count)]
            while router.received_bytes < len(said) * LARGE:
                heard()
                assert time.monotonic() < until
                time.sleep(0.01)
        reward.tell(m.Credit(total=7, hello=1))
        while not any(isinstance(message, m.Credit) for *_, message in heard._said):
            heard()
            assert time.monotonic() < until
            time.sleep(0.01)
        at = time.monotonic()
        while reward.heard_at < at:
            heard()
            assert time.monotonic() < until, "its heartbeats are not answered"
            time.sleep(0.01)
        kept = heard.said()
        beats = [identity for identity, _, message in kept if isinstance(message, m.Heartbeat)]
        assert beats == [reward.identity], "the newest: it is not dead, and holds what it says"
        assert sum(isinstance(message, m.Scores) for *_, message in kept) == 5, "as many as there is room for"
        while sum(future.done() for future in said) < 12:  # the rest is said again
            for identity, request, _ in kept:
                router.send(identity, m.Ack(), request)
            router.flush()
            kept = router.receive(0.05)
            assert time.monotonic() < until + 40
    finally:
        reward.close(0)


def test_who_has_beaten_and_said_hello_is_heard_in_the_order_that_makes_it_known(router: RouterServer) -> None:
    """Beats stand for all that came meanwhile, and a broker that was started again knows nobody."""
    heard = Meanwhile(router)
    new, old = (Mailbox(router.address, incarnation_of(name)) for name in ("rollout-0", "rollout-1"))
    until = time.monotonic() + 20
    try:
        for box in (new, old):
            box.tell(m.Heartbeat())
        new.tell(m.Hello(name="rollout-0", kind="rollout", host="h", pid=1))
        while len(heard._beats) < 2 or not heard._said:
            heard()
            assert time.monotonic() < until
        kinds = [(identity, type(message)) for identity, _, message in heard.said()]
        assert kinds == [(old.identity, m.Heartbeat), (new.identity, m.Hello), (new.identity, m.Heartbeat)]
    finally:
        new.close(0)
        old.close(0)
