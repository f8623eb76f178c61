"""When an engine core that answers is of no use all the same."""

from __future__ import annotations

from penstock.services.rollout.engines.vllm.stall import Stall


def test_nothing_generated_for_long_is_a_stall_only_while_somebody_waits() -> None:
    stall = Stall(10.0)
    for now in range(100, 200, 5):
        assert not stall.look(now, 7, waiting=0), "nobody waits, or the core is to stand still"
    for now in range(200, 300, 5):
        assert not stall.look(now, now, waiting=3), "somebody is answered"
    assert not stall.look(305.0, 295, waiting=3)
    said = stall.look(306.0, 295, waiting=3)
    assert said == "no token for 11 s, though its core answers and 3 requests wait"
    assert not stall.look(307.0, 296, waiting=3), "it goes on"


def test_the_time_of_a_pause_does_not_count() -> None:
    stall = Stall(10.0)
    assert not stall.look(0.0, 1, waiting=1) and not stall.look(9.0, 1, waiting=0)
    assert not stall.look(18.0, 1, waiting=1) and stall.look(20.0, 1, waiting=1)
