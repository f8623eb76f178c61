"""Every key of the config: path, type in words, default, an example, and what it means.

All of it is read off the pydantic models, so a new key needs no line here. A key's meaning is the docstring that stands
under its field, and what follows the first "e.g." in it, between double backticks, is its example. Docstrings are
parsed when somebody asks: pydantic's ``use_attribute_docstrings`` would do so in every process, at each start.

    >>> [key.default for key in find("gate.max_lag")]
    ['1']
"""

from __future__ import annotations

import ast
import difflib
import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any

import yaml
from pydantic import BaseModel, Field, TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from penstock.pipeline.config.errors import models, tag
from penstock.pipeline.config.schema import Config
from penstock.pipeline.config.type_words import is_list, is_map, kind, limits, literals

REQUIRED = "required"
"""What stands where a default would, for a key that has none."""
NEAREST = 3
"""So many keys may have been meant by one that there is not."""


class UndescribedError(TypeError):
    """A key that nobody could understand from its model: its docstring is missing, or its type has no words."""


@dataclass(frozen=True)
class Block:
    """Keys that stand together: those of a section, or of one choice of a union."""

    model: type[BaseModel]
    choice: str | None
    """The ``type`` that chooses it, where it is one of a union."""
    meaning: str
    keys: tuple[Key, ...]


@dataclass(frozen=True)
class Key:
    """One key. A list's elements have no number in ``path``: ``reward.functions.timeout_s``."""

    path: str
    place: str
    """`path` as an override has it, with the first element of each list: ``reward.functions.0.timeout_s``."""
    type: str
    default: str
    """As YAML, or `REQUIRED`."""
    example: str
    """A value that is not the default, as YAML; empty where there is none to show."""
    meaning: str
    field: FieldInfo
    needs: tuple[str, ...] = ()
    """The choices under which it exists, e.g. ``("rollout.engine.type=vllm",)``."""
    blocks: tuple[Block, ...] = ()
    """What may stand below it: nothing, one section, or the choices of a union."""

    @property
    def chooses(self) -> bool:
        """Its ``type`` chooses one of several kinds of section."""
        return any(block.choice is not None for block in self.blocks)

    @property
    def assignment(self) -> str:
        """The override that sets it to its example, quoted for a shell; of an element of a list, of the first one."""
        value = self.example or "…"
        if not re.fullmatch(r"[\w.,:/@%+…-]*", value):
            value = f'"{value}"' if "'" in value else f"'{value}'"
        return f"{self.place}={value}"


@cache
def reference() -> tuple[Key, ...]:
    """The sections of the config, each a `Key` with all of its keys below it."""
    return _block(Config, "", "", (), None).keys


def walk(keys: tuple[Key, ...] | None = None) -> Iterator[Key]:
    """Every key, those above before those below."""
    for key in reference() if keys is None else keys:
        yield key
        for block in key.blocks:
            yield from walk(block.keys)


def find(path: str) -> list[Key]:
    """The keys called ``path``: more than one where several choices of a union have it, none where it is unknown.

    Positions in lists may be given or left out. A name inside a free map, as in
    ``rollout.engine.vllm.enforce_eager``, finds the map.
    """
    name = _without_positions(path)
    parts = name.split(".")
    maps = [key.path for key in walk() if key.blocks and is_map(key.field.annotation)]
    called = {name, *(re.sub(rf"^{path}\.\w+", f"{path}.NAME", name) for path in maps)}
    exact = [key for key in walk() if key.path in called or (key.chooses and f"{key.path}.type" in called)]
    above = [".".join(parts[:length]) for length in range(1, len(parts))]
    return exact or [key for key in walk() if key.path in above and is_map(key.field.annotation)]


def same_name(path: str) -> list[str]:
    """The keys whose last name is that of ``path``, those most like it first."""
    wanted = _without_positions(path)
    same = {key.path for key in walk() if key.path.rpartition(".")[2] == wanted.rpartition(".")[2]}
    return sorted(same, key=lambda known: (-difflib.SequenceMatcher(None, wanted, known).ratio(), known))


def nearest(path: str) -> list[str]:
    """The keys that ``path`` may have meant: one that has its last name, those that look like it,
    then those whose last name does."""
    paths = list(dict.fromkeys(key.path for key in walk()))
    wanted, same = _without_positions(path), same_name(path)
    names: dict[str, list[str]] = {}
    for known in paths:
        names.setdefault(known.rpartition(".")[2], []).append(known)
    close = difflib.get_close_matches(wanted, paths, NEAREST, 0.75)
    alike = [known for name in difflib.get_close_matches(wanted, names, NEAREST, 0.75) for known in names[name]]
    return list(dict.fromkeys([*same[:1], *close, *same, *alike]))[:NEAREST]


def _without_positions(path: str) -> str:
    return ".".join(part for part in path.split(".") if not part.isdigit())


