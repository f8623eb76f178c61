"""A server of the Model Context Protocol over stdio, and one over HTTP as most that are there: with sessions."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def serve() -> None:
    """``python mcp_toy.py``."""
    import anyio
    from mcp.server import MCPServer

    print("a greeting, which is no message", flush=True)  # noqa: T201
    server, notes = MCPServer("toy"), list[str]()

    @server.tool()
    def add(a: int, b: int = 1) -> int:
        """Adds two numbers."""
        return a + b

    @server.tool()
    def note(text: str) -> str:
        """Remembers a text; gives all of them, and this process."""
        notes.append(text)
        return f"{os.getpid()} {os.environ.get('TOY_SECRET')} {','.join(notes)}"

    @server.tool()
    async def wait(seconds: float) -> str:
        """Waits."""
        await anyio.sleep(seconds)
        return "waited"

    server.run("stdio")


class Sessions(ThreadingHTTPServer):
    """Streamable HTTP of 2025-06-18. ``known``: its sessions, which it forgets as one that is started again does."""

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Door)
        self.known: set[str] = set()
        self.refuses = False
        self.forgotten: tuple[int, dict[str, Any] | None] = (404, None)
        """What it says to a session that it does not know: status and body."""
        self.hangs = threading.Event()
        """Not set: it leaves whoever ends a session waiting."""
        self.hangs.set()
        self.authorized: list[str | None] = []
        self.url = f"http://127.0.0.1:{self.server_port}/mcp"
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def handle_error(self, *_: object) -> None: ...


class _Door(BaseHTTPRequestHandler):
    server: Sessions

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.authorized.append(self.headers["authorization"])
        session = self.headers["mcp-session-id"]
        if self.server.refuses:
            return self._say(503, None)
        if asked["method"] not in ("initialize", "server/discover") and session not in self.server.known:
            return self._say(*self.server.forgotten)
        if "id" not in asked:
            return self._say(202, None)
        if asked["method"] == "initialize":
            session = f"session-{len(self.server.known)}"
            self.server.known.add(session)
        reply = {"jsonrpc": "2.0", "id": asked["id"], **self._reply(asked["method"], asked.get("params") or {})}
        return self._say(200, reply, session)

    def _reply(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        if method == "initialize":
            info = {"name": "toy", "version": "1"}
            return {"result": {"protocolVersion": "2025-06-18", "capabilities": {"tools": {}}, "serverInfo": info}}
        if method == "tools/list":
            return {"result": {"tools": [{"name": "look", "inputSchema": {"type": "object"}}]}}
        if method == "tools/call" and params["arguments"].get("die"):
            self.connection.shutdown(socket.SHUT_RDWR)
        if method == "tools/call" and params["arguments"].get("cut"):
            self.wfile.write(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{")
            self.connection.shutdown(socket.SHUT_RDWR)
        if method == "tools/call":
            time.sleep(params["arguments"].get("seconds", 0))
            image = {"type": "image", "data": "", "mimeType": "image/png"}
            return {"result": {"content": [{"type": "text", "text": self.headers["mcp-session-id"]}, image]}}
        return {"error": {"code": -32601, "message": "no such method"}}

    def do_GET(self) -> None:
        self._say(405, None)

    def do_DELETE(self) -> None:
        self.server.hangs.wait(30)
        self._say(200, None)

    def _say(self, status: int, reply: dict[str, Any] | None, session: str | None = None) -> None:
        body = b"" if reply is None else json.dumps(reply).encode()
        self.send_response(status)
        if session:
            self.send_header("mcp-session-id", session)
        if reply:
            self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None: ...


if __name__ == "__main__":
    sys.exit(serve())
