"""What an agent is told that it did wrong, or that the pipeline cannot do: an HTTP status, a word for programs, and a
sentence for people."""

from __future__ import annotations


class AgentError(Exception):
    """Costs this request alone. ``retry_s``: it may be asked again after so long."""

    def __init__(self, status: int, code: str, message: str, retry_s: float | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.retry_s = status, code, retry_s