def meanings(model: type[BaseModel]) -> dict[str, str]:
    """The docstrings under the fields of ``model`` and of what it inherits from, as one line each."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if issubclass(base, BaseModel) and base is not BaseModel:
            found |= _docstrings(base)
    return found


@cache
def _docstrings(model: type[BaseModel]) -> dict[str, str]:
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(model))).body
    assert isinstance(node, ast.ClassDef)
    found = {}
    for field, below in zip(node.body, node.body[1:], strict=False):
        if not (isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant) and isinstance(below.value.value, str):
            found[field.target.id] = " ".join(below.value.value.split())
    return found


def _block(model: type[BaseModel], path: str, place: str, needs: tuple[str, ...], choice: str | None) -> Block:
    meaning = " ".join((model.__doc__ or "").split())
    if not meaning:
        raise UndescribedError(f"{model.__name__}: a section needs a docstring, which says what it is")
    if choice is not None:
        needs = (*needs, f"{path}.type={choice}")
    said = meanings(model)
    keys = []
    for name, field in model.model_fields.items():
        if name == "type" and choice is not None:
            continue  # the union's own key says what may be chosen
        here, there = (f"{path}.{name}", f"{place}.{name}") if path else (name, name)
        if name not in said:
            raise UndescribedError(f"{here}: write a docstring under {model.__name__}.{name}, which says what it means")
        keys.append(_key(here, there, field, said[name], needs))
    return Block(model, choice, meaning, tuple(keys))


def _key(path: str, place: str, field: FieldInfo, meaning: str, needs: tuple[str, ...]) -> Key:
    try:
        words = kind(field.annotation, limits(field.metadata))
    except TypeError as error:
        raise UndescribedError(f"{path}: {error}") from None
    below = models(field.annotation)
    if len(below) > 1 and not all(isinstance(tag(model), str) for model in below):
        raise UndescribedError(f"{path}: the sections of a union need a key ``type`` each, with a default of their own")
    inside = f"{place}.0" if is_list(field.annotation) else place
    under = path
    if below and is_map(field.annotation):
        under, inside = f"{path}.NAME", f"{place}.NAME"
    blocks = tuple(_block(model, under, inside, needs, tag(model) if len(below) > 1 else None) for model in below)
    default = REQUIRED if field.is_required() else _shown(field.get_default(call_default_factory=True))
    example = _example(field, meaning, default, blocks)
    return Key(path, place, words, default, example, meaning, field, needs, blocks)


def _shown(value: Any) -> str:
    """``value`` as YAML on one line. Of sections only the choice, and what differs from their defaults."""
    if isinstance(value, str) and "\n" in value:
        return json.dumps(value, ensure_ascii=False)  # YAML too, and on one line
    text = yaml.safe_dump(_plain(value), default_flow_style=True, allow_unicode=True, width=10**6, sort_keys=False)
    return text.removesuffix("\n").removesuffix("\n...")


def _plain(value: Any) -> Any:
    if isinstance(value, BaseModel):
        chosen = {"type": value.type} if "type" in type(value).model_fields else {}  # type: ignore[attr-defined]
        return chosen | value.model_dump(mode="json", exclude_defaults=True)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def _example(field: FieldInfo, meaning: str, default: str, blocks: tuple[Block, ...]) -> str:
    """The one in the docstring, else another value than the default that the key takes."""
    said = re.search(r"e\.g\. ``([^`]+)``", meaning)
    if said:
        return said[1]
    if blocks and blocks[0].choice is None:
        return ""
    if blocks:
        return _other_choice(default, blocks)
    value = None if field.is_required() else field.get_default(call_default_factory=True)
    tried: list[Any] = [choice for choice in literals(field.annotation) if choice != value]
    if isinstance(value, bool):
        tried = [not value]
    elif isinstance(value, int | float):
        tried += [value * 2, value / 2 if isinstance(value, float) else value // 2, 1]
    for candidate in tried:
        if candidate != value and accepts(field, candidate):
            return _shown(candidate)
    return ""


def _other_choice(default: str, blocks: tuple[Block, ...]) -> str:
    for block in blocks:
        needed = {key.path.rpartition(".")[2]: key.example for key in block.keys if key.default == REQUIRED}
        text = ", ".join([f"type: {block.choice}", *(f"{name}: {value}" for name, value in needed.items())])
        if f"type: {block.choice}" not in default:
            return f"{{{text}}}"
    return ""


def accepts(field: FieldInfo, value: Any) -> bool:
    """Whether ``value`` is of the field's type, and inside its bounds."""
    try:
        checked(field, value)
    except ValidationError:
        return False
    return True


def checked(field: FieldInfo, value: Any) -> Any:
    """What the field makes of ``value``. Raises `ValidationError` where it is of another type, or out of bounds."""
    choosing = Field(discriminator=field.discriminator) if field.discriminator else Field()
    annotated: Any = Annotated[(field.annotation, *field.metadata, choosing)]
    return TypeAdapter(annotated).validate_python(value)
