"""One connection of a mailbox: a DEALER socket that is made anew where its peer has ended it."""

from __future__ import annotations

import re
import time
from collections import deque

import zmq
from zmq.utils.monitor import recv_monitor_message

from penstock.protocols import wire
from penstock.protocols.keys import ClientKeys

ANEW_S = 1.0
"""Between two sockets, where the one before was ended, too."""
LINGER_MS = 2000
"""For what was said last."""
LOST_MS = 60_000
"""What a peer's machine has not acknowledged for so long, or has no room for since its process was stopped, is not on
its way any more: the line is dead, and another is made."""
_ENDED = zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ADDRESS = re.compile(r"tcp://[^\s/]+:(\d{1,5})")


def is_address(address: str) -> bool:
    """Somebody may listen there, as in ``tcp://127.0.0.1:5555``."""
    found = _ADDRESS.fullmatch(address)
    return found is not None and 0 < int(found[1]) < 1 << 16


def set_up(sock: zmq.Socket, address: str) -> None:
    """For what is bound, or connected, to ``address``. Nothing is dropped for want of room, and no frame is larger than
    the wire allows. A connection on which nobody says anything for long is not forgotten by what lies between, or is
    made anew."""
    options = {zmq.LINGER: LINGER_MS, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.MAXMSGSIZE: wire.MAX_FRAME_BYTES}
    options |= {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}
    options |= {zmq.TCP_MAXRT: LOST_MS}
    options |= {zmq.HEARTBEAT_IVL: 30_000, zmq.HEARTBEAT_TIMEOUT: 600_000}  # in ms; behind a large frame it waits
    options |= {zmq.IPV6: int("[" in address)}  # with it, one of IPv4 would be written as one of IPv6
    for option, value in options.items():
        sock.setsockopt(option, value)


class Connection:
    """To ``address`` under the name ``identity``, read by ``poller``; used from one thread. Whatever was said by a
    socket whose line broke may be lost: whoever needs an answer asks again (`look`)."""

    def __init__(
        self, context: zmq.Context, poller: zmq.Poller, address: str, identity: str, keys: ClientKeys | None
    ) -> None:
        self._context, self._poller = context, poller
        self._address, self._identity, self._keys = address, identity, keys
        self._ended = self._broken = False
        """The socket's line is; and one was, since `look` has told of it."""
        self._arrived: deque[list[zmq.Frame]] = deque()
        """By sockets that are closed."""
        self._socket, self._monitor = self._connected()

    def send(self, frames: list[bytes | memoryview]) -> None:
        """Never waits."""
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._ended = True

    def receive(self) -> list[zmq.Frame] | None:
        """The frames of one message; None where none has come."""
        return self._arrived.popleft() if self._arrived else self._next()

    def look(self) -> bool:
        """To be called whenever the poller has come back. A line that was ended gets a socket of its own: ZeroMQ
        connects some of them again and others never, and of those one that was refused more quickly than it had started
        takes what it is given, and sends nothing. True where there is a line again after one that broke."""
        again = False
        while self._monitor.poll(0):
            event = recv_monitor_message(self._monitor)["event"]
            self._ended = event != zmq.EVENT_HANDSHAKE_SUCCEEDED
            again, self._broken = self._broken and not self._ended, self._ended
        if self._ended and time.monotonic() - self._made_at > ANEW_S:
            while (message := self._next()) is not None:  # what came before it ended counts
                self._arrived.append(message)
            anew = self._connected()
            self.close()
            self._socket, self._monitor = anew
            self._broken, self._ended = True, False
        return again

    def close(self, linger_ms: int = 0) -> None:
        """Hangs up, once what was said is sent, or ``linger_ms`` later."""
        self._poller.unregister(self._monitor)
        self._poller.unregister(self._socket)
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(linger_ms)

    def _next(self) -> list[zmq.Frame] | None:
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def _connected(self) -> tuple[zmq.Socket, zmq.Socket]:
        """The socket, and its monitor."""
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, self._identity.encode())
        set_up(sock, self._address)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys:
            sock.setsockopt(zmq.CURVE_SERVERKEY, self._keys.broker_public.encode())
            sock.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public.encode())
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret.encode())
        monitor = sock.get_monitor_socket(_ENDED | zmq.EVENT_HANDSHAKE_SUCCEEDED)
        try:
            sock.connect(self._address)
        except BaseException:
            sock.disable_monitor()
            monitor.close(0)
            sock.close()
            raise
        self._made_at = time.monotonic()
        self._poller.register(sock, zmq.POLLIN)
        self._poller.register(monitor, zmq.POLLIN)
        return sock, monitor
