"""The page while its runs go on: a small HTTP server on the loopback."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError
from penstock.pipeline.page.build import page
from penstock.pipeline.page.data import RunFiles, as_json, names, unread
from penstock.pipeline.page.rollouts import groups_of
from penstock.services.runtime.install import install

GROUPS = 512
"""What a live page has: half of them of the newest steps, the others from end to end."""


def make_app(folders: Sequence[Path], loopback: bool = False) -> Any:
    """The page at ``/``; what is new at ``/runs/N?run=ID&metrics=BYTES&loads=BYTES&beats=SEEN``, and groups at
    ``/runs/N/groups?run=ID``. A page that is open since another server was here asks for another ID, and is told so
    (409). ``loopback``: nobody else is meant to read it."""
    try:
        from fastapi import FastAPI, HTTPException, Response
        from fastapi.responses import HTMLResponse
    except ImportError as error:
        raise ConfigError(f"penstock page: fastapi is not installed; run: {install('agents')}") from error
    app = FastAPI(title="Penstock page", docs_url=None, redoc_url=None, openapi_url=None)

    if loopback:
        from penstock.services.runtime.own_host import OwnHost

        app.add_middleware(OwnHost)
    files = [RunFiles(folder, name) for folder, name in zip(folders, names(folders), strict=True)]

    def answer(number: int, asked: str, read: Callable[[RunFiles], Any]) -> Any:
        if not 0 <= number < len(files):
            raise HTTPException(404, f"there is no run {number}")
        if asked and (folders[number] / "config.yaml").is_file() and asked != files[number].identity:
            raise HTTPException(409, f"run {number} is another one: {folders[number]}")
        try:
            return Response(as_json(read(files[number])), media_type="application/json")
        except Exception as error:  # a folder that was moved, a config of other code: the other runs are well
            raise HTTPException(500, unread(folders[number], error)) from None

    @app.get("/", response_class=HTMLResponse)
    def whole() -> str:
        """The page, with all runs as they are now."""
        return page({"runs": [_whole(each, folder) for each, folder in zip(files, folders, strict=True)], "live": True})

    @app.get("/runs/{number}")
    def run(number: int, run: str = "", metrics: int = 0, loads: int = 0, beats: str = "") -> Any:
        """Of one run, with what is behind so many bytes of its files."""
        return answer(number, run, lambda each: each.data(metrics, loads, beats))

    @app.get("/runs/{number}/groups")
    def groups(number: int, run: str = "") -> Any:
        """Groups of one run, half of them the newest."""
        return answer(number, run, lambda _: groups_of(folders[number], groups=GROUPS, newest=GROUPS // 2))

    return app


def _whole(files: RunFiles, folder: Path) -> dict[str, Any]:
    try:
        found = files.data()
    except Exception as error:  # see above
        found = files.unread(unread(folder, error))
    return found | {"groups": []}


def serve(app: Any, listening: socket.socket) -> None:
    """Until Ctrl-C."""
    import uvicorn

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listening])
