"""What agents call a turn: its number, or the id of the completion, response or message that told it."""

from __future__ import annotations

from penstock.services.gateway.errors import AgentError
from penstock.services.gateway.session import Session, Turn

KINDS = "chatcmpl-", "cmpl-", "resp_", "msg_"
"""What ids begin with. One of several answers is the first's; the others have numbers alone."""
MOST_DIGITS = 9

TurnName = int | str | None


def turn_of_id(id: str, kind: str, session_id: str, session: Session) -> Turn | None:
    """The turn that an id of this ``kind`` tells of; None where it is none of this session's."""
    number = id.removeprefix(f"{kind}{session_id}-")
    plain = number.isascii() and number.isdigit() and len(number) <= MOST_DIGITS
    return session.turns.get(int(number)) if plain else None


def turn_called(name: TurnName, session_id: str, session: Session) -> Turn:
    """The turn of that ``name``, which its agent has had; None: the newest of these. A number may be written out.
    Raises `AgentError`."""
    if name is None:
        newest = max((turn for turn in session.turns.values() if turn.wanted), key=lambda t: t.number, default=None)
        if newest is None:
            raise AgentError(404, "unknown_turn", f"turn: no turn of {session_id!r} has been answered yet")
        return newest
    found = (turn_of_id(str(name), kind, session_id, session) for kind in KINDS)
    turn = next((turn for turn in found if turn is not None and turn.wanted), None)
    if turn is None:
        raise AgentError(404, "unknown_turn", f"turn: {str(name)[:80]!r} is no answer of {session_id!r}")
    return turn
