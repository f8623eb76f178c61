"""The bound and its liveness, on the gate's arithmetic alone."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.services.broker.rules.gate import Gate


@given(
    batch=st.integers(1, 5),
    window=st.integers(1, 8),
    extra=st.integers(0, 2),
    seed=st.randoms(use_true_random=False),
)
def test_no_token_is_older_than_the_bound_and_nothing_stalls(batch: int, window: int, extra: int, seed: object) -> None:
    max_lag = -(-(window - 1) // batch) + extra
    gate = Gate(batch, window, max_lag)
    version, number, steps = 0, 0, 12
    running: dict[int, int] = {}  # group to the oldest version among its tokens
    asked: dict[int, int] = {}  # group to what its last turn needed
    ready: dict[int, int] = {}
    for _ in range(3000):
        if version == steps:
            break
        moves = []
        if gate.rank(number) < steps * batch and version >= gate.required_version(number):
            moves.append("grant")
        moves += ["finish", "drop", "turn"] if running else []
        oldest = min([*running, number])
        eligible = gate.eligible(sorted(ready), oldest)
        if len(eligible) >= batch:
            moves.append("train")
        assert moves, "stalled"
        move = seed.choice(moves)
        if move == "grant":
            running[number] = seed.randint(max(0, gate.required_version(number)), version)
            number += 1
        elif move == "turn":  # of an agent's session, by whatever rollout the gate allows for its group now
            group = seed.choice(sorted(running))
            allowed = gate.required_version(group)
            assert allowed <= asked.setdefault(group, allowed), "what the gate asks for a group never rises"
            asked[group] = allowed
            running[group] = min(running[group], seed.randint(max(0, allowed), version))
        elif move == "finish":
            group = seed.choice(sorted(running))
            ready[group] = running.pop(group)
        elif move == "drop" and seed.random() < 0.3:
            group = seed.choice(sorted(running))
            del running[group]
            gate.drop(group)
        elif move == "train":
            for group in eligible[:batch]:
                assert version - ready.pop(group) <= max_lag
            version += 1
    assert version == steps


def test_zero_lag_is_synchronous() -> None:
    gate = Gate(batch=4, window=1, max_lag=0)
    assert [gate.required_version(i) for i in range(12)] == [0] * 4 + [1] * 4 + [2] * 4
