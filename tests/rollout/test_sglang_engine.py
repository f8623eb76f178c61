"""SGLang's protocol, against a server that ends an answer by SGLang's own rules."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np

from penstock.protocols.experience import Sampling
from penstock.services.rollout.engines.base import Completion, Request
from penstock.services.rollout.engines.http.sglang import SGLangEngine
from tests.trainer.rank_program import a_model

WOULD_SAY = [5, 6, 0, 7, 8]


class Handler(BaseHTTPRequestHandler):
    def log_message(self, *_: Any) -> None:
        pass

    def say(self, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.say({})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.say({"success": True} if "update" in self.path else {"meta_info": self.answer(body["sampling_params"])})

    def answer(self, asked: dict[str, Any]) -> dict[str, Any]:
        """As its schedule_batch.py has it: ignore_eos is looked at before any token that stops."""
        said, reason = WOULD_SAY[: asked["max_new_tokens"]], "length"
        for place, token in enumerate(said):
            if not asked["ignore_eos"] and token in asked["stop_token_ids"]:
                said, reason = said[: place + 1], "stop"
                break
        return {"output_token_logprobs": [[-0.5, token, None] for token in said], "finish_reason": {"type": reason}}


def test_an_answer_ends_at_its_end(tmp_path: Path) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    model = a_model()
    model.save_pretrained(tmp_path / "model")
    options = {"url": f"http://127.0.0.1:{server.server_address[1]}", "folder": str(tmp_path / "versions")}
    engine = SGLangEngine(options | {"max_length": 32}, str(tmp_path / "model"), "float32", {0})
    try:
        engine.swap(engine.prepare(dict(model.state_dict())), 1)
        for number, new in enumerate((5, 2)):
            engine.submit(Request(number, 0, np.array([1, 2], np.int32), Sampling(n=1, max_new_tokens=new)))
        found: dict[int, Completion] = {}
        deadline = time.monotonic() + 20
        while len(found) < 2:
            assert time.monotonic() < deadline
            found |= {each.number: each for each in engine.step() if isinstance(each, Completion)}
        assert (found[0].tokens.tolist(), found[0].finish) == ([5, 6, 0], "stop")
        assert (found[1].tokens.tolist(), found[1].finish) == ([5, 6], "length")
    finally:
        engine.close()
        server.shutdown()
        server.server_close()
