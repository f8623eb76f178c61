"""One connection of a mailbox: a DEALER socket that is made anew where its peer has ended it."""

from __future__ import annotations

import re
from contextlib import suppress

import zmq

from penstock.protocols import wire
from penstock.protocols.keys import ClientKeys

_REFUSED = zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
_ADDRESS = re.compile(r"tcp://[^\s/]+:(\d{1,5})")


def is_address(address: str) -> bool:
    """Somebody may listen there, as in ``tcp://127.0.0.1:5555``."""
    found = _ADDRESS.fullmatch(address)
    return found is not None and 0 < int(found[1]) < 1 << 16


def set_up(sock: zmq.Socket, address: str) -> None:
    """For what is bound, or connected, to ``address``. Nothing is dropped for want of room, and no frame is larger than
    the wire allows. A connection on which nobody says anything for long is not forgotten by what lies between, or is
    made anew."""
    options = {zmq.LINGER: 2000, zmq.SNDHWM: 0, zmq.RCVHWM: 0, zmq.MAXMSGSIZE: wire.MAX_FRAME_BYTES}
    options |= {zmq.TCP_KEEPALIVE: 1, zmq.TCP_KEEPALIVE_IDLE: 30, zmq.TCP_KEEPALIVE_INTVL: 10, zmq.TCP_KEEPALIVE_CNT: 6}
    options |= {zmq.HEARTBEAT_IVL: 30_000, zmq.HEARTBEAT_TIMEOUT: 600_000}  # in ms; behind a large frame it waits
    options |= {zmq.IPV6: int("[" in address)}  # with it, one of IPv4 would be written as one of IPv6
    for option, value in options.items():
        sock.setsockopt(option, value)


class Connection:
    """To ``address`` under the name ``identity``, read by ``poller``; used from one thread."""

    def __init__(
        self, context: zmq.Context, poller: zmq.Poller, address: str, identity: str, keys: ClientKeys | None
    ) -> None:
        self._context, self._poller = context, poller
        self._address, self._identity, self._keys = address, identity, keys
        self._socket, self._refusals = self._connected()

    def send(self, frames: list[bytes | memoryview]) -> None:
        """Never waits. What was said by a socket that its peer has ended is lost; whoever needs an answer asks
        again."""
        if self._refusals.poll(0):
            self._renew()
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)
        except zmq.Again:
            self._renew()
            with suppress(zmq.Again):
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=False)

    def receive(self) -> list[zmq.Frame] | None:
        """The frames of one message; None where none has come."""
        try:
            return self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None

    def close(self) -> None:
        """Hangs up, once what was said is sent."""
        self._poller.unregister(self._socket)
        self._socket.disable_monitor()
        self._refusals.close(0)
        self._socket.close()

    def _renew(self) -> None:
        """ZeroMQ ends a socket whose handshake is refused, for good. Mostly it takes nothing more then, but where the
        refusal was quicker than its own start it takes all, and sends nothing: so its monitor is asked, too."""
        socket, refusals = self._connected()
        self.close()
        self._socket, self._refusals = socket, refusals

    def _connected(self) -> tuple[zmq.Socket, zmq.Socket]:
        """The socket, and where it says that it was refused."""
        sock = self._context.socket(zmq.DEALER)
        sock.setsockopt(zmq.IDENTITY, self._identity.encode())
        set_up(sock, self._address)
        sock.setsockopt(zmq.RECONNECT_IVL, 100)
        sock.setsockopt(zmq.RECONNECT_IVL_MAX, 1000)
        if self._keys:
            sock.setsockopt(zmq.CURVE_SERVERKEY, self._keys.broker_public.encode())
            sock.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public.encode())
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret.encode())
        refusals = sock.get_monitor_socket(_REFUSED)
        try:
            sock.connect(self._address)
        except BaseException:
            sock.disable_monitor()
            refusals.close(0)
            sock.close()
            raise
        self._poller.register(sock, zmq.POLLIN)
        return sock, refusals
