"""The model and its tokenizer, without the weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight import given, told_beside, told_tools
from penstock.pipeline.preflight.critics_model import check_critic
from penstock.pipeline.preflight.data import ROWS, check_length
from penstock.pipeline.preflight.own_code import check_own_code
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.resources.model_files import read_config
from penstock.protocols.experience import Prompt
from penstock.services.data import DataError, open_source
from penstock.services.data.config import DataConfig, MixData, ReasoningGymData
from penstock.services.rollout.config import PluginEngineConfig, VllmEngineConfig
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import visible_gpus
from penstock.services.runtime.hub_names import may_be_on_hub
from penstock.services.trainer.config import TrainerConfig

PICTURED = 8
"""So many prompts with pictures are made tokens of: each takes a while."""
WEIGHTS = ("*.safetensors", "*.bin", "*.index.json")
READ = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
"""Whichever comes first is read; indices of others may lie beside it."""


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is found."""
    from penstock.services.modeling.load import check_vocabulary

    policy = config.model.path if isinstance(config.model, PretrainedModel) else None
    if policy:
        with report.collect():
            _find(policy, "model.path")
            _check_whole(policy, "model.path")
            _encode(config, report)
            _check_frozen(policy, config.trainer)
            check_own_code(policy, "trainer", config.trainer.gradient_checkpointing)
            _check_routing(policy, config.rollout.sampling.routing_replay)
            _check_balance(policy, config.trainer.algorithm.router_balance)
            _check_vllm(policy, config, report)
            _note_rounding(config, report)
            if config.with_critic and not config.critic.path:
                check_critic(policy, "model.path", config)
    for key, path in readers(config):
        with report.collect():
            _find(path, key)
            if policy:
                check_vocabulary(policy, path, key)
            if key == "reference.path" and policy and config.reference.mix < 1:
                _check_mixes(policy, path)
            if key == "critic.path":
                _check_whole(path, key)
                check_critic(path, key, config)
            if key.startswith("scorers."):
                _check_top_k(path, config.scorers[key.split(".")[1]].top_k, key.removesuffix("path") + "top_k")
    for kind, scorer in config.scorers.items():
        if not scorer.built_in:
            continue
        with report.collect():
            if scorer.scorer == "reward_model" and "path" in scorer.options:
                _look_at_reward_model(str(scorer.options["path"]), f"scorers.{kind}.options.path")
            if scorer.writes not in scorer.columns:
                raise SetupError(
                    f"scorers.{kind}: it writes the column {scorer.writes!r} (options.column), and its columns are "
                    f"{', '.join(scorer.columns)}; give both the same name, or leave options.column out"
                )


def _note_rounding(config: Config, report: Report) -> None:
    """That what is computed in 16 bits because nothing else was said lies in 32: on a CPU it gains nothing."""
    model, data = config.model, read_config(config) or {}
    written = data.get("dtype") or data.get("torch_dtype")
    if "dtype" in model.model_fields_set or model.dtype == "float32" or written != "float32" or visible_gpus():
        return
    report.notes.append(
        f"model.dtype: {model.dtype}, the default, and the files are float32: answers may differ from those of whoever "
        "computes in float32, as a tiny model's run does; set model.dtype=float32 to do so too"
    )


def readers(config: Config) -> Iterator[tuple[str, str]]:
    """Key and path of the models that read what the policy has sampled."""
    if config.reference.path and config.with_reference:
        yield "reference.path", config.reference.path
    if config.critic.path and config.with_critic:
        yield "critic.path", config.critic.path
    for kind, scorer in config.scorers.items():
        if scorer.scorer == "teacher" and "path" in scorer.options:
            yield f"scorers.{kind}.options.path", str(scorer.options["path"])


def _check_whole(path: str, key: str) -> None:
    """Raises `SetupError` where it cannot be trained."""
    from penstock.services.modeling.load import check_whole, load_config

    check_whole(load_config(path, key), path, key)


