"""A judge's server that sleeps when it is told to, as vLLM's does, and writes down what nobody may do meanwhile:
python sleeping_judge.py PORT LOG"""

import json
import sys
import threading
import time
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

LOG = Path(sys.argv[2])
asleep, in_flight, lock = threading.Event(), [0], threading.Lock()


def say(event: str) -> None:
    """A line of a log, as actors have them."""
    with lock, LOG.open("a") as file:
        file.write(json.dumps({"event": event, "timestamp": datetime.now(UTC).isoformat()}) + "\n")


class Judge(BaseHTTPRequestHandler):
    """Takes 0.1 s for a grade."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        """It is ready."""
        self._reply({})

    def do_POST(self) -> None:
        """To sleep, to wake, or to give the grade of an answer that has letters."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path in ("/sleep", "/wake_up"):
            if self.path == "/sleep":
                say("asleep" if not in_flight[0] else "asleep while it was asked")
                asleep.set()
            else:
                asleep.clear()
                say("awake")
            self._reply({})
            return
        in_flight[0] += 1
        if asleep.is_set():
            say("asked while asleep")
        time.sleep(0.1)
        in_flight[0] -= 1
        grade = len(set(asked["messages"][-1]["content"])) % 10
        self._reply({"choices": [{"message": {"role": "assistant", "content": str(grade)}}]})

    def _reply(self, body: dict) -> None:
        reply = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: object) -> None:
        """Not a line for every call."""


if __name__ == "__main__":
    say("loading")
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Judge)
    server.daemon_threads = True
    server.serve_forever()
