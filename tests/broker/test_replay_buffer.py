"""Finished groups and their columns, beside a plain model of the same; and what work in hand may do."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.protocols.columns import Column
from penstock.services.broker.rules.holds import Holds
from penstock.services.broker.rules.replay_buffer import Replay
from tests.broker.machine import Memory

FAST = Column(name="reward/fast", scorer="reward")
SLOW = Column(name="reward/slow", scorer="reward", reads=("reference",))
REFERENCE = Column(name="reference", scorer="reference", per="token")
TABLE = (FAST, SLOW, REFERENCE)

MOVES = st.lists(
    st.tuples(
        st.sampled_from(("add", "offer", "score", "release", "expire", "remove", "restart")),
        st.integers(0, 9),
        st.integers(0, 2),
    ),
    max_size=60,
)  # fmt: skip


class Plain:
    """What a replay must be, with nothing clever."""

    def __init__(self) -> None:
        self.has: dict[int, set[str]] = {}
        self.held: dict[tuple[int, str], str] = {}

    def open(self, scorer: str) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for number in sorted(self.has):
            for column in TABLE:
                missing = column.name not in self.has[number] and (number, column.name) not in self.held
                if column.scorer == scorer and missing and self.has[number].issuperset(column.reads):
                    found.setdefault(number, []).append(column.name)
        return {number: sorted(names) for number, names in found.items()}

    def ready(self) -> list[int]:
        return sorted(number for number, has in self.has.items() if len(has) == len(TABLE))


@settings(deadline=None)
@given(MOVES)
def test_replay_is_what_a_plain_table_would_be(moves: list[tuple[str, int, int]]) -> None:
    journal, plain = Memory(), Plain()
    replay, next_number, now = Replay(journal, TABLE), 0, 0.0
    for move, choice, which in moves:
        scorer, column = ("reward", "reference")[which % 2], TABLE[which]
        holder = f"{scorer}-{choice % 2}#1"
        number = sorted(plain.has)[choice % len(plain.has)] if plain.has else -1
        if move == "add":
            replay.add(next_number, next_number, 0, 2, 9)
            plain.has[next_number] = set()
            next_number += 1
        elif move == "offer":
            offered = {}
            for entry, columns in replay.unoffered(scorer):
                if len(offered) == choice:
                    break
                offered[entry.number] = sorted(c.name for c in columns)
                replay.offer(entry, columns, holder, now + 5)
            expected = plain.open(scorer)
            assert list(offered.items()) == list(expected.items())[:choice]
            plain.held |= {(n, name): holder for n, names in offered.items() for name in names}
        elif move == "score" and plain.has:
            assert replay.scored(number, column.name) == (column.name not in plain.has[number])
            plain.has[number].add(column.name)
            plain.held.pop((number, column.name), None)
        elif move == "release":
            replay.holds.release(holder)
            plain.held = {key: who for key, who in plain.held.items() if who != holder}
        elif move == "expire":
            now += 10
            expired = replay.holds.expire(now)
            assert sorted(expired) == sorted({(number, who) for (number, _), who in plain.held.items()})
            plain.held.clear()
        elif move == "remove" and plain.has:
            replay.remove(number)
            del plain.has[number]
            plain.held = {key: who for key, who in plain.held.items() if key[0] != number}
        elif move == "restart":  # who works on what is not durable, the columns are
            journal.commit()
            replay, plain.held = Replay(journal, TABLE), {}
        assert replay.ready() == plain.ready()
        unready = sorted(set(plain.has) - set(plain.ready()))
        assert replay.oldest_unready() == (unready[0] if unready else None) and replay.unready() == len(unready)


def test_a_run_that_goes_on_with_another_scorer_waits_for_its_columns_too() -> None:
    journal = Memory()
    before = Replay(journal, [FAST])
    before.add(0, 0, 0, 2, 9)
    before.scored(0, FAST.name)
    before.add(1, 1, 0, 2, 9)
    journal.commit()
    assert before.ready() == [0]
    after = Replay(journal, [FAST, REFERENCE])
    assert after.ready() == [] and after.entries[0].needs == {"reference"}
    assert after.entries[1].needs == {FAST.name, "reference"}
    without = Replay(journal, [REFERENCE])
    assert without.entries[0].needs == {"reference"}


@settings(deadline=None)
@given(st.lists(st.tuples(st.sampled_from("tdrxf"), st.integers(0, 5), st.integers(0, 2)), max_size=40))
def test_what_is_held_is_done_or_free_again_never_both(moves: list[tuple[str, int, int]]) -> None:
    freed: list[int] = []
    holds: Holds[int] = Holds(lambda key: key, freed.append)
    held: dict[int, tuple[str, float]] = {}
    now = 0.0
    for move, key, who in moves:
        holder = f"actor-{who}"
        freed.clear()
        if move == "t":
            holds.take(key, holder, now + 2)
            held[key] = (holder, now + 2)
        elif move == "d":
            holds.done(key)
            held.pop(key, None)
            assert not freed
        elif move == "r":
            assert sorted(holds.release(holder, but={key})) == sorted(freed)
            assert set(freed) == {k for k, (h, _) in held.items() if h == holder and k != key}
        elif move == "f":
            holds.free(key)
            assert freed == ([key] if key in held else [])
        else:
            now += 1
            holds.renew(holder, {key}, now + 2)
            if key in held and held[key][0] == holder:
                held[key] = (holder, now + 2)
            assert {number for number, _ in holds.expire(now)} == {k for k, (_, d) in held.items() if d < now}
        held = {k: v for k, v in held.items() if k not in freed}
        assert {k: h.holder for k, h in holds.held.items()} == {k: h for k, (h, _) in held.items()}
        assert set(holds.holders()) == {h for h, _ in held.values()}