def _check_mixes(policy: str, path: str) -> None:
    """Raises `SetupError` where the reference at ``path`` cannot move to the ``policy``."""
    from penstock.services.modeling.load import empty_model

    ours, its = (
        {name: list(each.shape) for name, each in empty_model(model, key=key).named_parameters()}
        for model, key in ((policy, "model.path"), (path, "reference.path"))
    )
    if odd := [name for name in ours if ours[name] != its.get(name)]:
        raise SetupError(
            f"reference.mix: {odd[0]} is {ours[odd[0]]} in {policy}, and {its.get(odd[0], 'missing')} in {path}, which "
            "cannot move there; leave out reference.path, or set reference.mix=1.0"
        )


def _check_frozen(path: str, trainer: TrainerConfig) -> None:
    """Raises `SetupError` where a pattern of what is frozen fits nothing, or they leave nothing in one of the
    stages."""
    from penstock.services.modeling.freezing import freeze_all
    from penstock.services.modeling.load import empty_model
    from penstock.services.modeling.towers import learns, towers

    stages = trainer.pipeline_parallel
    if trainer.freeze:
        freeze_all(model := empty_model(path), trainer.freeze, trainer.train_towers)
        if trainer.train_towers and not any(map(learns, towers(model).values())):
            raise SetupError(
                "trainer.freeze leaves nothing of the towers that trainer.train_towers trains; name fewer, or set that "
                "to false"
            )
        for first, end in _idle_stages(model, stages) if stages > 1 else ():
            raise SetupError(
                f"trainer.freeze leaves nothing in layers {first} to {end - 1}, which are a stage of "
                f"trainer.pipeline_parallel={stages}; name fewer, or set that to 1"
            )


def _idle_stages(model: Any, stages: int) -> Iterator[tuple[int, int]]:
    """First layer, and the one behind the last, of each of the ``stages`` in which nothing of ``model`` learns."""
    from penstock.services.modeling.parallel.stage_layers import stage_layers
    from penstock.services.modeling.towers import decoder_of

    layers, begins = decoder_of(model).layers, model.get_input_embeddings().weight
    inside = {id(parameter) for parameter in layers.parameters()}
    ends = [each for each in model.parameters() if id(each) not in inside and each is not begins]
    head = model.get_output_embeddings()
    ends += [begins] * (head is not None and head.weight is begins)
    for number, (first, end) in enumerate(stage_layers(len(layers), stages)):
        has = [parameter for layer in layers[first:end] for parameter in layer.parameters()]
        has += [begins] * (number == 0) + ends * (number == stages - 1)
        if not any(parameter.requires_grad for parameter in has):
            yield first, end


def _check_top_k(path: str, k: int, key: str) -> None:
    """Raises `SetupError` where the teacher has fewer tokens."""
    from penstock.services.modeling.load import load_config

    size = load_config(path, key).get_text_config().vocab_size if k else 0
    if k > size:
        raise SetupError(f"{key}={k}: {path} has {size} tokens; take no more, or leave it out")


def _find(path: str, key: str) -> None:
    """Raises `SetupError` where there is no model."""
    folder = Path(path)
    if folder.is_file():
        raise SetupError(f"{key}: {path} is a file; give the folder that it lies in")
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise SetupError(f"{key}: {path} has no config.json, so it is no model's folder in transformers' layout")
        if not any(True for pattern in WEIGHTS for _ in folder.glob(pattern)):
            raise SetupError(f"{key}: {path} has no weights: no *.safetensors")
        read = [name for name in READ if (folder / name).is_file()][:1]
        for index in (folder / name for name in read if name.endswith(".json")):
            try:
                named = set(json.loads(index.read_text())["weight_map"].values())
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise SetupError(f"{key}: {index} cannot be read: {error}; copy or download it again") from None
            if lacking := sorted(name for name in named if not (folder / name).is_file()):
                raise SetupError(
                    f"{key}: {path} lacks {lacking[0]}{f' and {len(lacking) - 1} more' if lacking[1:] else ''}, which "
                    f"{index.name} names; copy or download it again"
                )
        return
    if not may_be_on_hub(path):
        raise SetupError(f"{key}: no such folder: {path}; give a folder in transformers' layout, or a name on the hub")
    from penstock.services.modeling.load import load_config

    load_config(path, key)


