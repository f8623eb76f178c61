"""Buckets on demand, over ZeroMQ: how late rollouts are seeded, and what a receiver misses is sent again."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np
import structlog
import torch

from penstock.protocols.experience import as_bytes
from penstock.protocols.keys import ClientKeys
from penstock.protocols.mailbox import Mailbox
from penstock.protocols.messages import Bucket, Fetch, Message, Refused
from penstock.protocols.router_server import RouterServer
from penstock.protocols.versions import Layout
from penstock.services.weights import delta

log = structlog.get_logger()

WINDOW = 4
"""Buckets asked for at once."""


class BucketServer:
    """Answers `Fetch` at this ``port``, 0: a free one, from a thread of its own; ``answer`` makes the reply."""

    def __init__(self, host: str, port: int, keys: ClientKeys | None, answer: Callable[[Fetch], Message]) -> None:
        own = keys.to_serve() if keys else None
        key = "weights.snapshot_port" if port else "weights.host"
        self._exchange = RouterServer(f"tcp://{host}:{port}", own, key=key)
        self.address = self._exchange.address
        self._answer = answer
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="snapshots", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closing.set()
        self._thread.join(5)

    def _run(self) -> None:
        while not self._closing.is_set():
            for identity, request, message in self._exchange.receive(0.2):
                self._exchange.send(identity, self._reply(message), request)
            self._exchange.flush()
        self._exchange.close()

    def _reply(self, message: Message) -> Message:
        if not isinstance(message, Fetch):
            return Refused(code="not_allowed", reason=f"{type(message).__name__} is not for the snapshot port")
        try:
            return self._answer(message)
        except Exception as error:  # the others who ask need this thread
            log.exception("a bucket was not given", version=message.version, bucket=message.index)
            return Refused(code="failed", reason=f"bucket {message.index}: {type(error).__name__}: {error}")


class BucketClient:
    """A receiver's line to the trainer's `BucketServer`."""

    def __init__(self, address: str, identity: str, keys: ClientKeys | None) -> None:
        mine = keys.to_reach() if keys else None
        self.address = address
        self._mailbox = Mailbox(address, identity, mine)

    def fetch(
        self,
        version: int,
        digest: str,
        layout: Layout,
        missing: list[int],
        base: tuple[str, torch.Tensor] | None,
        arrived: Callable[[Bucket, np.ndarray], None],
        deadline_s: float,
    ) -> int:
        """Asks for the ``missing`` buckets; ``arrived`` is called with each and its bytes. ``base``: the digest of a
        whole version that the receiver has, and its flat buffer, which changes are applied to. Returns the bytes that
        came. Raises `DeadlineError`, `RefusedError` or what ``arrived`` raises."""
        received, held = 0, base[0] if base else ""
        asked = deque(self._ask(version, digest, index, held, deadline_s) for index in missing[:WINDOW])
        for place in range(len(missing)):
            reply = asked.popleft().result(WINDOW * deadline_s + 5)
            if place + WINDOW < len(missing):
                asked.append(self._ask(version, digest, missing[place + WINDOW], held, deadline_s))
            assert isinstance(reply, Bucket)
            data = np.frombuffer(reply.data.data, np.uint8)
            received += len(data)
            if reply.encoding == "gap-ulp" and base and reply.index < len(layout.spans):
                start, end = layout.spans[reply.index]
                bucket = base[1][start:end].numpy().copy()
                delta.apply(data.data, bucket)
                data = bucket
            arrived(reply, data)
        return received

    def close(self) -> None:
        """Hangs up."""
        self._mailbox.close(0.5)

    def _ask(self, version: int, digest: str, index: int, held: str, deadline_s: float) -> Future[Message]:
        fetch = Fetch(version=version, digest=digest, index=index, held=held)
        return self._mailbox.ask_later(fetch, WINDOW * deadline_s, again=False)  # behind those asked for before


def bucket_reply(version: int, index: int, whole: memoryview, changes: bytes | None) -> Bucket:
    """The answer to a `Fetch`."""
    if changes is not None:
        return Bucket(version=version, index=index, encoding="gap-ulp", data=as_bytes(changes))
    # A copy: ZeroMQ may send it long after the snapshot's buffer was filled with another version.
    return Bucket(version=version, index=index, encoding="whole", data=as_bytes(bytes(whole)))
