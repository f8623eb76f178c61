"""A config file, with its overrides, as a checked config."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import yaml
from pydantic import ValidationError

from penstock.pipeline.config import extended, origin
from penstock.pipeline.config.errors import explain
from penstock.pipeline.config.models import PretrainedModel, TinyModel
from penstock.pipeline.config.passwords import hide_password
from penstock.pipeline.config.schema import Config
from penstock.services.learning.config import LearnerConfig
from penstock.services.runtime import own_code, own_positions
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.own_positions import Positions
from penstock.services.runtime.user_folders import find_file, find_folder, look_first_in, look_in
from penstock.services.trainer.presets import without_choices

PRESET = "trainer.algorithm.preset"
WORDS = ("replay.filter",)
"""Sections that may be given as their type alone."""


class ConfigError(SetupError):
    """A config that cannot be used: one line for each problem, with the key's path and what to do."""


class _TwiceError(ValueError):
    """A key that is given twice: YAML itself would take the second, and say nothing."""


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._checked: set[int] = set()

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        if id(node) not in self._checked:  # one that others merge comes again, and then has what it merged itself
            self._checked.add(id(node))
            self._check(node)
        super().flatten_mapping(node)

    @staticmethod
    def _check(node: yaml.MappingNode) -> None:
        lines: dict[Any, int] = {}
        for key_node, _ in node.value:
            key, line = key_node.value, key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode):
                raise yaml.YAMLError(f"line {line}: a key must be a word")
            if key in lines and key != "<<":
                raise _TwiceError(
                    f"line {line}: {key!r} is given twice, first in line {lines[key]}; put both into one section"
                )
            lines[key] = line


class _Dumper(yaml.SafeDumper):
    """Quotes text that `_Loader` would take for a number."""


