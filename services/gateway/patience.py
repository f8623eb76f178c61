"""Who opens a connection and does not say what it wants is not waited for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
"""For the headers of a request, from the connection's begin or from the first bytes behind the request before."""


class ImpatientProtocol(H11Protocol):
    """Uvicorn's, which by itself waits for headers without end."""

    headers_s = HEADERS_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._wait()

    def data_received(self, data: bytes) -> None:
        """Some of a request."""
        super().data_received(data)
        self._wait()

    def on_response_complete(self) -> None:
        """The next request may be there in part already."""
        super().on_response_complete()
        if self.conn.trailing_data[0]:
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """It has ended."""
        if self._reading:
            self._reading.cancel()
        super().connection_lost(exc)

    def _wait(self) -> None:
        cycle = cast(Any, self.cycle)
        between = cycle is None or cycle.response_complete
        if between and self._reading is None:
            self._reading = self.loop.call_later(self.headers_s, self.transport.close)
        elif not between and self._reading:
            self._reading.cancel()
            self._reading = None
