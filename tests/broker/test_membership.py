"""Who is here, and who is the newer one, whatever a clock says."""

from __future__ import annotations

import time

from penstock.protocols.mailbox import is_yet_to_come
from penstock.protocols.messages import Hello
from penstock.services.broker.membership import LOST_S, Members
from penstock.services.broker.rules.journal import Volatile


def join(members: Members, incarnation: str, now: float = 0.0) -> str:
    identity = f"rollout-0#{incarnation}"
    assert members.fenced_by(identity) is None
    members.join(identity, Hello(kind="rollout", name="rollout-0", host="here", pid=1), now, {"rollout"})
    return identity


def test_one_that_a_clock_put_into_the_future_keeps_nobody_out_once_it_is_dead() -> None:
    members, hour = Members(Volatile()), 3600 * 10**9
    ahead, now = (f"{time.time_ns() + add:016x}" for add in (hour, 0))
    first = join(members, ahead)
    assert members.fenced_by(f"rollout-0#{now}") == first, "it lives"
    members.silent(100.0, 15.0)
    strange = join(Members(Volatile()), "zzz")
    assert strange and not is_yet_to_come("zzz")
    second = join(members, now)
    assert members.get(second) and members.fenced_by("rollout-0#1") == second


def test_the_brokers_own_absence_puts_nobody_into_the_future() -> None:
    members = Members(Volatile())
    quick, slow = (Hello(kind="rollout", name=name, host="here", pid=1) for name in ("quick", "slow"))
    members.join("quick#1", quick, 700.0, {"rollout"})  # heard of just now, after 600 seconds
    members.join("slow#1", slow, 95.0, {"rollout"})
    members.excuse(600.0, 700.0)
    assert [member.name for member in members.silent(711.0, 15.0)] == ["slow"]
    assert [member.name for member in members.silent(716.0, 15.0)] == ["quick"]


def test_who_is_lost_is_told_for_a_while() -> None:
    members = Members(Volatile())
    for kind, name in (("rollout", "rollout-pod-a-0"), ("observer", "observer-host-7")):
        members.join(f"{name}#1", Hello(kind=kind, name=name, host="here", pid=1), 0.0, {"rollout", "observer"})
    members.silent(16.0, 15.0)
    assert members.lost == {"rollout-pod-a-0": 0.0}, "who has only looked is no actor"
    members.silent(LOST_S - 1, 15.0)
    assert members.lost
    members.silent(LOST_S, 15.0)
    assert not members.lost
