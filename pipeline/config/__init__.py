"""The whole config: YAML and dotted overrides into one checked model. Imports no torch."""

from __future__ import annotations

import difflib
import re
import types
import typing
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, Field, ValidationError, model_validator

from penstock.protocols.versions import Dtype
from penstock.services.broker.config import BrokerConfig, GateConfig, PromptsConfig, ReplayConfig, StoreConfig
from penstock.services.reference.config import ReferenceConfig
from penstock.services.reward.config import RewardConfig
from penstock.services.rollout.config import RolloutConfig, TorchEngineConfig, VllmEngineConfig
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.settings import Section
from penstock.services.trainer.config import TrainerConfig
from penstock.services.weights.config import WeightsConfig


class ConfigError(SetupError):
    """A config that cannot be used: one line for each problem, with the key's path and what to do."""


class RunConfig(Section):
    """The run itself."""

    name: str | None = Field(None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of its folder; None: the config's name and the time."""
    folder: str = "runs"
    """Where runs are kept."""
    seed: int = Field(0, ge=0)
    deterministic: bool = False
    """The same weights bit by bit from the same ledger, on the same kind of machine; generation is slower, since each
    group is decoded alone. See docs/recovery.md."""
    max_restarts: int = Field(10, ge=0)
    """How often one actor is started again after it died."""
    tensorboard: bool = False
    """Write TensorBoard files too. Needs ``penstock[tensorboard]``."""
    gpu_gib: float | None = Field(None, gt=0)
    """Memory of each GPU. With it, a run whose model cannot fit is refused before anything starts."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"


class PretrainedModel(Section):
    """A causal language model of transformers."""

    type: Literal["pretrained"] = "pretrained"
    path: str
    """A folder, or a name on the Hugging Face hub."""
    dtype: Dtype = "bfloat16"
    """What rollouts and reference compute in, and what is published; the trainer's master copy is float32."""


class WarmStart(Section):
    """Supervised steps that teach a tiny model the form of an answer, but not yet to be right."""

    steps: int = Field(150, ge=0)
    batch: int = Field(128, ge=1)
    lr: float = Field(3e-3, gt=0)
    corrupted: float = Field(0.75, ge=0, le=1)
    """Share of the answers whose characters are shuffled."""


class TinyModel(Section):
    """A character-level Qwen3 made on the spot, so that a run needs no download."""

    type: Literal["tiny"] = "tiny"
    hidden_size: int = Field(128, ge=8)
    intermediate_size: int = Field(512, ge=8)
    layers: int = Field(2, ge=1)
    heads: int = Field(4, ge=1)
    kv_heads: int = Field(2, ge=1)
    head_dim: int = Field(32, ge=4)
    max_length: int = Field(512, ge=8)
    dtype: Dtype = "float32"
    warm_start: WarmStart = WarmStart()


ModelConfig = Annotated[PretrainedModel | TinyModel, Field(discriminator="type")]


class Config(Section):
    """Everything a run is. `penstock run FILE --dry-run` prints all keys with their values, defaults included."""

    run: RunConfig = RunConfig()
    model: ModelConfig
    prompts: PromptsConfig
    gate: GateConfig = GateConfig()
    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    reference: ReferenceConfig = ReferenceConfig()
    trainer: TrainerConfig = TrainerConfig()
    weights: WeightsConfig = WeightsConfig()
    broker: BrokerConfig = BrokerConfig()
    store: StoreConfig = StoreConfig()
    replay: ReplayConfig = ReplayConfig()

    @property
    def with_reference(self) -> bool:
        """The KL penalty is on, so reference processes are needed."""
        return self.trainer.algorithm.kl.coefficient > 0

    @model_validator(mode="after")
    def _consistent(self) -> Config:
        sampling, engine, algorithm = self.rollout.sampling, self.rollout.engine, self.trainer.algorithm
        if isinstance(engine, TorchEngineConfig | VllmEngineConfig):
            if isinstance(engine, TorchEngineConfig) and sampling.n > engine.max_sequences:
                raise ValueError(
                    f"rollout.sampling.n={sampling.n} exceeds rollout.engine.max_sequences={engine.max_sequences}"
                )
            if sampling.max_new_tokens >= engine.max_length:
                raise ValueError(
                    f"rollout.sampling.max_new_tokens={sampling.max_new_tokens} leaves no room for a prompt in "
                    f"rollout.engine.max_length={engine.max_length}"
                )
            if self.weights.canary_tokens > engine.max_length:
                raise ValueError(
                    f"weights.canary_tokens={self.weights.canary_tokens} exceeds "
                    f"rollout.engine.max_length={engine.max_length}"
                )
        if sampling.masks and not sampling.training().truncated:
            raise ValueError("rollout.sampling.masks: without top_p or top_k there is nothing to record")
        if isinstance(engine, VllmEngineConfig) and sampling.masks and not sampling.top_k:
            raise ValueError("rollout.sampling.masks: vLLM needs top_k with it, the number of tokens to look at")
        if (
            isinstance(engine, VllmEngineConfig)
            and sampling.training().truncated
            and not sampling.masks
            and sampling.temperature != 1
        ):
            raise ValueError(
                "rollout.sampling: vLLM reports no log-probabilities of the untruncated distribution at a temperature "
                f"other than 1 (it is {sampling.temperature:g}); set masks=true, or leave top_p and top_k out"
            )
        if algorithm.advantage.type == "grpo" and sampling.n < 2:
            raise ValueError("rollout.sampling.n must be at least 2: GRPO compares the trajectories of a group")
        if sampling.temperature == 0:
            raise ValueError(
                "rollout.sampling.temperature must be above 0: greedy groups have no variance to learn from"
            )
        if algorithm.aggregation == "seq-mean-token-sum-norm" and algorithm.length_scale is None:
            raise ValueError(
                "trainer.algorithm.length_scale is needed by seq-mean-token-sum-norm; "
                "rollout.sampling.max_new_tokens is a good value"
            )
        return self


def load(path: Path, overrides: list[str] | None = None) -> Config:
    """The config in ``path`` with ``dotted.key=value`` overrides (values are YAML). Raises `ConfigError`."""
    try:
        data = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError(f"{path} is not a map of sections")
    for override in overrides or []:
        _apply(data, override)
    return parse(data)


def parse(data: dict[str, Any]) -> Config:
    """The config that ``data`` describes. Raises `ConfigError`, one line for each problem."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(data, problem) for problem in error.errors())) from None


def dump(config: Config) -> str:
    """The resolved config as YAML, defaults included and without passwords."""
    data = config.model_dump(mode="json")
    if url := data["store"]["url"]:
        data["store"]["url"] = hide_password(url)
    return yaml.safe_dump(data, sort_keys=False)


def hide_password(url: str) -> str:
    """``url`` with its password, if it has one, as ``***``."""
    url = re.sub(r"(password=)[^&]*", r"\1***", url)
    scheme, separator, rest = url.partition("://")
    credentials, at, host = rest.rpartition("@")
    if not at:
        return url
    user = credentials.partition(":")[0]
    return f"{scheme}{separator}{user}:***@{host}"


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r} is not of the form dotted.key=value")
    *parents, last = key.split(".")
    place: Any = data
    for index, parent in enumerate(parents):
        place = _enter(place, parent, ".".join(parents[: index + 1]), override)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"override {override!r}: the value is not YAML: {error}") from None
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
    return place[key]


def _position(place: list[Any], key: str, override: str) -> int:
    if not key.isdigit() or int(key) >= len(place):
        raise ConfigError(f"override {override!r}: {key!r} is not a position in a list of {len(place)}")
    return int(key)


def _explain(data: Any, problem: Any) -> str:
    path = _path(data, problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = sorted(_fields(Config, data, path[:-1]))
        near = difflib.get_close_matches(str(path[-1]), known, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
        return f"{'.'.join(map(str, path))}: unknown key; {hint}"
    if problem["type"] == "missing":
        return f"{'.'.join(map(str, path))}: missing; give it a value"
    if problem["type"] == "literal_error":
        near = difflib.get_close_matches(str(problem["input"]), problem["ctx"]["expected"].split("'"), 1)
        message += f", got {problem['input']!r}" + (f"; did you mean {near[0]!r}?" if near else "")
    elif problem["type"] != "value_error":
        message += f", got {problem['input']!r}"
    return f"{'.'.join(map(str, path)) or 'config'}: {message}"


def _path(data: Any, loc: tuple[Any, ...]) -> list[Any]:
    """``loc`` without the union tags that pydantic puts between the keys."""
    path: list[Any] = []
    for index, part in enumerate(loc):
        if isinstance(data, dict):
            is_tag = part not in data and part == data.get("type", part) and index + 1 < len(loc)
            if is_tag and index:
                continue
            data = data.get(part)
        elif isinstance(data, list) and isinstance(part, int) and part < len(data):
            data = data[part]
        path.append(part)
    return path


def _fields(model: type[BaseModel], data: Any, path: list[Any]) -> set[str]:
    """Names of the keys that the section at ``path`` has."""
    models: list[type[BaseModel]] = [model]
    for part in path:
        data = data.get(part) if isinstance(data, dict) else data[part] if isinstance(data, list) else None
        if isinstance(part, int):
            continue
        models = [
            m for parent in models if part in parent.model_fields for m in _models(parent.model_fields[part].annotation)
        ]
        tagged = [m for m in models if isinstance(data, dict) and _tag(m) == data.get("type")]
        models = tagged or models
    return {name for m in models for name in m.model_fields}


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType, list, Annotated):
        return [m for argument in typing.get_args(annotation) for m in _models(argument)]
    return []


def _tag(model: type[BaseModel]) -> Any:
    field = model.model_fields.get("type")
    return field.default if field else None
