"""The life of each group as an OpenTelemetry trace: who generated it, what judged it, how long it waited, which step.

A trace is made once the group is trained on, or dropped, and sent by threads of its own: nothing that a collector does
is waited for. What a broker that was killed knew of groups under way is lost to their traces, and to nothing else.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import structlog

from penstock.protocols.experience import GroupSummary
from penstock.services.broker.rules.ledger import Step
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install

log = structlog.get_logger()

WAITING = 10_000
"""Lives that may wait to be sent; of more, those that end are left out."""
CLOSE_S = 10.0
NS = 1_000_000_000


@dataclass(slots=True)
class Life:
    """What is known of a group; seconds since 1970."""

    number: int
    began: float
    attempts: list[tuple[float, str]] = field(default_factory=list)
    """When it was leased, and to whom."""
    finished: float | None = None
    by: str = ""
    """Whose answer it is."""
    size: dict[str, int] = field(default_factory=dict)
    """Trajectories, tokens, and the versions that wrote them."""
    columns: list[tuple[str, float, float]] = field(default_factory=list)
    """Which was there when, and the seconds that its scorer took."""
    taken: float | None = None
    step: int | None = None
    ended: float = 0.0
    dropped: str | None = None
    """Why it is not trained on."""


class Traces:
    """Of the groups of one run; sent by OTLP over HTTP to the collector at ``endpoint`` (None: nobody hears of them).
    Raises `SetupError` where OpenTelemetry is not installed."""

    def __init__(self, endpoint: str | None, run: str) -> None:
        self._heard = endpoint is not None
        if self._heard and not installed():
            raise SetupError(f"run.traces: OpenTelemetry is not installed; run: {install('otel')}")
        self._lives: dict[int, Life] = {}
        self._ended: queue.Queue[Life | None] = queue.Queue(WAITING)
        self._thread = threading.Thread(target=self._send, args=(endpoint or "", run), name="traces", daemon=True)
        if self._heard:
            self._thread.start()

    def leased(self, number: int, to: str) -> None:
        """It was given to a rollout, or to a gateway."""
        if self._heard:
            self._life(number).attempts.append((time.time(), to))

    def finished(self, number: int, by: str, said: GroupSummary) -> None:
        """Its answers are there."""
        if self._heard:
            life = self._life(number)
            life.finished, life.by = time.time(), by
            life.size = {"trajectories": said.trajectories, "tokens": said.sampled}
            life.size |= {"oldest": said.oldest, "newest": said.newest}

    def scored(self, number: int, column: str, seconds: float) -> None:
        """A column is there."""
        if self._heard:
            self._life(number).columns.append((column, time.time(), seconds))

    def trained(self, step: Step) -> None:
        """A step with these groups is committed."""
        for number in step.groups if self._heard else ():
            life = self._life(number)
            life.taken, life.step = step.taken_at, step.step
            self._end(number)

    def dropped(self, number: int, reason: str) -> None:
        """It will never be trained on."""
        if self._heard:
            self._life(number).dropped = reason
            self._end(number)

    def close(self) -> None:
        """Sends what is left, for at most `CLOSE_S`."""
        if not self._heard:
            return
        try:
            self._ended.put(None, timeout=1)
        except queue.Full:
            return
        self._thread.join(CLOSE_S)

    def _life(self, number: int) -> Life:
        return self._lives.setdefault(number, Life(number, time.time()))

    def _end(self, number: int) -> None:
        life = self._lives.pop(number)
        life.ended = time.time()
        try:
            self._ended.put_nowait(life)
        except queue.Full:
            pass

    def _send(self, endpoint: str, run: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        provider = TracerProvider(resource=Resource.create({"service.name": "penstock", "penstock.run": run}))
        exporter = OTLPSpanExporter(endpoint=f"{endpoint.rstrip('/')}/v1/traces", timeout=CLOSE_S / 2)
        provider.add_span_processor(BatchSpanProcessor(exporter))
        tracer = provider.get_tracer("penstock")
        while (life := self._ended.get()) is not None:
            try:
                tell(tracer, life)
            except Exception as error:  # nobody waits for it
                log.warning("a group has no trace (run.traces)", group=life.number, error=str(error))
        provider.shutdown()


def tell(tracer: Any, life: Life) -> None:
    """The spans of one group: itself, each attempt to generate it, each column, its waiting, and the step."""
    from opentelemetry.trace import Status, StatusCode, set_span_in_context

    known = {"group": life.number, "step": life.step, "rollout": life.by or None, **life.size}
    attributes = {f"penstock.{name}": value for name, value in known.items() if value is not None}
    root = tracer.start_span("group", start_time=round(life.began * NS), attributes=attributes)
    inside = set_span_in_context(root)

    def span(name: str, start: float, end: float, **more: Any) -> None:
        tracer.start_span(name, inside, start_time=round(start * NS), attributes=more).end(round(end * NS))

    for (since, to), until in zip(life.attempts, [*(at for at, _ in life.attempts[1:]), life.finished], strict=False):
        span("generate", since, until or life.ended, **{"penstock.rollout": to})
    for name, at, seconds in life.columns:
        span(f"column {name}", at - seconds, at)
    if life.taken is not None:
        ready = max([at for _, at, _ in life.columns], default=life.finished or life.taken)
        span("wait for a step", min(ready, life.taken), life.taken)
        span("step", life.taken, life.ended)
    if life.dropped is not None:
        root.set_status(Status(StatusCode.ERROR, life.dropped))
    root.end(round(life.ended * NS))


def installed() -> bool:
    """What sends them is here."""
    try:
        return find_spec("opentelemetry.exporter.otlp.proto.http") is not None
    except ModuleNotFoundError:
        return False
