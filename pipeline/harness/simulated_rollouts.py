"""Rollouts that answer every lease at once, hundreds of them in one thread: what `penstock bench broker` measures with.

A process of its own: ``python -m penstock.pipeline.harness.simulated_rollouts ADDRESS ROLLOUTS GROUPS TOKENS`` prints
groups a second, from the first lease to the last acknowledgement.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import numpy as np
import zmq

from penstock.protocols import messages as m
from penstock.protocols import wire
from penstock.protocols.experience import Group, GroupSummary, Prompt, Trajectory, as_bytes, summarize
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import to_envelope
from penstock.protocols.packed_groups import pack_group
from penstock.protocols.versions import Digests
from penstock.services.runtime.processes import raise_file_limit

N = 8
"""Trajectories of a group."""
IN_FLIGHT = 8
"""Groups that each simulated rollout holds."""
BEAT_S = 2.0
DEADLINE_S = 120.0
NO_WEIGHTS = Digests(buckets=(), whole="none")


def make_payload(tokens: int) -> tuple[bytes, GroupSummary]:
    """A finished group of `N` trajectories of ``tokens`` tokens, and its summary."""
    random = np.random.default_rng(0)
    made = [
        Trajectory(
            random.integers(0, 1000, tokens).astype(np.int32),
            np.ones(tokens, np.uint8),
            -random.random(tokens).astype(np.float32),
            np.zeros(tokens, np.int32),
            "",
        )
        for _ in range(N)
    ]
    group = Group(0, Prompt(index=0, text="p"), made)
    return pack_group(group), summarize(group)


def publish_version_0(address: str) -> None:
    """So that the gate knows what the rollouts serve."""
    trainer = Mailbox(address, "trainer#1")
    trainer.ask(m.Hello(kind="trainer", name="trainer", host="", pid=0), 30)
    trainer.ask(m.CommitVersion(targets=[], epoch=0, version=0, digests=NO_WEIGHTS), 30)
    trainer.tell(m.Bye(reason="published"))
    trainer.close()


class Fleet:
    """Simulated rollouts, each with a socket of its own."""

    def __init__(self, address: str, count: int, tokens: int) -> None:
        context = zmq.Context()
        context.set(zmq.MAX_SOCKETS, count + 16)
        payload, summary = make_payload(tokens)
        self._experience, self._summary = as_bytes(payload), summary.model_dump()
        self._poller = zmq.Poller()
        self._sockets: list[zmq.Socket] = []
        self._held: list[set[int]] = [set() for _ in range(count)]
        self._given = [0] * count
        self.acknowledged = 0
        self.lost = 0
        """Hellos that the broker asked for again: it had taken the rollout for dead."""
        for index in range(count):
            socket = context.socket(zmq.DEALER)
            socket.setsockopt(zmq.IDENTITY, f"rollout-{index}#1".encode())
            for option in (zmq.SNDHWM, zmq.RCVHWM):
                socket.setsockopt(option, 0)
            socket.connect(address)
            self._sockets.append(socket)
            self._poller.register(socket, zmq.POLLIN)
        self._index = {socket: index for index, socket in enumerate(self._sockets)}
        self._beat_at = time.monotonic()

    def join(self) -> None:
        """Says hello, and that version 0 is loaded, for all of them."""
        loaded = m.Loaded(epoch=0, version=0, digest=NO_WEIGHTS.whole, transport="shm")
        for index in range(len(self._sockets)):
            self._say(index, m.Hello(kind="rollout", name=f"rollout-{index}", host="", pid=0), 1)
            self._say(index, loaded, 2)
        waiting = len(self._sockets)
        deadline = time.monotonic() + DEADLINE_S
        while waiting and time.monotonic() < deadline:
            waiting -= sum(envelope.reply_to == 2 for _, envelope in self._receive())
        if waiting:
            raise TimeoutError(f"{waiting} simulated rollouts did not join within {DEADLINE_S:.0f} s")

    def run(self, groups: int) -> float:
        """Answers leases until ``groups`` are acknowledged; returns groups a second."""
        started = time.perf_counter()
        for index in range(len(self._sockets)):
            self._credit(index, IN_FLIGHT)
        deadline = time.monotonic() + DEADLINE_S
        while self.acknowledged < groups:
            for index, envelope in self._receive():
                if envelope.type == "Lease":
                    self._finish(index, envelope.body)
                elif envelope.type == "Ack":
                    self.acknowledged += 1
                    self._held[index].discard(envelope.reply_to - 10)
                    self._credit(index, self._given[index] + 1)
                elif envelope.type == "HelloNeeded":
                    self.lost += 1
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self.acknowledged} of {groups} groups were acknowledged in {DEADLINE_S:.0f} s")
        return groups / (time.perf_counter() - started)

    def _receive(self) -> list[tuple[int, wire.Envelope]]:
        found = []
        for socket, _ in self._poller.poll(100):
            index = self._index[socket]
            while True:
                try:
                    frames = socket.recv_multipart(zmq.NOBLOCK)
                except zmq.Again:
                    break
                found.append((index, wire.decode(frames)))
        if time.monotonic() - self._beat_at > BEAT_S:
            self._beat_at = time.monotonic()
            for index, held in enumerate(self._held):
                self._say(index, m.Heartbeat(holding={"train": list(held)}))
        return found

    def _finish(self, index: int, lease: dict[str, Any]) -> None:
        number = lease["number"]
        self._held[index].add(number)
        body = {"purpose": "train", "number": number, "attempt": lease["attempt"], "summary": self._summary}
        frames = wire.encode(wire.Envelope("Finished", number + 10, 0, body | {"experience": self._experience}))
        self._sockets[index].send_multipart(frames, copy=False)

    def _credit(self, index: int, total: int) -> None:
        self._given[index] = total
        self._say(index, m.Credit(total=total))

    def _say(self, index: int, message: m.Message, message_id: int = 0) -> None:
        self._sockets[index].send_multipart(wire.encode(to_envelope(message, id=message_id)), copy=False)


def main(address: str, rollouts: int, groups: int, tokens: int) -> None:
    """Entry point: prints groups a second, and how many rollouts were taken for dead."""
    raise_file_limit()
    publish_version_0(address)
    fleet = Fleet(address, rollouts, tokens)
    fleet.join()
    rate = fleet.run(groups)
    sys.stdout.write(f"{rate} {fleet.lost}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
