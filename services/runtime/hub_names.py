"""Names of the Hugging Face hub in a config: ``Qwen/Qwen3-0.6B``, or with a revision ``Qwen/Qwen3-0.6B@c1899de``."""

from __future__ import annotations

from pathlib import Path


def may_be_on_hub(path: str) -> bool:
    """A model's ``path`` may be a name of the hub: it is no folder here, and does not look like one."""
    name = path.partition("@")[0]
    return not (path.startswith((".", "/", "~")) or name.count("/") > 1 or Path(path).exists())


def named(path: str) -> tuple[str, str | None]:
    """A name of the hub, or a folder, and the revision behind its ``@``: a commit, a branch or a tag. None: the newest
    of its main branch."""
    name, at, revision = path.partition("@")
    return (name, revision) if at and revision and may_be_on_hub(path) else (path, None)


def joined(path: str, revision: str | None) -> str:
    """What `named` takes apart."""
    return f"{path}@{revision}" if revision and may_be_on_hub(path) else path
