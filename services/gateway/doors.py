"""Where agents come in: HTTP, and ZeroMQ for `penstock.AgentClient`; and the file that says where that is."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import Callable
from typing import TypeVar

import structlog
import uvicorn

from penstock.protocols.keys import is_loopback
from penstock.protocols.mailbox import AddressError
from penstock.services.gateway import ports
from penstock.services.gateway.access import Access
from penstock.services.gateway.config import GatewayConfig
from penstock.services.gateway.desk import Desk
from penstock.services.gateway.http import make_app
from penstock.services.gateway.patience import ImpatientProtocol
from penstock.services.gateway.zmq_door import ZmqDoor
from penstock.services.runtime.actor import ActorContext
from penstock.services.runtime.address import reached_at, reached_endpoint
from penstock.services.runtime.files import write_whole

log = structlog.get_logger()

LINES = 4
"""HTTP connections for each session and each turn that may wait; beyond them, 503."""


Door = TypeVar("Door")


class Doors:
    """Both of them, in front of one desk. ``model``: what HTTP agents call the policy."""

    def __init__(self, config: GatewayConfig, context: ActorContext, desk: Desk, model: str) -> None:
        self._advertise = config.advertise
        self._desk, self._file = desk, context.folder / "gateways" / f"{context.name}.json"
        number = context.name.rpartition("-")[2]
        index = int(number) if number.isdigit() and len(number) < 4 else 0  # a container's name may be all digits
        host, port = ports.http_at(config, index)
        zmq_host, zmq_port = ports.bind_at(config, index)
        before = self._ports_before()
        access = Access(context.folder, required=not is_loopback(f"tcp://{ports.address(host, 1)}"))
        keys = context.keys.to_serve() if context.keys else None

        def listen(port: int) -> socket.socket:
            return ports.listen("gateway.http", host, port)

        def bind(port: int) -> ZmqDoor:
            return ZmqDoor(f"tcp://{ports.address(zmq_host, port)}", desk, keys, access)

        # Any port is taken last: it might be the one where the other was.
        http = _opened_where_known(listen, port, before.get("http", 0))
        zmq = _opened_where_known(bind, zmq_port, before.get("zmq", 0))
        self._http, self._zmq = http or listen(0), zmq or bind(0)
        app = make_app(desk, model, access)
        settings = uvicorn.Config(
            app, http=ImpatientProtocol, log_config=None, access_log=False, timeout_keep_alive=75, lifespan="off",
            limit_concurrency=LINES * (config.sessions + config.waiting),
        )  # fmt: skip
        self._server = uvicorn.Server(settings)

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Says where they are, in the run's folder."""
        host, port = self._http.getsockname()[:2]
        where = {
            "http": self._advertise or f"http://{ports.address(reached_at(host), port)}",
            "zmq": reached_endpoint(self._zmq.address),
        }
        own = {"http": port, "zmq": int(self._zmq.address.rpartition(":")[2])}
        self._file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self._file, json.dumps(where | {"ports": own}) + "\n")
        log.info("gateway open", **where)
        self._zmq.start(loop, where["http"])

    def _ports_before(self) -> dict[str, int]:
        """Of a life that was killed, whose agents know no others."""
        try:
            found: dict[str, int] = json.loads(self._file.read_text()).get("ports", {})
        except (OSError, ValueError):
            return {}
        return found

    @property
    def zmq_alive(self) -> bool:
        """The ZeroMQ door has not ended by itself."""
        return self._zmq.alive

    async def serve(self) -> None:
        """Until `close`."""
        await self._server.serve(sockets=[self._http])

    def close(self) -> None:
        """No agent is answered any more."""
        self._file.unlink(missing_ok=True)
        self._server.should_exit = True
        self._zmq.close()


def _opened_where_known(open_at: Callable[[int], Door], port: int, before: int) -> Door | None:
    """At ``port``; where any will do, at the one that was open ``before``, if nobody else has it by now."""
    if port or not before:
        return open_at(port) if port else None
    try:
        return open_at(before)
    except AddressError:
        log.warning("another program has the port of before: agents that know it must look anew", port=before)
        return None
