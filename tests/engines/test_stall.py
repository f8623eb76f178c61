"""When an engine core that answers is of no use all the same."""

from __future__ import annotations

from penstock.services.rollout.engines.vllm.stall import Stall


def test_nothing_generated_for_long_is_a_stall_only_while_somebody_waits() -> None:
    stall = Stall(10.0)
    for now in range(100, 200):
        assert not stall.look(now, 7, waiting=0), "nobody waits, or the core is to stand still"
    for now in range(200, 300):
        assert not stall.look(now, now, waiting=3), "somebody is answered"
    for now in range(300, 310):
        assert not stall.look(now, 299, waiting=3)
    assert stall.look(310, 299, waiting=3) == "no token for 11 s, though its core answers and 3 requests wait"
    assert not stall.look(311, 300, waiting=3), "it goes on"


def test_the_time_of_a_pause_does_not_count_nor_that_in_which_nobody_looked() -> None:
    stall = Stall(10.0)
    for now in (*range(9), 500):
        assert not stall.look(now, 1, waiting=1)
    assert not stall.look(501, 1, waiting=0) and not any(stall.look(now, 1, waiting=1) for now in range(502, 512))
    assert stall.look(512, 1, waiting=1)
