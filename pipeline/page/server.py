"""The page while its runs go on: a small HTTP server on the loopback."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.pipeline.config import ConfigError
from penstock.pipeline.page.build import page
from penstock.pipeline.page.data import as_json, run_data
from penstock.pipeline.page.rollouts import groups_of
from penstock.services.runtime.install import install

GROUPS = 512
"""The newest ones, which a live page has."""


def make_app(folders: Sequence[Path]) -> Any:
    """The page at ``/``; what is new at ``/runs/N?after=STEP``, and groups at ``/runs/N/groups``."""
    try:
        from fastapi import FastAPI, HTTPException, Response
        from fastapi.responses import HTMLResponse
    except ImportError as error:
        raise ConfigError(f"penstock page: fastapi is not installed; run: {install('agents')}") from error
    app = FastAPI(title="Penstock page", docs_url=None, redoc_url=None, openapi_url=None)

    def of(number: int) -> Path:
        if not 0 <= number < len(folders):
            raise HTTPException(404, f"there is no run {number}")
        return folders[number]

    @app.get("/", response_class=HTMLResponse)
    def whole() -> str:
        """The page, with all runs as they are now."""
        return page({"runs": [run_data(folder) | {"groups": []} for folder in folders], "live": True})

    @app.get("/runs/{number}")
    def run(number: int, after: int = -1) -> Response:
        """Of one run, with its steps behind ``after``."""
        return Response(as_json(run_data(of(number), after)), media_type="application/json")

    @app.get("/runs/{number}/groups")
    def groups(number: int) -> Response:
        """Groups of one run, the newest."""
        return Response(as_json(groups_of(of(number), groups=GROUPS)), media_type="application/json")

    return app


def serve(folders: Sequence[Path], host: str, port: int) -> None:
    """Until Ctrl-C."""
    app = make_app(folders)
    import uvicorn

    uvicorn.run(app, host=host, port=port, log_level="warning")
