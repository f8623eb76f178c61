"""Looking at a run whose broker is silent, refuses, or has no address."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
from typer.testing import CliRunner

from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError
from penstock.pipeline.observe import client
from penstock.protocols import messages as m
from penstock.protocols.router_server import RouterServer


class Broker:
    """Lets everybody in, and has ``answer`` for whoever asks how the run stands."""

    def __init__(self, answer: m.Message | None) -> None:
        self.router, self._answer = RouterServer("tcp://127.0.0.1:0"), answer
        self._open = True
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._open = False
        self._thread.join(5)
        self.router.close()

    def _run(self) -> None:
        while self._open:
            for identity, request, message in self.router.receive(0.02):
                answer = self._answer if isinstance(message, m.StatusRequest) else m.Ack()
                if answer is not None:
                    self.router.send(identity, answer, request)
            self.router.flush()


@pytest.fixture(params=[None, m.Refused(code="not_allowed", reason="not now")])
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(client, "DEADLINE_S", 0.5)
    made = Broker(request.param)
    yield made
    made.close()


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_broker_that_lets_one_in_and_says_nothing_more_is_an_error_in_words(command: str, broker: Broker) -> None:
    done = CliRunner().invoke(app, [command, "--broker", broker.router.address])
    assert isinstance(done.exception, ConfigError)
    assert any(said in str(done.exception) for said in ("no broker answers at tcp://", "refuses: not now"))


@pytest.mark.parametrize("address", ["notanaddress", "tcp://host", "127.0.0.1:5555", "tcp://host:port"])
def test_what_is_no_address_is_named(address: str) -> None:
    done = CliRunner().invoke(app, ["status", "--broker", address])
    assert isinstance(done.exception, ConfigError) and f"--broker: {address!r} is not an address" in str(done.exception)
