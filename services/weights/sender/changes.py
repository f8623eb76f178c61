"""What changed since the version before, which is sent in place of a version where that is less."""

from __future__ import annotations

from collections.abc import Collection

from penstock.protocols.weight_channel import Epoch, Peer
from penstock.services.weights import delta
from penstock.services.weights.byte_views import as_array
from penstock.services.weights.config import WeightsConfig
from penstock.services.weights.sender.snapshot import Snapshot


def are_sent(
    config: WeightsConfig, peers: Collection[Peer], epoch: Epoch, latest: Snapshot, snapshot: Snapshot, ranks: int
) -> bool:
    """Whether ``snapshot`` is sent as changes of ``latest``: everybody who takes part must have what they are changes
    of."""
    if config.sparse == "off" or snapshot.version % config.full_every == 0:
        return False
    collective = epoch.by("gloo")
    if collective and ranks > 1:  # no rank has both the whole and a group of its own to send it in
        return False
    served = {peer.identity: peer.serves for peer in peers}
    over_networks = [peer for peer in peers if peer.transport in ("gloo", "snapshot")]
    if not over_networks or any(served[identity] != (latest.version, latest.digest) for identity in collective):
        return False
    return snapshot.layout.weights[0].dtype != "float32"


def find(latest: Snapshot, snapshot: Snapshot, index: int) -> None:
    """Notes the changes of bucket ``index``, where they are smaller than that."""
    found = delta.encode(as_array(latest.bucket(index)), as_array(snapshot.bucket(index)))
    if found is not None:
        snapshot.changes[index] = found


def density(snapshot: Snapshot) -> float:
    """The share of its 16-bit elements that are sent."""
    spans = enumerate(snapshot.layout.spans)
    whole = sum((end - start) // 2 for index, (start, end) in spans if index not in snapshot.changes)
    changed = sum(delta.changes_in(changes) for changes in snapshot.changes.values())
    return (changed + whole) / max(1, snapshot.layout.nbytes // 2)
