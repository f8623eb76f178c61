"""An engine over HTTP beside a server that goes away and comes back, that is busy, and that takes its time."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch

from penstock.protocols.experience import Sampling
from penstock.services.modeling.weight_files import WeightFiles, save_in_parts
from penstock.services.rollout.engines import asynchronous
from penstock.services.rollout.engines.base import Completion, EngineError, Request
from penstock.services.rollout.engines.http import claim
from penstock.services.rollout.engines.http import engine as module
from penstock.services.rollout.engines.http.openai import OpenAIEngine
from penstock.services.runtime.errors import SetupError
from tests.trainer.rank_program import a_model

OWN, OURS = 7, 9
"""Tokens that the server says with the weights that it was started with, and with a version of ours."""


class Server(ThreadingHTTPServer):
    """As much of OpenAI's protocol as the engine speaks."""

    allow_reuse_address = daemon_threads = True
    loads = 0
    refusals: list[int]
    slow_s: dict[int, float]
    """Seconds that a prompt's answer takes, by its first token."""
    load_s = 0.0
    """Seconds that loading takes."""
    broken = False
    """It cannot load."""
    away = False
    """It says that it is not there when it is looked at."""
    paths: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def log_message(self, *_: Any) -> None:
        pass

    def say(self, status: int, value: Any) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self) -> None:
        self.say(503 if self.server.away else 200, {"data": [{"id": "model"}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.paths.append(self.path)
        if "collective_rpc" in self.path and self.server.broken:
            self.say(500, {})
            return
        if "collective_rpc" in self.path:
            time.sleep(self.server.load_s)
            self.server.loads += 1
        if "completions" not in self.path:
            self.say(200, {})
        elif self.server.refusals:
            self.say(self.server.refusals.pop(), {})
        else:
            time.sleep(self.server.slow_s.get(body["prompt"][0], 0.0))
            token = OURS if self.server.loads else OWN
            logprobs = {"token_logprobs": [-0.5]}
            self.say(200, {"choices": [{"token_ids": [token], "logprobs": logprobs, "finish_reason": "length"}]})


def serve(port: int = 0, load_s: float = 0.0) -> Server:
    server = Server(("127.0.0.1", port), Handler)
    server.refusals, server.slow_s, server.load_s, server.paths = [], {}, load_s, []
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    return server


def end(server: Server) -> int:
    server.shutdown()
    server.server_close()
    return server.server_address[1]


@pytest.fixture
def server() -> Iterator[Server]:
    made = serve()
    yield made
    end(made)


@pytest.fixture
def engine(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[OpenAIEngine]:
    """That serves version 5; a test's parameter are options of its own."""
    model = a_model()
    model.save_pretrained(tmp_path / "model")
    url = f"http://127.0.0.1:{server.server_address[1]}"
    options = {"url": url, "folder": str(tmp_path / "versions"), "max_length": 32, "drain_s": 5, "deadline_s": 5}
    made = OpenAIEngine(options | getattr(request, "param", {}), str(tmp_path / "model"), "float32", {0})
    made.swap(made.prepare(dict(model.state_dict())), 5)
    yield made
    made.close()


def send(engine: OpenAIEngine, number: int, first: int = 1, n: int = 1) -> None:
    engine.submit(Request(number, 0, np.array([first, 2], np.int32), Sampling(n=n, max_new_tokens=1)))


def hear(engine: OpenAIEngine, seconds: float = 20, until: Callable[[], bool] = lambda: False) -> list[Completion]:
    found: list[Completion] = []
    deadline = time.monotonic() + seconds
    while not found and not until():
        assert time.monotonic() < deadline, "no answer"
        found += [each for each in engine.step() if isinstance(each, Completion)]
    return found


def hear_all(engine: OpenAIEngine, count: int) -> list[Completion]:
    found: list[Completion] = []
    while len(found) < count:
        found += hear(engine)
    return found


def test_a_server_that_was_started_again_has_our_version_before_it_answers(
    engine: OpenAIEngine, server: Server
) -> None:
    send(engine, 0)
    assert hear(engine)[0].tokens.tolist() == [OURS] and server.loads == 1
    port = end(server)
    again: list[Server] = []
    late = threading.Timer(0.5, lambda: again.append(serve(port, load_s=0.3)))
    late.start()
    for number in (1, 2, 3):
        send(engine, number)
        time.sleep(0.05)
    late.join()
    send(engine, 4)  # it has not seen the line break
    answers = hear_all(engine, 4)
    assert {each.number for each in answers} == {1, 2, 3, 4}
    assert all(each.tokens.tolist() == [OURS] and each.versions.tolist() == [5] for each in answers)
    assert again[0].loads == 1, "it was told once"
    end(again[0])


def test_a_server_may_have_been_started_again_while_nothing_was_asked_of_it(
    engine: OpenAIEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 1.0)
    server.loads, server.load_s = 0, 0.3  # as a new one has none
    time.sleep(1.1)
    send(engine, 0, n=4)
    assert [each.tokens.tolist() for each in hear_all(engine, 4)] == [[OURS]] * 4 and server.loads == 1
    send(engine, 1)
    assert hear(engine)[0].tokens.tolist() == [OURS] and server.loads == 1, "it is busy, and is not asked again"


def test_a_server_that_answers_whenever_it_is_looked_at_reads_nothing_again(
    engine: OpenAIEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "IDLE_S", 4.0)  # twice what it is quiet for at most, however busy the machine
    monkeypatch.setattr(module, "WATCH_S", 0.1)
    time.sleep(5.0)  # two seconds of which pass before it is looked at so often
    send(engine, 0)
    assert hear(engine)[0].tokens.tolist() == [OURS] and server.loads == 1


def test_a_server_that_was_replaced_while_the_rollout_was_stopped_reads_the_version_again(
    engine: OpenAIEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WATCH_S", 0.1)
    time.sleep(2.5)  # from now on it is looked at so often
    server.loads = 0  # as a new one has none
    engine._quiet_since -= module.IDLE_S + 1  # in which nobody ran
    time.sleep(0.5)
    send(engine, 0)
    assert hear(engine)[0].tokens.tolist() == [OURS] and server.loads == 1


def test_a_line_that_breaks_after_a_long_answer_is_tried_again(engine: OpenAIEngine, server: Server) -> None:
    engine.options = engine.options.model_copy(update={"start_s": 0.5})
    answers, plain = iter([httpx.ReadError("gone"), httpx.ReadError("gone")]), engine.ask

    async def ask(request: Request, seed: int) -> Any:
        await asyncio.sleep(1.0)
        if error := next(answers, None):
            raise error
        return await plain(request, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAUSE_S", 0.2)
        patch.setattr(engine, "ask", ask)
        send(engine, 0)
        assert hear(engine)[0].tokens.tolist() == [OURS]


def test_a_server_is_waited_for_and_is_one_rollouts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = a_model()
    model.save_pretrained(tmp_path / "model")
    port = end(serve())
    options = {"url": f"http://127.0.0.1:{port}", "folder": str(tmp_path / "versions"), "max_length": 32}
    with pytest.raises(EngineError, match=r"could not be reached at http.* \(options.url, options.start_s\)"):
        OpenAIEngine(options | {"start_s": 0.5}, str(tmp_path / "model"), "float32", {0})
    late: list[Server] = []
    timer = threading.Timer(1.5, lambda: late.append(serve(port)))
    timer.start()
    first = OpenAIEngine(options, str(tmp_path / "model"), "float32", {0})
    timer.join()
    monkeypatch.setattr(claim, "LOCK_S", 0.1)
    with pytest.raises(SetupError, match="another rollout has http://127.0.0.1"):
        OpenAIEngine(options, str(tmp_path / "model"), "float32", {0})
    other = serve()
    both = [options["url"], f"http://127.0.0.1:{other.server_address[1]}"]
    second = OpenAIEngine(options | {"url": both}, str(tmp_path / "model"), "float32", {0})
    assert (first.url, second.url) == tuple(both)
    for made in (first, second):
        made.close()
    for running in (late[0], other):
        end(running)


def test_a_server_that_was_paused_goes_on_where_a_version_cannot_be_loaded(
    engine: OpenAIEngine, server: Server
) -> None:
    server.paths, server.broken = [], True
    with pytest.raises(EngineError, match="could not load version 6 .*/collective_rpc answered 500"):
        engine.swap(engine.prepare(dict(a_model().state_dict())), 6)
    assert server.paths == ["/pause?mode=wait", "/collective_rpc", "/resume"]


@pytest.mark.parametrize("engine", [{"deadline_s": 0.5}], indirect=True)
def test_a_version_may_take_as_long_to_be_loaded_as_its_bytes_do(
    engine: OpenAIEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights, server.load_s = dict(a_model().state_dict()), 1.0
    with pytest.raises(EngineError, match=r"did not load version 6 \(options.deadline_s\) within 0.5 s"):
        engine.swap(engine.prepare(weights), 6)
    monkeypatch.setattr(asynchronous, "LOAD_BYTES_S", sum(weight.nbytes for weight in weights.values()) / 10)
    engine.swap(engine.prepare(weights), 6)
    engine._doubted = True
    send(engine, 0)
    assert hear(engine)[0].versions.tolist() == [6] and server.loads == 4, "it was told once more"


def test_a_large_version_is_written_in_parts(tmp_path: Path) -> None:
    weights = dict(a_model().state_dict())
    for part_bytes in (1 << 30, 4096):
        (folder := tmp_path / str(part_bytes)).mkdir()
        save_in_parts(folder, weights.items(), part_bytes)
        (folder / "new").touch()
        rights = {path.name: path.stat().st_mode for path in folder.iterdir()}
        assert {*rights.values()} == {rights["new"]}, "a server may be another user"
        with WeightFiles(folder) as files:
            assert {*files.names} == weights.keys()
            for name, tensor in weights.items():
                assert torch.equal(files.block(name, tuple(slice(None) for _ in tensor.shape)), tensor)
    assert len([*(tmp_path / "4096").glob("model-*-of-*.safetensors")]) > 3


def test_a_version_that_cannot_be_written_leaves_the_one_that_serves(
    engine: OpenAIEngine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = dict(a_model().state_dict())
    folder = engine._serving.folder if engine._serving else None
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError("no space left")))
        for _ in range(3):
            with pytest.raises(OSError, match="no space"):
                engine.prepare(weights)
    assert folder and folder.is_dir() and [each for each in folder.parent.iterdir() if each.is_dir()] == [folder]


def test_a_busy_server_keeps_its_version(engine: OpenAIEngine, server: Server) -> None:
    server.refusals = [429, 429]
    send(engine, 0)
    assert hear(engine)[0].tokens.tolist() == [OURS] and server.loads == 1


def test_what_has_ended_is_heard_while_the_rest_is_waited_for(engine: OpenAIEngine, server: Server) -> None:
    server.slow_s = {3: 2.0}
    send(engine, 0, first=3)
    send(engine, 1)
    assert [each.number for each in hear(engine)] == [1]
    assert not engine.drained()
    send(engine, 2)
    assert [each.number for each in hear(engine)] == [0], "what is new waits for the version"
    deadline = time.monotonic() + 5
    while not engine.drained():
        assert time.monotonic() < deadline
    engine.swap(engine.prepare(dict(a_model().state_dict())), 6)
    (last,) = hear(engine)
    assert last.number == 2 and last.versions.tolist() == [6]


def test_what_never_ends_is_named(engine: OpenAIEngine, server: Server) -> None:
    server.slow_s = {3: 3.0}
    send(engine, 0, first=3)
    hear(engine, until=lambda: engine._flying == 1)
    engine.options = engine.options.model_copy(update={"drain_s": 0.2})
    deadline = time.monotonic() + 5
    with pytest.raises(EngineError, match=r"longer than options\.drain_s"):
        while time.monotonic() < deadline:
            engine.drained()
            engine.step()


@pytest.mark.parametrize("engine", [{"drain_s": 0.5}], indirect=True)
def test_a_server_that_is_slow_was_not_started_again(engine: OpenAIEngine, server: Server) -> None:
    server.slow_s, server.away = {3: 2.0}, True
    send(engine, 0, first=3)
    hear(engine, until=lambda: "/v1/completions" in server.paths)
    server.slow_s = {}
    assert hear(engine)[0].tokens.tolist() == [OURS] and server.loads == 2, "nobody was there: it may be another one"
    server.slow_s, server.away = {3: 2.0}, False
    send(engine, 1, first=3)
    with pytest.raises(EngineError, match=r"an answer took longer than options\.drain_s=0\.5; raise rollout\.engine\."):
        hear(engine)
    assert server.loads == 2 and server.paths[-1] == "/v1/completions"


def test_a_host_that_is_gone_is_noticed_while_an_answer_is_waited_for(engine: OpenAIEngine) -> None:
    async def kept_alive() -> int:
        async with engine._client.stream("GET", "/v1/models") as reply:
            line = reply.extensions["network_stream"].get_extra_info("socket")
            return line.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    assert engine.call(kept_alive(), 5, "be looked at")
