"""Going on with a run: what it began with, what is changed now, and what may not be."""

from __future__ import annotations

import json
import os
import re
import shlex
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, ConfigError, load
from penstock.pipeline.config.load import read_sections
from penstock.pipeline.config.origin import Origin, key_of, read
from penstock.pipeline.config.passwords import HIDDEN, hide_password
from penstock.pipeline.preflight.steps import counted, done_in
from penstock.pipeline.run.summary import check_run
from penstock.protocols.columns import PROCESS
from penstock.protocols.run_lock import read_summary
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.user_folders import find_files

FIXED = (
    "model", "prompts.train", "prompts.shuffle", "prompts.curriculum", "prompts.eval", "prompts.eval_given",
    "prompts.eval_size",
    "prompts.eval_sampling", "run.seed", "run.deterministic", "rollout.sampling.n", "rollout.sampling.temperature",
    "trainer.lora", "trainer.freeze", "trainer.train_towers", "trainer.optimizer.type", "critic.optimizer.type",
    "trainer.optimizer.name", "critic.optimizer.name", "critic.path", "critic.lora", "reference.mix",
)  # fmt: skip
"""What a resumed run must have as it began."""
OF_PROCESSES = ("reference.path", "critic.beta")
"""And what process rewards are made of, where it has them."""
FOLDERS = ("model.path", "trainer.lora.start", "critic.path", "critic.lora.start", "reference.path")
"""Among these, folders, which may have been moved: where one is gone, another may be given."""
FILE = re.compile(r"prompts\.(train|eval|eval_given)(\..+)?\.files\.\d+")
"""And files of data."""
NOWHERE = ("run.name", "run.folder")
"""Where a run lies is known by then."""
ABSENT = "not given"
STORE = "PENSTOCK_STORE"
"""Environment variable: a store's URL with its password, which is written down nowhere."""


def resumed(folder: Path, file: Path | None, overrides: list[str] | None) -> tuple[Config, Origin, list[str]]:
    """The config with which the run in ``folder`` goes on, where that comes from, and what is changed in it, or is kept
    although ``file`` says otherwise, a line for each key. Without ``file`` it is the run's own; with it, the overrides
    of the runs's starts are kept. Raises `ConfigError`."""
    recorded = folder / "config.yaml"
    check_run(folder, "--resume")
    began = load(recorded)
    origin = (read(folder) or Origin(str(recorded.resolve()))).with_overrides(overrides)
    kept: list[str] = []
    by_file: tuple[Config, set[str]] | None = None
    done = done_in(folder)
    if file is None:
        by_file = _by_its_file(origin)  # before the run's own, after which this process looks for files
        config = load(recorded, overrides)
    else:
        origin = Origin(str(file.resolve()), origin.overrides)
        config = load(file, list(origin.overrides))
        with suppress(ConfigError):  # a file may need what was given at its first start
            said = changes(counted(load(file, overrides), began, done)[0], counted(config, began, done)[0])
            why = f"(given at an earlier start, which holds; {file.name} says otherwise)"
            kept = [f"kept: {change} {why}" for change in said]
    config = with_password(config)
    asked_now = any(key_of(override) == "trainer.steps" for override in overrides or [])
    config, _ = counted(config, None if asked_now else began, done)
    check_fixed(began, config)
    check_left(folder, config)
    given = [key_of(override) for override in overrides or []]
    kept += [f"kept: {key}: a run goes on where it lies, in {folder}" for key in NOWHERE if key in given]
    if by_file and (line := _not_taken(origin, folder, config, *by_file)):
        kept.append(line)
    return config, origin, [*(f"changed: {change}" for change in changes(began, config)), *kept]


def _by_its_file(origin: Origin) -> tuple[Config, set[str]] | None:
    """The config of a run's file as that is now, under the overrides of the run's starts, and the keys that the file
    gives, with those above them; None where there is none that can be had: the run does not need it."""
    with suppress(SetupError, OSError):
        file = Path(origin.file)
        said = leaves(read_sections(file))
        return load(file, list(origin.overrides), started=origin), {k for one in said for k in (one, *_above(one))}
    return None


def _not_taken(origin: Origin, folder: Path, config: Config, by_file: Config, said: set[str]) -> str:
    """A line where a run's file has ``said`` since the run began what ``config`` has not, and how to take it; empty
    where not. What it leaves to defaults, which may be others by now, does not count."""
    if by_file.trainer.steps is None:  # as many as the prompts make, which are not read for a note
        said = said - {"trainer.steps"}
    more = [change for change in changes(config, by_file) if change.partition(":")[0] in said]
    if not more:
        return ""
    others = f", and {len(more) - 1} more" if len(more) > 1 else ""
    again = f"penstock run {shlex.quote(_short(origin.file))} --resume {shlex.quote(str(folder))}"
    return f"not taken: {more[0]} as {Path(origin.file).name} has it by now{others}; to take it: {again}"


def _short(path: str) -> str:
    """As seen from here."""
    return os.path.relpath(path) if Path(path).is_relative_to(Path.cwd()) else path


def with_password(config: Config) -> Config:
    """``config`` with its store's password, where that was left out as it was written down: the one that the
    environment has. Raises `ConfigError` where it has none."""
    if not config.store.url or HIDDEN not in config.store.url:
        return config
    return config.model_copy(update={"store": config.store.model_copy(update={"url": _store(config.store.url)})})


def _store(url: str) -> str:
    """The store whose ``url`` has no password any more: the one that the environment names. Raises `ConfigError`."""
    given = os.environ.get(STORE, "")
    if hide_password(given) == url:
        return given
    other = f" ({STORE} is {hide_password(given)})" if given else ""
    raise ConfigError(
        f"store.url: {url}: its password is not kept in the run's folder; give it again, as store.url or as the "
        f"environment variable {STORE}{other}, e.g. {STORE}=redis://USER:PASSWORD@HOST:6379/0"
    )