def _look_at_reward_model(path: str, key: str) -> None:
    """Raises `SetupError` where there is none; of one on the hub no file is read."""
    from penstock.services.modeling.reward_model import look_at_head

    _find(path, key)
    if Path(path).is_dir():
        look_at_head(path, key)


def _check_vllm(path: str, config: Config, report: Report) -> None:
    """Adds what vLLM would lack here for a model of words and pictures. Raises `SetupError` for one whose versions
    it, or its server, cannot load."""
    from penstock.services.modeling.experts import experts_of
    from penstock.services.modeling.families import UNFILLED
    from penstock.services.modeling.load import load_config, sees

    engine = config.rollout.engine
    served = isinstance(engine, PluginEngineConfig) and engine.name == "openai" and _loads_as_vllm(engine)
    if not served and not isinstance(engine, VllmEngineConfig):
        return
    model = load_config(path)
    experts = experts_of(model.get_text_config())
    if model.model_type in UNFILLED and experts:
        raise SetupError(
            f"rollout.engine.{'name: the server of vLLM' if served else 'type: vLLM'} cannot be sent versions of "
            f"{path} ({model.model_type}), whose experts it reads by other names or ways; take "
            "rollout.engine.type=torch"
        )
    if experts and isinstance(engine, VllmEngineConfig) and engine.adapter == "beside":
        raise SetupError(
            f"rollout.engine.adapter: beside is not for mixtures of experts, such as {path}; set it to merged"
        )
    if served:
        return
    here = "rollout" not in config.run.elsewhere and find_spec("vllm") and not find_spec("torchvision")
    if here and sees(model):
        report.lacks_package(
            f"rollout.engine.type: vLLM wants torchvision for a model that sees, like {path}; install one that fits "
            "torch, or take rollout.engine.type=torch"
        )


def _loads_as_vllm(engine: PluginEngineConfig) -> bool:
    """Whether versions are loaded by the way that vLLM's server has."""
    return "load" not in engine.options or "/collective_rpc" in str(engine.options["load"])


def _check_routing(path: str, replayed: bool) -> None:
    """Raises `SetupError` where there is nothing to route."""
    from penstock.services.modeling.experts import experts_of
    from penstock.services.modeling.families import MIXTURES
    from penstock.services.modeling.load import load_config

    model = load_config(path)
    text = model.get_text_config()
    if replayed and not (model.model_type in MIXTURES and experts_of(text)):
        raise SetupError(
            f"rollout.sampling.routing_replay: {path} ({text.model_type}) is no mixture of experts that is known; set "
            "it to false"
        )


def _check_balance(path: str, balanced: float) -> None:
    """Raises `SetupError` where there are no routers that can be ``balanced``."""
    from penstock.services.modeling.families import BALANCED
    from penstock.services.modeling.load import load_config

    family = load_config(path).model_type
    if balanced and family not in BALANCED:
        raise SetupError(
            f"trainer.algorithm.router_balance: {path} ({family}) is no mixture of experts whose routers are balanced "
            f"so, which {', '.join(sorted(BALANCED))} are; set it to 0"
        )


def _check_stop_ids(config: Config, path: str, vocabulary: int) -> None:
    """Raises `SetupError` where a token that is to end answers is none of the ``vocabulary`` of the model at
    ``path``."""
    if strange := [id for id in config.rollout.sampling.stop_token_ids if id >= vocabulary]:
        raise SetupError(
            f"rollout.sampling.stop_token_ids: {strange[0]} is no token of {path}, which has {vocabulary} "
            "of them; its tokenizer_config.json has the ids of its special tokens"
        )


