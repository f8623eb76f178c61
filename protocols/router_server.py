"""The serving side of the wire: one ROUTER socket, which many mailboxes ask."""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable

import structlog
import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import recv_monitor_message

from penstock.protocols import wire
from penstock.protocols.connection import set_up
from penstock.protocols.free_port import lasting_ports
from penstock.protocols.keys import BrokerKeys, Door, is_loopback
from penstock.protocols.mailbox import BESIDE, AddressError
from penstock.protocols.messages import HeartbeatAck, Message, Refused, from_envelope, to_envelope

log = structlog.get_logger()

TURN_BYTES = 256 << 20
"""Received at once: all of a turn is made durable in one write, and Redis takes a gigabyte."""
MOST_REASON = 2000
"""Characters of a refusal, which may quote what was refused."""
MOST_GUESTS = 4096
"""More than speak in one turn: who is forgotten is known again as he speaks."""
REFUSED_S = 0.2
"""Refused messages are told of no more often."""
TELL_S = 10.0
"""Who is refused at the door is told of no more often."""
_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)


class RouterServer:
    """The broker's side: one ROUTER socket, used from one thread.

    Answers are queued and leave at `flush`, so the broker can make a whole turn's state durable before a word of it
    is acknowledged. ``key`` is the config's, for errors; ``admits`` says which public keys are guests';
    ``largest``: bytes of a frame.
    """

    def __init__(
        self,
        bind: str,
        keys: BrokerKeys | None = None,
        key: str = "broker.bind",
        admits: Callable[[str], bool] = lambda public: False,
        largest: int = wire.MAX_FRAME_BYTES,
    ) -> None:
        if not keys and not is_loopback(bind):
            raise AddressError(f"{key}: {bind} can be reached from other machines, and there are no keys")
        context = zmq.Context()
        authenticator: ThreadAuthenticator | None = None
        self._socket = context.socket(zmq.ROUTER)
        set_up(self._socket, bind)
        self._socket.setsockopt(zmq.MAXMSGSIZE, largest)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
        if keys:
            authenticator = ThreadAuthenticator(context)
            authenticator.start()
            authenticator.configure_curve_callback("penstock", credentials_provider=Door(keys.client_public, admits))
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.broker_secret.encode())
            self._socket.setsockopt(zmq.ZAP_DOMAIN, b"penstock")
        self._monitor = self._socket.get_monitor_socket(_HANDSHAKE_FAILED)
        # One that is dropped is closed, too, in this order: ZeroMQ waits for ever for a socket that is still open.
        self._close = weakref.finalize(self, _close, context, self._socket, self._monitor, authenticator)
        try:
            _bind(self._socket, bind)
        except zmq.ZMQError as error:
            self._close()
            hint = "another process has this port; choose another, or port 0 for a free one"
            raise AddressError(
                f"{key}: cannot bind {bind}: {error.strerror}" + (f" ({hint})" if error.errno == zmq.EADDRINUSE else "")
            ) from None
        self.address = self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        """What was bound, with the real port."""
        self.refused = 0
        """Malformed messages so far."""
        self.received_bytes = 0
        """In all messages so far."""
        self.strangers = 0
        """Connections refused so far for want of a key."""
        self._told_at = self._refused_at = -math.inf
        self.guests: dict[str, str] = {}
        """Identity to public key of the last `MOST_GUESTS` who came in as guests."""
        self._run_key = keys.client_public if keys else None
        self._outgoing: list[tuple[str, list[bytes | memoryview]]] = []

    def receive(self, timeout_s: float, limit: int = 256) -> list[tuple[str, int, Message]]:
        """Up to ``limit`` messages, or the first beyond `TURN_BYTES`, as ``(identity, request id, message)``, waiting
        ``timeout_s`` for the first. A malformed one is answered with `Refused` and costs only itself."""
        received: list[tuple[str, int, Message]] = []
        while self._monitor.poll(0):
            recv_monitor_message(self._monitor)
            self.strangers += 1
            if time.monotonic() - self._told_at > TELL_S:  # or a stranger could fill the disk with it
                self._told_at = time.monotonic()
                log.warning("peers are refused at the door: no key, or a wrong one", refused=self.strangers)
        if not self._socket.poll(int(timeout_s * 1000)):
            return received
        taken = 0
        while len(received) < limit and taken < TURN_BYTES:
            try:
                sender, *parts = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                break
            size = sum(len(part) for part in parts)
            taken += size
            self.received_bytes += size
            identity = sender.bytes.decode("latin-1").removesuffix(BESIDE)  # any bytes, and back without loss
            request_id = 0
            if self._run_key and (public := sender.get("User-Id")) != self._run_key:
                self.guests.pop(identity, None)
                self.guests[identity] = str(public)
                if len(self.guests) > MOST_GUESTS:
                    del self.guests[next(iter(self.guests))]
            try:
                envelope = wire.decode([part.buffer for part in parts])
                request_id = envelope.id
                received.append((identity, request_id, from_envelope(envelope)))
            except wire.ProtocolError as error:
                self._refuse(identity, error, error.id, error.protocol)
            except Exception as error:  # whatever a peer sends, it costs only itself
                self._refuse(identity, error, request_id)
        return received

    def send(self, identity: str, message: Message, reply_to: int = 0) -> None:
        """Queues ``message`` until the next `flush`."""
        self._outgoing.append((_line(identity, message), wire.encode(to_envelope(message, reply_to=reply_to))))

    def send_now(self, identity: str, message: Message) -> None:
        """Ahead of what is queued: for what says nothing that must be durable first."""
        self._transmit(_line(identity, message), wire.encode(to_envelope(message)))

    def _refuse(self, identity: str, error: Exception, reply_to: int, protocol: int = wire.PROTOCOL) -> None:
        """In the peer's own protocol, which it can read; a refusal has looked the same in all of them."""
        self.refused += 1
        refusal = Refused(code="bad_message", reason=reason_of(error))
        if time.monotonic() - self._refused_at > REFUSED_S:  # or who says nonsense could fill the disk with it
            self._refused_at = time.monotonic()
            log.warning("a message was refused", sender=identity[:80], error=refusal.reason, refused=self.refused)
        self._outgoing.append((identity, wire.encode(to_envelope(refusal, reply_to=reply_to), protocol)))

    def flush(self) -> None:
        """Sends everything queued. A peer that is gone misses its message and asks again."""
        for identity, frames in self._outgoing:
            self._transmit(identity, frames)
        self._outgoing.clear()

    def _transmit(self, identity: str, frames: list[bytes | memoryview]) -> None:
        try:
            self._socket.send_multipart([identity.encode("latin-1"), *frames], copy=False)
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise

    def close(self) -> None:
        """Closes. What is queued is not sent: it was not made durable, or `flush` was not called."""
        self._close()


def reason_of(error: Exception | str) -> str:
    """What ``error`` says, at a length that can be sent and logged."""
    said = str(error)
    short = said if len(said) <= MOST_REASON else f"{said[:MOST_REASON]}…"
    return short.encode(errors="replace").decode()  # what is no text would not cross the wire


def _bind(socket: zmq.Socket, bind: str) -> None:
    """Raises `zmq.ZMQError`."""
    place, _, port = bind.rpartition(":")
    for lasting in lasting_ports() if port == "0" else ():
        try:
            socket.bind(f"{place}:{lasting}")
        except zmq.ZMQError as error:
            if error.errno != zmq.EADDRINUSE:
                raise
        else:
            return
    socket.bind(bind)


def _close(
    context: zmq.Context, socket: zmq.Socket, monitor: zmq.Socket, authenticator: ThreadAuthenticator | None
) -> None:
    if authenticator:
        authenticator.stop()
    socket.disable_monitor()
    monitor.close(0)
    socket.close()
    context.term()


def _line(identity: str, message: Message) -> str:
    """Which of a peer's connections it goes by."""
    return identity + BESIDE if isinstance(message, HeartbeatAck) else identity
