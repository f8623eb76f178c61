"""A collector of OpenTelemetry traces: OTLP over HTTP, as any collector hears it."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """Hears until `close`; ``spans`` are what it was sent."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                request = ExportTraceServiceRequest.FromString(self.rfile.read(int(self.headers["Content-Length"])))
                for group in request.resource_spans:
                    outer.resources.append({a.key: a.value.string_value for a in group.resource.attributes})
                    outer.spans += [span for scope in group.scope_spans for span in scope.spans]
                self.send_response(200 if self.path == "/v1/traces" else 404)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def lives(self) -> dict[int, list[Any]]:
        """The spans of each group, by its number; its own comes first."""
        found = {}
        for root in self.spans:
            if root.name == "group":
                number = next(a.value.int_value for a in root.attributes if a.key == "penstock.group")
                own = sorted(
                    (s for s in self.spans if s.parent_span_id == root.span_id), key=lambda s: s.start_time_unix_nano
                )
                found[number] = [root, *own]
        return found
