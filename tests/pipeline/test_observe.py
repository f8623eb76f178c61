"""Looking at a run whose broker is silent, refuses, or has no address."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.pipeline.api.run import Run
from penstock.pipeline.cli import app
from penstock.pipeline.config import ConfigError
from penstock.pipeline.harness.answering import AnsweringBroker
from penstock.pipeline.observe import client
from penstock.pipeline.run.lock import held
from penstock.protocols import messages as m


class Broker(AnsweringBroker):
    """Lets everybody in, and has ``reply`` for whoever asks how the run stands."""

    def __init__(self, reply: m.Message | None) -> None:
        self._reply = reply
        super().__init__()

    def answer(self, identity: str, message: m.Message) -> m.Message | None:
        return self._reply if isinstance(message, m.StatusRequest) else m.Ack()


@pytest.fixture(params=[None, m.Refused(code="not_allowed", reason="not now")])
def broker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    monkeypatch.setattr(client, "DEADLINE_S", 0.5)
    with Broker(request.param) as made:
        yield made


@pytest.mark.parametrize("command", ["status", "top"])
def test_a_broker_that_lets_one_in_and_says_nothing_more_is_an_error_in_words(command: str, broker: Broker) -> None:
    done = CliRunner().invoke(app, [command, "--broker", broker.address])
    assert isinstance(done.exception, ConfigError)
    assert any(said in str(done.exception) for said in ("no broker answers at tcp://", "refuses: not now"))


@pytest.mark.parametrize("command", ["status", "top", "join"])
def test_another_runs_broker_is_not_taken_for_the_runs_own(tmp_path: Path, command: str) -> None:
    """As with a `broker.bind` that two runs have, of which the first is gone."""
    (tmp_path / "config.yaml").write_text(Path("configs/quickstart.yaml").read_text())
    (tmp_path / "run.name").write_text("first")
    more = ["rollout", "--patience", "0.1"] if command == "join" else []
    with Broker(m.Status(state={"run": "second", "phase": "training"})) as broker:
        (tmp_path / "broker.address").write_text(broker.address)
        done = CliRunner().invoke(app, [command, str(tmp_path), *more])
    assert done.exit_code, done.output
    said = f"RUN: the broker at {broker.address} is of another run by now, second; the one in {tmp_path} goes on by"
    assert said in done.output + str(done.exception)


@pytest.mark.parametrize("address", ["notanaddress", "tcp://host", "127.0.0.1:5555", "tcp://host:port"])
def test_what_is_no_address_is_named(address: str) -> None:
    done = CliRunner().invoke(app, ["status", "--broker", address])
    assert isinstance(done.exception, ConfigError) and f"--broker: {address!r} is not an address" in str(done.exception)


def test_of_a_run_that_never_began_it_is_told_how_to_go_on(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").touch()
    with held(tmp_path):
        done = CliRunner().invoke(app, ["status", str(tmp_path)])
        assert f"no broker has listened for {tmp_path} yet; penstock run is at work in" in str(done.exception)
    done = CliRunner().invoke(app, ["status", str(tmp_path)])
    assert str(done.exception).endswith(f"go on with: penstock run --resume {tmp_path}")


@pytest.mark.parametrize("command", ["status", "top"])
def test_what_the_start_before_came_to_is_not_how_a_run_stands_that_goes_on(tmp_path: Path, command: str) -> None:
    (tmp_path / "config.yaml").touch()
    summary = {"outcome": "complete", "steps": 5}
    for name, text in (("summary.json", json.dumps(summary)), ("broker.address", "tcp://127.0.0.1:9\n")):
        (tmp_path / name).write_text(text)
        os.utime(tmp_path / name, (1e9, 1e9))
    with held(tmp_path):  # while it looks at its setup
        done = CliRunner().invoke(app, [command, str(tmp_path)])
        assert f"no broker has listened for {tmp_path} yet; penstock run is at work in" in str(done.exception)
        found = Run(tmp_path).status()
        assert found["phase"] == "preparing" and Run(tmp_path).summary is None
        (tmp_path / "summary.json").write_text(json.dumps(summary))  # and now it is over
        done = CliRunner().invoke(app, [command, str(tmp_path)])
        assert done.exit_code == 0 and '"steps": 5' in done.output


def test_a_broker_that_has_left_is_no_error_as_long_as_its_run_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "DEADLINE_S", 0.5)
    (tmp_path / "config.yaml").touch()
    (tmp_path / "metrics.jsonl").write_text('{"kind": "step", "step": 0, "reward": 0.5}\n')
    with held(tmp_path):
        (tmp_path / "broker.address").write_text("tcp://127.0.0.1:9\n")
        found = Run(tmp_path).status()
    assert (found["phase"], found["step"], found["metrics"]["reward"]) == ("ending", 1, 0.5)
    with pytest.raises(ConfigError, match="no broker answers"):
        Run(tmp_path).status()


SESSION = {
    "session": 1, "key": "a", "by": "HTTP", "turns": 1, "tokens": 2, "waiting": 0, "silent_s": 0.5, "given_on_s": None,
    "error": "\x1b[2Jred",
}  # fmt: skip


@pytest.mark.parametrize("answer", ["{}", "[7]", "[{}]", "<html>", "", None, json.dumps([SESSION])])
def test_whatever_is_at_a_gateways_old_address_is_told(tmp_path: Path, answer: str | None) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if answer is None:
                self.wfile.write(b"SSH-2.0-OpenSSH_9.2\r\n")
                return
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer.encode())

        def log_message(self, *_: object) -> None:
            pass

    (tmp_path / "gateways").mkdir()
    with HTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}"
        (tmp_path / "gateways" / "gateway-0.json").write_text(json.dumps({"http": url}))
        done = CliRunner().invoke(app, ["agents", str(tmp_path)])
        server.shutdown()
    if answer == json.dumps([SESSION]):
        assert done.exit_code == 0 and "\\x1b" in done.output and "\x1b[2J" not in done.output
    else:
        assert isinstance(done.exception, ConfigError), done.exception
        assert f"RUN: gateway-0 does not answer at {url}: " in str(done.exception)
