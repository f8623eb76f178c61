"""The tool of configs/recipes/search.yaml, asked by the policy's environment, with a retrieval server."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from penstock.pipeline.config import load
from penstock.services.environments.tools import Tools

RECIPE = Path(__file__).parents[2] / "configs" / "recipes" / "search.yaml"


class Retrieval(BaseHTTPRequestHandler):
    """Answers as Search-R1's does."""

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = [{"document": {"contents": f"{asked['queries'][0]} {place}"}, "score": 1.0} for place in range(2)]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"result": [found]}).encode())

    def log_message(self, *_: object) -> None:
        pass


def test_its_search_reads_what_the_server_has_found(monkeypatch: pytest.MonkeyPatch) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Retrieval)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/retrieve"
    tools = Tools(**load(RECIPE).rollout.environment.options)
    monkeypatch.setattr(sys.modules["search_tools"], "URL", url)
    call = '<tool_call>{"name": "search", "arguments": {"query": "Ada"}}</tool_call>'
    try:
        turn = asyncio.run(tools.step(call))
    finally:
        server.shutdown(), server.server_close()
    assert turn.observation == [{"role": "tool", "content": "Ada 0\n\nAda 1"}]
    assert tools.tools[0]["function"]["name"] == "search"
