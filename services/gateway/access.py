"""Who may come in from other machines."""

from __future__ import annotations

import secrets
from pathlib import Path

from penstock.services.runtime.files import write_whole


def agents_key(folder: Path) -> str:
    """The key that agents elsewhere show over HTTP: in ``keys/agents.key`` of the run's ``folder``, made once, readable
    by its owner alone."""
    path = folder / "keys" / "agents.key"
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    if not path.exists():
        write_whole(path, secrets.token_urlsafe(32) + "\n", mode=0o600)
    return path.read_text().strip()
