"""The light part stays light."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "matplotlib")


@pytest.mark.parametrize(
    "module",
    [
        "penstock",
        "penstock.protocols.mailbox",
        "penstock.protocols.messages",
        "penstock.protocols.versions",
        "penstock.pipeline.config",
        "penstock.pipeline.cli",
        "penstock.services.runtime.actor",
        "penstock.services.broker.service",
        "penstock.services.reward.service",
        "penstock.pipeline.run.launcher",
        "penstock.pipeline.run.finish",
        "penstock.pipeline.preflight.look",
        "penstock.pipeline.run.start",
        "penstock.pipeline.run.evaluate",
        "penstock.pipeline.launch.ready",
        "penstock.pipeline.page.build",
        "penstock.pipeline.tools.export",
    ],
)
def test_no_heavy_import(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


SHARED = {"runtime", "modeling", "data", "weights", "learning", "environments", "user_processes", "turns"}
"""Rooms of ``services/`` that every actor may use."""


def _imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


def test_imports_run_one_way() -> None:
    allowed = {"protocols": {"protocols"}, "services": {"protocols", "services"}}
    for layer in ("protocols", "services", "pipeline"):
        for path in (ROOT / layer).rglob("*.py"):
            for module in _imported(path):
                top, *rest = module.split(".")
                assert top not in ("protocols", "services", "pipeline"), f"{path} imports {module} without penstock"
                if top != "penstock" or not rest:
                    continue
                assert layer == "pipeline" or rest[0] in allowed[layer], f"{path} imports {module}"
                if layer == "services" and rest[0] == "services" and len(rest) > 1:
                    mine = path.relative_to(ROOT / "services").parts[0]
                    assert rest[1] == mine or rest[1] in SHARED, f"{path} imports another service: {module}"


def test_shared_rooms_know_no_actor() -> None:
    for room in SHARED:
        for path in (ROOT / "services" / room).rglob("*.py"):
            for module in _imported(path):
                parts = module.split(".")
                if parts[:2] == ["penstock", "services"] and len(parts) > 2:
                    assert parts[2] in SHARED, f"{path} imports {module}"
                    assert room != "runtime" or parts[2] == "runtime", f"{path} imports {module}"


def test_nothing_of_ours_is_claimed_in_site_packages_but_penstock(tmp_path: Path) -> None:
    (tmp_path / "pipeline.py").write_text("mine = True")
    code = "import pipeline, penstock.pipeline.config; print(pipeline.mine)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "True", done.stderr
