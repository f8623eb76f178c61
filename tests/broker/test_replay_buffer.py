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


SOURCES = ("", "math", "code")
OF = st.sampled_from([(), (), ("math",), ("code",), ("code", "math")])


def source_of(number: int) -> str:
    return SOURCES[number % len(SOURCES)]


class Plain:
    """What a replay must be, with nothing clever. ``table``: the columns, each with the sources that it is asked of."""

    def __init__(self, table: tuple[Column, ...]) -> None:
        self.table = table
        self.has: dict[int, set[str]] = {}
        self.held: dict[tuple[int, str], str] = {}

    def open(self, scorer: str) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for number in sorted(self.has):
            wanted = self.asked(number)
            for column in self.table:
                missing = column.name in wanted - self.has[number] and (number, column.name) not in self.held
                if column.scorer == scorer and missing and self.has[number].issuperset(wanted & {*column.reads}):
                    found.setdefault(number, []).append(column.name)
        return {number: sorted(names) for number, names in found.items()}

    def asked(self, number: int) -> set[str]:
        source = source_of(number)
        return {column.name for column in self.table if column.sources == () or source in column.sources}

    def ready(self) -> list[int]:
        return sorted(number for number, has in self.has.items() if has >= self.asked(number))


@settings(deadline=None)
@given(MOVES, st.tuples(OF, OF, OF))
def test_replay_is_what_a_plain_table_would_be(
    moves: list[tuple[str, int, int]], of: tuple[tuple[str, ...], ...]
) -> None:
    """Ready is what has every column that its source is asked for, and nobody is offered another."""
    table = tuple(c.model_copy(update={"sources": sources}) for c, sources in zip(TABLE, of, strict=True))
    journal, plain = Memory(), Plain(table)
    replay, next_number, now = Replay(journal, table), 0, 0.0
    for move, choice, which in moves:
        scorer, column = ("reward", "reference")[which % 2], table[which]
        holder = f"{scorer}-{choice % 2}#1"
        number = sorted(plain.has)[choice % len(plain.has)] if plain.has else -1
        if move == "add":
            replay.add(next_number, next_number, 0, 2, 9, source_of(next_number))
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
            wanted = column.name in plain.asked(number) - plain.has[number]
            assert replay.scored(number, column.name) == wanted
            plain.has[number] |= {column.name} & plain.asked(number)
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
            replay, plain.held = Replay(journal, table), {}
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


def test_a_run_that_asks_other_sources_now_waits_for_what_was_not_asked_before() -> None:
    journal = Memory()
    of_math = FAST.model_copy(update={"sources": ("math",)})
    before = Replay(journal, [of_math, REFERENCE])
    for number in range(3):
        before.add(number, number, 0, 2, 9, source_of(number))
        before.scored(number, REFERENCE.name)
    before.scored(1, FAST.name)
    journal.commit()
    assert before.ready() == [0, 1, 2]
    after = Replay(journal, [FAST, REFERENCE])
    assert after.ready() == [1] and after.entries[2].needs == {FAST.name}


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
