"""The page while its runs go on: a small HTTP server on the loopback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError
from penstock.pipeline.page.build import page
from penstock.pipeline.page.data import RunFiles, as_json
from penstock.pipeline.page.rollouts import groups_of
from penstock.services.runtime.install import install

GROUPS = 512
"""The newest ones, which a live page has."""


def make_app(folders: Sequence[Path]) -> Any:
    """The page at ``/``; what is new at ``/runs/N?metrics=BYTES&loads=BYTES``, and groups at ``/runs/N/groups``."""
    try:
        from fastapi import FastAPI, HTTPException, Response
        from fastapi.responses import HTMLResponse
    except ImportError as error:
        raise ConfigError(f"penstock page: fastapi is not installed; run: {install('agents')}") from error
    app = FastAPI(title="Penstock page", docs_url=None, redoc_url=None, openapi_url=None)

    files = [RunFiles(folder) for folder in folders]

    def check(number: int) -> None:
        if not 0 <= number < len(folders):
            raise HTTPException(404, f"there is no run {number}")

    @app.get("/", response_class=HTMLResponse)
    def whole() -> str:
        """The page, with all runs as they are now."""
        return page({"runs": [each.data() | {"groups": []} for each in files], "live": True})

    @app.get("/runs/{number}")
    def run(number: int, metrics: int = 0, loads: int = 0) -> Response:
        """Of one run, with what is behind so many bytes of its files."""
        check(number)
        return Response(as_json(files[number].data(metrics, loads)), media_type="application/json")

    @app.get("/runs/{number}/groups")
    def groups(number: int) -> Response:
        """Groups of one run, the newest."""
        check(number)
        return Response(as_json(groups_of(folders[number], groups=GROUPS)), media_type="application/json")

    return app


def serve(folders: Sequence[Path], host: str, port: int) -> None:
    """Until Ctrl-C."""
    app = make_app(folders)
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="warning")