# As people write numbers: 010 is ten, 1e-3 a thousandth, and 1:30 is no number.
_Loader.yaml_implicit_resolvers = {
    first: [each for each in known if each[0] != "tag:yaml.org,2002:int"]
    for first, known in _Loader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:int", re.compile(r"[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
for _each in (_Loader, _Dumper):
    _each.add_implicit_resolver(
        "tag:yaml.org,2002:float",
        re.compile(r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9][0-9_]*)[eE][-+]?[0-9]+$"),
        list("-+.0123456789"),
    )


def load(path: Path, overrides: list[str] | None = None, started: origin.Origin | None = None) -> Config:
    """The config in ``path`` with ``dotted.key=value`` overrides (values are YAML); this process now works for it.
    ``started``: how a run was that was started with it, whose files are looked for where it was. Raises
    `ConfigError`."""
    data = read_sections(path)
    look_in(path.parent)
    # Where there is one this is a run's own copy: what that names lies beside the file that it came from.
    began = origin.read(path.parent)
    before = began or started
    look_first_in([Path(before.started_in), Path(before.file).parent] if before else [])
    if began:
        _give_up_preset(data, overrides or [])
    for override in overrides or []:
        _apply(data, override)
    config = _with_template(_with_folders(parse(data)))
    model = config.model
    own_code.trust(isinstance(model, PretrainedModel) and model.trust_remote_code)
    if isinstance(model, PretrainedModel):
        paths = {model.path, config.reference.path or "", config.critic.path or ""}
        own_positions.say(Positions(model.max_position_embeddings, model.rope_parameters), paths)
    else:
        own_positions.say(Positions(), ())
    return config


def options_of(overrides: Sequence[str], what: str) -> dict[str, Any]:
    """``dotted.key=value``, each behind ``what``, as a map of maps (values are YAML). Raises `ConfigError`."""
    found: dict[str, Any] = {}
    for override in overrides:
        try:
            _apply(found, override)
        except ConfigError as error:
            raise ConfigError(f"{what}: {error}") from None
    return found


def read_sections(path: Path) -> dict[str, Any]:
    """What a config file says, with those that it goes on from, not checked yet. Raises `ConfigError`."""
    try:
        return extended.whole(_sections(path), path, _sections)
    except extended.ExtendsError as error:
        raise ConfigError(str(error)) from None


def _sections(path: Path) -> dict[str, Any]:
    """What a config file says itself. Raises `ConfigError`."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"cannot read {path}: it is not UTF-8 ({error.reason} at byte {error.start})") from None
    data = _read(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a map of sections")
    return data


def _read(text: str, what: str) -> Any:
    """What ``text`` says in YAML. Raises `ConfigError`, which begins with ``what``."""
    try:
        return yaml.load(text, _Loader)
    except _TwiceError as error:
        raise ConfigError(f"{what}, {error}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{what} is not YAML: {error}") from None
    except ValueError as error:  # a date, say, that there is none of
        raise ConfigError(f"{what} cannot be read: {error}; put text in quotes") from None


def _with_folders(config: Config) -> Config:
    """A model's or an adapter's folder is found where files are, and known by its whole path from then on."""
    for name in ("model", "reference", "critic"):
        section = getattr(config, name)
        path = None if isinstance(section, TinyModel) else section.path
        if path and (folder := find_folder(path)):
            config = config.model_copy(update={name: section.model_copy(update={"path": str(folder)})})
    for name in ("trainer", "critic"):
        learner: LearnerConfig = getattr(config, name)
        if (lora := learner.lora) and lora.start and (folder := find_folder(lora.start)):
            lora = lora.model_copy(update={"start": str(folder)})
            config = config.model_copy(update={name: learner.model_copy(update={"lora": lora})})
    return config


def _with_template(config: Config) -> Config:
    """A chat template that is in a file stands in the config from then on: a run keeps the one that it began with."""
    given = None if isinstance(config.model, TinyModel) else config.model.chat_template
    if not given or "{" in given:
        return config
    file = find_file(given)
    if file is None:
        raise ConfigError(
            f"model.chat_template: there is no file {given!r}, and a template itself has braces; mend the name, or "
            "leave it out for the tokenizer's own"
        )
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"model.chat_template: cannot read {file}: {error}") from None
    return config.model_copy(update={"model": config.model.model_copy(update={"chat_template": text})})


def parse(data: dict[str, Any]) -> Config:
    """The config that ``data`` describes. Raises `ConfigError`, one line for each problem."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(explain(data, problem) for problem in error.errors())) from None


def dump(config: Config) -> str:
    """The resolved config as YAML, defaults included and without passwords."""
    data = config.model_dump(mode="json")
    if url := data["store"]["url"]:
        data["store"]["url"] = hide_password(url)
    return as_yaml(data)


def as_yaml(data: dict[str, Any]) -> str:
    """A config file that says ``data``, and is read as that."""
    return yaml.dump(data, Dumper=_Dumper, sort_keys=False)


def as_overrides(values: Mapping[str, Any]) -> list[str]:
    """``{"trainer.steps": 3}`` as ``trainer.steps=3``; values in JSON, which is YAML where nothing is escaped but what
    YAML forbids. Raises `ConfigError`, as `plain_value` does."""
    plain = {key: plain_value(value, str(key)) for key, value in values.items()}
    return [f"{key}={_escaped(json.dumps(value, ensure_ascii=False))}" for key, value in plain.items()]


def plain_value(value: Any, key: str) -> Any:
    """``value``, which Python code gives for ``key``, as YAML and JSON have it: numpy's numbers as Python's own, paths
    and dates as text. Raises `ConfigError`, which names the key, for what has no such form."""
    if isinstance(value, Mapping):
        keys = {name: f"{key}.{name}" if key else str(name) for name in value}
        return {plain_value(name, key): plain_value(each, keys[name]) for name, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(each, f"{key}.{place}") for place, each in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)  # of a class of its own, such as an enum's
    if isinstance(value, int | float):
        return int(value) if isinstance(value, int) else float(value)
    if isinstance(value, date | PurePath):
        return value.isoformat() if isinstance(value, date) else str(value)
    words = f"{type(value).__name__} {value!r:.60}"
    raise ConfigError(f"{key}: no config has a {words}; give text, numbers, or lists and maps of these")


def _escaped(text: str) -> str:
    return re.sub(r"[\x7f-\x9f\ufffe\uffff]", lambda found: f"\\u{ord(found[0]):04x}", text)


def _give_up_preset(data: dict[str, Any], overrides: list[str]) -> None:
    """What the preset of a run had chosen stands in its own copy of the config as if it had been given: where another
    preset is asked for, that is left out."""
    asked: dict[str, Any] = {}
    for override in overrides:
        if origin.key_of(override) == PRESET:
            _apply(asked, override)
    written = data.get("trainer")
    if asked and isinstance(written, dict) and isinstance(written.get("algorithm"), dict):
        preset = asked["trainer"]["algorithm"]["preset"]
        written["algorithm"] = without_choices(written["algorithm"], preset)


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
    *parents, last = key.split(".")
    place: Any = data
    for index, parent in enumerate(parents):
        place = _enter(place, parent, ".".join(parents[: index + 1]), override)
    value = _read(text, f"override {override!r}: the value")
    if isinstance(place, list):
        place[_position(place, last, override)] = value
    elif isinstance(place, dict):
        place[last] = value
    else:
        raise ConfigError(f"override {override!r}: {'.'.join(parents)} is a value, not a section")


def _enter(place: Any, key: str, path: str, override: str) -> Any:
    if isinstance(place, list):
        return place[_position(place, key, override)]
    if not isinstance(place, dict):
        raise ConfigError(f"override {override!r}: {path} is a value, not a section")
    if place.get(key) is None:
        place[key] = {}
    elif path in WORDS and isinstance(place[key], str):
        place[key] = {"type": place[key]}
    return place[key]


def _position(place: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(place):
        raise ConfigError(f"override {override!r}: {key!r} is not a position in a list of {len(place)}")
    return int(key)
