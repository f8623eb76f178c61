"""Stands in for a judge, so that the example runs anywhere: an API of OpenAI's kind that takes 0.2 to 0.6 s to say how
well letters are sorted. python judge_server.py [PORT]"""

import json
import random
import re
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Server(ThreadingHTTPServer):
    """Answers each call in a thread of its own."""

    request_queue_size = 512


class Judge(BaseHTTPRequestHandler):
    """``POST /v1/chat/completions``."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """Finds the task and the answer in the question, and marks the answer."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        found = re.search(r"Task: sort (\w*)=\nAnswer: (.*)\n", asked["messages"][-1]["content"])
        time.sleep(random.uniform(0.2, 0.6))
        mark = 0
        if found:
            wanted, answer = "".join(sorted(found[1])), found[2]
            right = sum(a == b for a, b in zip(wanted, answer, strict=False))
            mark = round(10 * right / max(len(wanted), len(answer)))
        reply = json.dumps({"choices": [{"message": {"role": "assistant", "content": str(mark)}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Not a line for every call."""


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8123
    Server(("127.0.0.1", port), Judge).serve_forever()
