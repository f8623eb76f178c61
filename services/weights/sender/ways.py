"""Which transport reaches which rollout."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import structlog

from penstock.protocols import messages as m
from penstock.protocols.versions import Transport
from penstock.services.weights.transports import cuda_ipc

log = structlog.get_logger()


class Ways:
    """Of a trainer whose config names ``transport`` (auto: none), that has left ``nonce`` in shared memory, and whose
    ranks compute on ``gpus`` (empty strings: on CPUs). ``shared``: these are the rollouts' while it rests, and versions
    go by the hosts."""

    def __init__(self, transport: str, nonce: str | None, gpus: Sequence[str], shared: bool = False) -> None:
        self._transport, self._nonce, self._gpus, self._shared = transport, nonce, gpus, shared
        self._free: set[str] = set()
        """For whom no config names a way."""
        self.places: dict[str, list[m.Place]] = {}
        """Where the processes are that hold a rollout's weights, by rollout."""

    def keep(self, present: Collection[str]) -> None:
        """Forgets who is not there any more."""
        self.places = {identity: places for identity, places in self.places.items() if identity in present}
        self._free &= set(present)

    def choose(self, reach: m.Reach, nccl: Collection[str]) -> Transport:
        """The best way to all processes that hold a rollout's weights, by where they are and what the configs name;
        ``nccl`` are the rollouts that are served by that."""
        gpus = [place.gpu for place in reach.places]
        first = self._gpus[0]
        by_gpu = bool(first) and not self._shared
        apart = any(cuda_ipc.namespace_of(gpu) != cuda_ipc.namespace_of(first) for gpu in gpus)
        shares_memory = self._share_memory(reach.places)
        possible: list[tuple[Transport, bool]] = [
            # Between containers of a host NCCL has sockets alone.
            ("shm", shares_memory and (apart or not any(gpus))),
            ("nccl", by_gpu and all(gpus) and self._are_distinct(reach, nccl)),
            ("shm", shares_memory),
            # After shared memory, where versions lie anyway: this keeps up to three more of them on the GPU.
            ("cuda_ipc", by_gpu and len(self._gpus) == 1 and all(gpu == first for gpu in gpus)),
            ("gloo", True),
        ]
        named = reach.only or (None if self._transport == "auto" else self._transport)
        if named is None:
            self._free.add(reach.receiver)
            return next(transport for transport, fits in possible if fits)
        if named == "snapshot" or any(fits for transport, fits in possible if transport == named):
            return named  # type: ignore[return-value]
        log.warning("weights.transport does not reach this rollout: snapshot", transport=named, **reach.model_dump())
        return "snapshot"

    def share_memory(self, identity: str) -> bool:
        """All processes that hold this rollout's weights see what the trainer has in shared memory, and may look, since
        no config names another way."""
        places = self.places.get(identity, [])
        return identity in self._free and bool(places) and self._share_memory(places)

    def _share_memory(self, places: Sequence[m.Place]) -> bool:
        return self._nonce is not None and all(place.nonce == self._nonce for place in places)

    def _are_distinct(self, reach: m.Reach, nccl: Collection[str]) -> bool:
        """NCCL takes a GPU once: no two of the trainer's ranks, of ``reach`` and of who is served by NCCL already
        compute on one."""
        taken = {cuda_ipc.uuid_of(gpu) for gpu in self._gpus}
        for identity in nccl:
            if identity != reach.receiver:
                taken |= {cuda_ipc.uuid_of(place.gpu) for place in self.places.get(identity, ())}
        mine = [cuda_ipc.uuid_of(place.gpu) for place in reach.places]
        return len({*mine, *taken}) == len(mine) + len(taken)
