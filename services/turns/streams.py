"""What sampling is keyed by, so that the same turn draws the same tokens whenever it is drawn."""

from __future__ import annotations

from penstock.protocols.messages import Lease

PLACE_BITS, TURN_BITS = 12, 12
OF_TURNS = 1 << 62
"""No group's number has this bit, and no negative one lacks it: a run may have single answers beside turns."""


def stream_of(lease: Lease) -> int:
    """Of a group: its number, or, in an evaluation, its prompt's, so that each evaluation draws alike."""
    return lease.number if lease.purpose == "train" else -1 - lease.prompt.index


def turn_stream(lease: Lease, place: int, turn: int) -> int:
    """Of one turn of the trajectory at ``place``."""
    most = (1 << TURN_BITS) - 1
    return (stream_of(lease) << (PLACE_BITS + TURN_BITS) | place << TURN_BITS | turn & most) ^ OF_TURNS
