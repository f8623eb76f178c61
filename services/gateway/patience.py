"""Who opens a connection and does not say what it wants, or does not read what it is told, is not waited for."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from uvicorn.protocols.http.h11_impl import H11Protocol

HEADERS_S = 20.0
"""For the headers of a request, from the connection's begin or from the first bytes behind the request before."""
UNREAD_S = 60.0
"""For an agent to read anything of an answer that waits for it, again and again."""


class ImpatientProtocol(H11Protocol):
    """Uvicorn's, which by itself waits for headers without end."""

    headers_s, unread_s = HEADERS_S, UNREAD_S

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A connection begins."""
        super().connection_made(transport)
        self._reading: asyncio.TimerHandle | None = None
        self._unread: asyncio.TimerHandle | None = None
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
        self._stop_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The agent does not read what it is told."""
        super().pause_writing()
        self._await_reader(None)

    def resume_writing(self) -> None:
        """It does."""
        super().resume_writing()
        self._stop_unread()

    def _await_reader(self, before: int | None) -> None:
        """``before``: bytes that were unread when it was last looked."""
        unread = self.transport.get_write_buffer_size()
        if before is not None and unread >= before:
            self.transport.abort()
            return
        self._unread = self.loop.call_later(self.unread_s, self._await_reader, unread)

    def _stop_unread(self) -> None:
        if self._unread:
            self._unread.cancel()
            self._unread = None

    def _wait(self) -> None:
        cycle = cast(Any, self.cycle)
        between = cycle is None or cycle.response_complete
        if between and self._reading is None:
            self._reading = self.loop.call_later(self.headers_s, self.transport.close)
        elif not between and self._reading:
            self._reading.cancel()
            self._reading = None
