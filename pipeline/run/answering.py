"""Whether a program of others answers, and does what it is asked."""

from __future__ import annotations

import http.client
import socket
import urllib.error
import urllib.request
from urllib.parse import urlsplit

ANSWER_S = 2.0
"""For it to say that it is ready."""
SAID = 200
"""Bytes of what it says of an error."""


def lacks(url: str) -> str:
    """Why what listens at ``url`` is not ready; empty: it is."""
    parts = urlsplit(url)
    if parts.scheme != "tcp":
        return _opened(urllib.request.Request(url), ANSWER_S)
    try:
        assert parts.hostname and parts.port
        socket.create_connection((parts.hostname, parts.port), ANSWER_S).close()
    except OSError as error:
        return _silent(error)
    return ""


def refuses(url: str, timeout_s: float) -> str:
    """Why an empty JSON object, posted to ``url``, came to nothing; empty: it has come to something."""
    head = {"Content-Type": "application/json"}
    return _opened(urllib.request.Request(url, data=b"{}", headers=head, method="POST"), timeout_s)


def _opened(request: urllib.request.Request, timeout_s: float) -> str:
    try:
        urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=timeout_s).close()
    except urllib.error.HTTPError as error:
        page = "html" in error.headers.get("Content-Type", "")
        words = "" if page else " ".join(error.read(SAID).decode(errors="replace").split())
        return f"answers {error.code} ({error.reason})" + (f": {words}" if words else "")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _silent(error)
    return ""


def _silent(error: Exception) -> str:
    return f"does not answer ({getattr(error, 'reason', error)})"