def committed(folder: Path) -> int:
    """Steps that the run in ``folder`` has done."""
    return done_in(folder).steps


def complete(folder: Path, config: Config) -> dict[str, Any] | None:
    """The summary of the run in ``folder``, where that is complete and ``config`` asks for no more steps."""
    summary = read_summary(folder)
    if not summary or summary["outcome"] != "complete":
        return None
    began = load(folder / "config.yaml")
    if summary["steps"] < began.trainer.counted_steps and _ends(began) != _ends(config):
        return None
    return summary if config.trainer.counted_steps <= max(summary["steps"], began.trainer.counted_steps) else None


def _ends(config: Config) -> tuple[Any, ...]:
    """What may end a run before its steps."""
    return config.prompts.epochs, config.prompts.stop_after, config.prompts.stop_margin


def how_to_go_on(config: Config, summary: dict[str, Any]) -> str:
    """With a run that is complete: which key says that there is more to do."""
    if not summary["steps"] and not config.trainer.counted_steps:
        return "begin another one: this one was to evaluate, and to train nothing (trainer.steps=0)"
    if summary["steps"] >= config.trainer.counted_steps:
        return f"give more steps, e.g. trainer.steps={2 * summary['steps']}"
    keys = []
    if config.prompts.epochs:
        keys.append(f"draw the prompts more often, e.g. prompts.epochs={2 * config.prompts.epochs}")
    if config.prompts.stop_after:
        keys.append(f"give it longer to get better, e.g. prompts.stop_after={2 * config.prompts.stop_after}")
    return " or ".join(keys) or "begin a new one: its prompts have ended"


def check_left(folder: Path, config: Config) -> None:
    """Raises `ConfigError` where the run in ``folder`` has done more than ``config`` asks for."""
    steps, done = config.trainer.counted_steps, committed(folder)
    if steps < done and not complete(folder, config):
        raise ConfigError(f"trainer.steps: {steps}, but {done} steps are done already; give {done} or more")


def check_fixed(began: Config, config: Config) -> None:
    """Raises `ConfigError` that names the first key that a resumed run cannot change."""
    if config.critic_column != began.critic_column:
        of = f"has a critic that says {began.critic_column}"
        words = of if began.with_critic else "has no critic, which would have to learn from its first step"
        raise ConfigError(
            f"trainer.algorithm.advantage: {config.trainer.algorithm.advantage.type}, but the run {words}; a resumed "
            "run cannot change that: begin a new one"
        )
    must_stay = FIXED + OF_PROCESSES * (began.critic_column == PROCESS)
    before, now = leaves(began.model_dump(mode="json")), leaves(config.model_dump(mode="json"))
    for key in sorted(before.keys() | now.keys()):
        if (key in FOLDERS or FILE.fullmatch(key)) and key in now and _is_gone(before.get(key), key in FOLDERS):
            continue
        if any(key == fixed or key.startswith(f"{fixed}.") for fixed in must_stay) and _differ(key, before, now):
            kind = next((k for k in _kinds(key) if k in before and k in now and _differ(k, before, now)), key)
            raise ConfigError(
                f"{kind}: {_words(kind, now)}, but the run began with {_words(kind, before)}; a resumed run cannot "
                "change that: begin a new one"
            )


def _is_gone(path: Any, folder: bool) -> bool:
    """A ``folder``, or else a file, or all that a pattern is of, which was found when the run began, and so is known by
    its whole ``path``, is not there any more."""
    if not isinstance(path, str) or not Path(path).is_absolute():
        return False
    return not Path(path).exists() if folder else not find_files(path)


def _above(key: str) -> list[str]:
    """The keys above ``key``: one that is a value on one side, such as null, has it all."""
    parts = key.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]


def _kinds(key: str) -> list[str]:
    """The keys ``type`` above ``key``: where one of them differs, everything below it does."""
    return [f"{above}.type" for above in _above(key)]


def _words(key: str, values: dict[str, Any]) -> str:
    """The value as YAML has it; of a section or a map what it has, none where that is nothing, and where it is not
    there on this side, that."""
    if key in values:
        return "none" if values[key] == {} else json.dumps(values[key], ensure_ascii=False)
    below = [other.removeprefix(f"{key}.").partition(".")[0] for other in values if other.startswith(f"{key}.")]
    return ", ".join(name for name in dict.fromkeys(below) if not name.isdigit()) or ABSENT


def changes(began: Config, config: Config) -> list[str]:
    """``gate.max_lag: 2 → 1``, and so on."""
    before, now = leaves(began.model_dump(mode="json")), leaves(config.model_dump(mode="json"))
    keys = [key for key in dict.fromkeys([*before, *now]) if key not in NOWHERE and _differ(key, before, now)]
    keys = [key for key in keys if not any(above in before or above in now for above in _above(key))]
    return [f"{key}: {_words(key, before)} → {_words(key, now)}" for key in keys if key != "store.url"]


def leaves(data: Any, path: str = "") -> dict[str, Any]:
    """Every value below ``data`` by its dotted key."""
    items = data.items() if isinstance(data, dict) else enumerate(data) if isinstance(data, list) else ()
    found: dict[str, Any] = {}
    for key, value in items:
        found |= leaves(value, f"{path}.{key}" if path else str(key))
    return found if found or (isinstance(data, dict | list) and path == "") else {path: data}


def _differ(key: str, before: dict[str, Any], now: dict[str, Any]) -> bool:
    return before.get(key, ABSENT) != now.get(key, ABSENT)