def _encode(config: Config, report: Report) -> None:
    """The first rows as tokens: the tokenizer and its chat template work, and there is room for an answer."""
    from penstock.services.data.mixture import Mixture
    from penstock.services.modeling.lengths import positions_of
    from penstock.services.modeling.load import load_config
    from penstock.services.turns.tokenizer import TextError, Tokenizer

    assert isinstance(config.model, PretrainedModel)
    model = load_config(config.model.path)
    tokenizer = Tokenizer(config.model.path, config.template)
    if config.model.chat_template:
        try:
            tokenizer.encode_chat([{"role": "user", "content": "a question"}])
        except Exception as error:  # a template may raise anything
            why = f"{type(error).__name__}: {error}"
            raise SetupError(f"model.chat_template: a chat cannot be told by it: {why}") from error
    told_beside.check(config, config.model.path, tokenizer)
    _check_stop_ids(config, config.model.path, model.get_text_config().vocab_size)
    sampling = config.rollout.sampling
    if not (tokenizer.stop_ids or sampling.stop or sampling.stop_token_ids):
        raise SetupError(
            f"model.path: nothing ends an answer of {config.model.path}: neither its tokenizer, its generation_config "
            "nor a chat template names a token that does; give rollout.sampling.stop, e.g. a text that ends one, or "
            "model.chat_template"
        )
    report.notes += _bare_questions(config, tokenizer)
    if report.row is None:
        return
    sizes: list[int] = []
    source, rows = open_source(config.prompts.train), list[Prompt]()
    unseen: list[str] = []
    of_each = source.one_of_each() if isinstance(source, Mixture) else []
    for index in dict.fromkeys([*range(min(ROWS, len(source))), *of_each]):
        try:
            prompt = source[index]
        except DataError:
            continue  # told of already
        if prompt.pictures and sum(bool(row.pictures) for row in rows) >= PICTURED:
            continue
        try:
            sizes.append(len(tokenizer.encode(prompt)))
            rows.append(prompt)
        except SetupError:
            raise
        except Exception as error:  # a template may raise anything
            words = f"row {index}: {type(error).__name__}: {error}"
            if not (prompt.pictures and isinstance(error, TextError)):
                raise SetupError(
                    f"prompts.train: the tokenizer of {config.model.path} cannot encode {words}"
                ) from error
            unseen.append(words)
    if unseen and not rows:
        raise SetupError(f"prompts.train: no prompt of the first {len(unseen)} can be shown; {unseen[0]}")
    if unseen:
        report.notes.append(f"prompts.train: {len(unseen)} prompts cannot be shown and will be dropped; {unseen[0]}")
    report.lines.append(
        f"model.path: {config.model.path}; the first {len(sizes)} prompts are {min(sizes)} to {max(sizes)} tokens"
    )
    told_tools.look_at_rows(config.model.path, tokenizer, rows, report)
    check_length(config, sizes, report, positions_of(model) or 1 << 30)
    for name, held_out in report.held_out.items():
        try:
            sizes = [len(tokenizer.encode(prompt)) for prompt in held_out if not prompt.pictures]
        except Exception as error:  # a template may raise anything
            report.notes.append(f"prompts.eval.{name}: the tokenizer cannot encode a row of it: {error}")
            continue
        check_length(config, sizes, report, positions_of(model) or 1 << 30, f"prompts.eval.{name}")
    if given.TRAIN in report.given:
        report.given[given.TRAIN] = rows
    given.look_at_tokens(config, tokenizer, positions_of(model), report, PICTURED)


def _bare_questions(config: Config, tokenizer: Any) -> Iterator[str]:
    """Words about questions that a model of chats is asked without its template, though nobody has said so."""
    if not tokenizer.plain.chat_template or config.gateway.count:
        return
    assert isinstance(config.model, PretrainedModel)
    named: dict[str, DataConfig] = {"prompts.train": config.prompts.train}
    named |= {f"prompts.eval.{name}": data for name, data in config.prompts.eval.items()}
    for key, data in named.items():
        parts: dict[str, DataConfig] = {key: data}
        if isinstance(data, MixData):
            parts = {f"{key}.sources.{name}": one for name, one in data.sources.items()}
        for where, one in parts.items():
            told = not isinstance(one, ReasoningGymData) or one.system or "chat" in one.model_fields_set
            if not told:
                yield (
                    f"{where}.chat: {config.model.path} has a chat template, and is asked these questions as bare "
                    "text; set it to true to ask in a chat, or to false to leave it so without this word"
                )
