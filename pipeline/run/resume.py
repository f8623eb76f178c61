"""Going on with a run: what it began with, what is changed now, and what may not be."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.config.origin import Origin, read
from penstock.pipeline.config.passwords import HIDDEN

FIXED = ("model", "prompts", "run.seed", "run.deterministic", "rollout.sampling.n")
"""What a resumed run must have as it began."""
NOWHERE = ("run.name", "run.folder")
"""Where a run lies is known by then."""
ABSENT = "not given"


def resumed(folder: Path, file: Path | None, overrides: list[str] | None) -> tuple[Config, Origin, list[str]]:
    """The config with which the run in ``folder`` goes on, where that comes from, and what is changed in it, a line
    for each key. Without ``file`` it is the run's own; with it, the overrides of the runs's starts are kept. Raises
    `ConfigError`."""
    recorded = folder / "config.yaml"
    if not recorded.is_file():
        raise ConfigError(f"--resume: {folder} is not a run's folder: it has no config.yaml")
    began = load(recorded)
    origin = (read(folder) or Origin(str(recorded.resolve()))).with_overrides(overrides)
    if file is None:
        config = load(recorded, overrides)
    else:
        origin = Origin(str(file.resolve()), origin.overrides)
        config = load(file, list(origin.overrides))
    if config.store.url and HIDDEN in config.store.url:
        raise ConfigError(
            f"store.url: {config.store.url}: its password is not kept in the run's folder; give it again, e.g. "
            "store.url=redis://USER:PASSWORD@HOST:6379/0"
        )
    check_fixed(began, config)
    return config, origin, changes(began, config)


def check_fixed(began: Config, config: Config) -> None:
    """Raises `ConfigError` that names the first key that a resumed run cannot change."""
    before, now = leaves(began.model_dump(mode="json")), leaves(config.model_dump(mode="json"))
    for key in sorted(before.keys() | now.keys()):
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in FIXED) and _differ(key, before, now):
            raise ConfigError(
                f"{key}: {now.get(key, ABSENT)!r}, but the run began with {before.get(key, ABSENT)!r}; a resumed run "
                "cannot change that: begin a new one"
            )


def changes(began: Config, config: Config) -> list[str]:
    """``gate.max_lag: 2 → 1``, and so on."""
    before, now = leaves(began.model_dump(mode="json")), leaves(config.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in NOWHERE and _differ(key, before, now)]
    return [f"{key}: {before.get(key, ABSENT)} → {now.get(key, ABSENT)}" for key in keys if key != "store.url"]


def leaves(data: Any, path: str = "") -> dict[str, Any]:
    """Every value below ``data`` by its dotted key."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found: dict[str, Any] = {}
    for key, value in items:
        found |= leaves(value, f"{path}.{key}" if path else str(key))
    return found if found or (isinstance(data, dict | list) and path == "") else {path: data}


def _differ(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.get(key, ABSENT) != now.get(key, ABSENT)
