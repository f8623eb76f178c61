"""The run's state for Prometheus: what the broker knows of steps, actors, queues and rewards, at one address.

Every actor tells the broker how it is with each heartbeat, so one address has all of them, also those that have gone.
What is shown is the state of a second ago; whoever asks is answered by a thread of its own, and the broker waits for
nobody.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog
from prometheus_client import CollectorRegistry, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.services.runtime.address import reached_at
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.files import write_whole

log = structlog.get_logger()

TARGETS = "prometheus-{}.json"
"""Beside the run's folder, by its name, while it is served: where that is, as Prometheus' ``file_sd_configs`` reads
it."""
EVERYWHERE = "0.0.0.0"
SILENT_S = 5.0
"""A connection on which nothing is asked for so long is closed: each has a thread of the broker's."""
_PLACE = ("kind", "pid", "host", "version")


class Exporter(Collector):
    """Serves at ``address`` (``HOST:PORT``; port 0: any that is free) what it was shown last. ``wanted``: how many
    processes of each kind the config asks for. ``advertised``: where others reach the broker, if that is not where it
    listens. Raises `SetupError` where it cannot listen there."""

    def __init__(
        self, address: str, folder: Path, run: str, wanted: Mapping[str, int], advertised: str | None = None
    ) -> None:
        self._state: dict[str, Any] = {}
        self._wanted = dict(wanted)
        registry = CollectorRegistry()
        registry.register(self)
        host, _, port = address.rpartition(":")
        try:
            self._server, _ = start_http_server(int(port), host or "127.0.0.1", registry)
            self._server.RequestHandlerClass.timeout = SILENT_S  # type: ignore[attr-defined]
        except (OSError, ValueError, OverflowError) as error:
            raise SetupError(f"run.prometheus: cannot listen at {address}: {error}; choose another port") from error
        self.port = int(self._server.server_port)
        own = host or "127.0.0.1"
        if own == EVERYWHERE:  # to a Prometheus on another machine that would be its own
            own = urlsplit(advertised or "").hostname or reached_at(own)
        target = f"{own}:{self.port}"
        self._targets = folder.parent / TARGETS.format(folder.name)
        try:
            write_whole(self._targets, json.dumps([{"targets": [target], "labels": {"run": run}}]))
        except OSError as error:  # whoever knows the address can ask all the same
            log.warning("Prometheus is not told where the metrics are", file=str(self._targets), error=str(error))
        log.info("metrics for Prometheus", at=f"http://{target}/metrics")

    def show(self, state: dict[str, Any]) -> None:
        """``state`` is the live state from now on; nobody changes it."""
        self._state = state

    def close(self) -> None:
        """Answers nobody any more."""
        self._targets.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """Every metric, as it is now."""
        state = self._state
        if not state:
            return
        yield InfoMetricFamily("penstock_run", "The run.", value={"run": state["run"], "phase": state["phase"]})
        for name, about, value in (
            ("step", "Steps that are committed.", state["step"]),
            ("steps", "Steps that the run is to have.", state["steps"]),
            ("version", "The newest version of the weights.", state["version"]),
            ("max_lag", "The bound: how many versions a token may be old.", state["max_lag"]),
            ("train_seconds", "Since training began.", state["train_s"]),
            ("stalled", "1 while no step is completed for longer than usual.", float(bool(state["stall"]))),
            ("restarts", "Processes that came back, and runs that were taken up.", state["restarts"]),
        ):
            yield _gauge(name, about, [({}, value)])
        yield _gauge(
            "step_metric", "A metric of the last step, see docs/metrics.md.", _named(state["metrics"], "metric")
        )
        yield _gauge(
            "eval_reward", "Mean reward of the newest evaluation, by its set.",
            _named(next(reversed(state["evaluations_by_set"].values()), {}), "set"),
        )  # fmt: skip
        yield _gauge(
            "eval_loss", "Newest loss on held-out rows, nats a token, by their set.",
            _named(next(reversed(state["eval_losses"].values()), {}), "set"),
        )  # fmt: skip
        yield _gauge("groups", "Groups of answers in each state.", _named(state["queues"], "state"))
        yield from self._actors(state["members"])
        yield _gauge("actor_lost", "Actors that are not heard of any more.", [({"actor": a}, 1) for a in state["lost"]])
        yield _count("groups_dropped", "Groups that were left out.", [({}, state["dropped"])])
        yield _count(
            "reward_calls_failed", "Calls of reward functions that gave no reward.",
            [({"reward": name}, said["failed"]) for name, said in state["rewards"].items()],
        )  # fmt: skip
        yield _count("messages_refused", "Messages that the broker refused.", [({}, state["refused_messages"])])

    def _actors(self, members: Mapping[str, Mapping[str, Any]]) -> Iterator[Metric]:
        every = [({"actor": name, "kind": row["kind"]}, row) for name, row in members.items()]
        kinds = ["broker", *(row["kind"] for row in members.values())]  # which is whoever serves this
        there = {kind: kinds.count(kind) for kind in {*kinds, *self._wanted}}
        yield _gauge("actors", "Actors that are here, by kind.", _named(there, "kind"))
        yield _gauge("actors_wanted", "Actors that the config asks for.", _named(self._wanted, "kind"))
        yield _gauge(
            "actor_silent_seconds", "Since it was heard of.", [(labels, row["silent_s"]) for labels, row in every]
        )
        yield _gauge(
            "actor_version", "Version of the weights that it has.", [(labels, row["version"]) for labels, row in every]
        )
        gauges = [
            ({**labels, "gauge": name}, value)
            for labels, row in every
            for name, value in row.items()
            if name not in (*_PLACE, "silent_s") and value is not None
        ]
        yield _gauge("actor", "What an actor says of itself, by the name of the gauge.", gauges)


Samples = Iterable[tuple[dict[str, str], Any]]


def _gauge(name: str, about: str, samples: Samples) -> Metric:
    return _filled(GaugeMetricFamily, name, about, samples)


def _count(name: str, about: str, samples: Samples) -> Metric:
    return _filled(CounterMetricFamily, name, about, samples)


def _filled(kind: Any, name: str, about: str, samples: Samples) -> Metric:
    rows = [(labels, float(value)) for labels, value in samples if isinstance(value, int | float)]
    family: Metric = kind(f"penstock_{name}", about, labels=list(rows[0][0]) if rows else [])
    for labels, value in rows:
        family.add_metric(list(labels.values()), value)  # type: ignore[attr-defined]
    return family


def _named(values: Mapping[str, Any], label: str) -> Samples:
    return [({label: name}, value) for name, value in values.items()]
