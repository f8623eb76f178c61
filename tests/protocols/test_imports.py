"""The light part stays light."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "datasets", "matplotlib")


@pytest.mark.parametrize(
    "module", ["protocols.mailbox", "protocols.messages", "protocols.weights", "pipeline.config", "pipeline.cli",
               "services.broker.service", "services.reward.service"]
)  # fmt: skip
def test_no_heavy_import(module: str) -> None:
    code = f"import sys, {module}; print([m for m in {HEAVY!r} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_imports_run_one_way() -> None:
    import ast
    from pathlib import Path

    root = Path(__file__).parents[2]
    allowed = {"protocols": {"protocols"}, "services": {"protocols", "services"}}
    shared = {p.stem for p in (root / "services").glob("*.py")} | {"weights"}
    for layer, may in allowed.items():
        for path in (root / layer).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                modules = (
                    [a.name for a in node.names]
                    if isinstance(node, ast.Import)
                    else ([node.module] if isinstance(node, ast.ImportFrom) and node.module else [])
                )
                for module in modules:
                    top, *rest = module.split(".")
                    if top in ("protocols", "services", "pipeline"):
                        assert top in may, f"{path} imports {module}"
                    if layer == "services" and top == "services" and rest:
                        mine = path.relative_to(root / "services").parts[0].removesuffix(".py")
                        assert rest[0] == mine or rest[0] in shared, f"{path} imports another service: {module}"
