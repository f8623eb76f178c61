"""What a group of agents waits for, in words: which of its sessions an agent has, and is at."""

from __future__ import annotations

from typing import Any

from penstock.protocols import wire
from penstock.protocols.messages.agents import SESSION, session_name
from penstock.services.broker.state import BrokerState

NAMED = 3
"""Of more sessions the number is told."""
WHERE = ", where the agent of "


def agents_words(state: BrokerState, purpose: str, number: int) -> str:
    """Behind the words that its gateway has the group; empty: all of its sessions wait for the policy, or have ended,
    or nothing is known of them."""
    if not state.settings.agents:
        return ""
    asking = {turn.session for turn in state.turns}
    found: dict[int, dict[str, Any]] = {}
    for name, data in state.records.of((purpose, number)).items():  # type: ignore[arg-type]
        kind, _, place = name.partition(".")
        if kind == SESSION:
            try:
                found[int(place)] = wire.unpack(data)
            except (wire.WireError, ValueError):  # of a gateway of other code
                return ""
    held = {place: kept for place, kept in found.items() if kept.get("opened") and not kept.get("ended")}
    silent = [
        session_name(purpose, number, place, kept["life"])
        for place, kept in sorted(held.items())
        if (purpose, number, place) not in asking
    ]
    if not silent:
        return ""
    who = ", ".join(silent[:NAMED]) + f" and {len(silent) - NAMED} more" * (len(silent) > NAMED)
    return f"{WHERE}{who} has the word: penstock agents RUN says since when, and until when it may"
