"""An inference server for engines that need one: ``server`` in ``--engine`` is its command, with {model} and {port}."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 240


@contextmanager
def serving(options: dict[str, Any], model: Path) -> Iterator[dict[str, Any]]:
    """The engine's options, with the address of a server that was started for it, if they ask for one."""
    options = dict(options)
    command = options.pop("server", None)
    if command is None:
        yield options
        return
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    words = shlex.split(command.format(model=model, port=port))
    env = dict(word.split("=", 1) for word in words if "=" in word and word.split("=")[0].isupper())
    words = [word for word in words if word.split("=")[0] not in env]
    log = (model / "server.log").open("wb")
    process = subprocess.Popen(words, env={**os.environ, **env}, stdout=log, stderr=log, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + START_S
        while not _healthy(url):
            assert process.poll() is None and time.monotonic() < deadline, (model / "server.log").read_text()[-3000:]
            time.sleep(0.5)
        yield options | {"options": options.get("options", {}) | {"url": url, "folder": str(model / "versions")}}
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()


def _healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as reply:
            return reply.status == 200
    except OSError:
        return False
