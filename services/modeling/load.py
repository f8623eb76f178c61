"""Models and tokenizers of transformers, from a folder or the hub."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal

import torch

from penstock.services.modeling.buffers import fill_buffers, widen_buffers
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.families import OUR_ATTENTION, PACKED, soft_cap
from penstock.services.modeling.norms import fuse_norms
from penstock.services.modeling.state_mixers import take_packed_rows
from penstock.services.modeling.value_models import with_values
from penstock.services.runtime import own_code, own_positions
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.gpus import cpu_only_reason
from penstock.services.runtime.hub_names import may_be_on_hub, named


class ModelError(SetupError):
    """A model that cannot be loaded; says which and what to do."""


def device_of(name: str, key: str = "device") -> torch.device:
    """``auto`` is CUDA where there is one. ``key`` is the config's, for errors. Raises `ModelError`, also where this
    machine has GPUs that torch does not see: nobody trains on a CPU without having said so."""
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"{key}: {name} is asked for, and torch sees no CUDA here; use auto or cpu")
    if name != "auto":
        return torch.device(name)
    if not torch.cuda.is_available() and (reason := cpu_only_reason()):
        raise ModelError(f"{key}: {reason}; or set it to cpu")
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def devices_of(name: str, count: int, key: str, counts: str) -> tuple[torch.device, ...]:
    """As `device_of`; of GPUs ``count`` of them, the first that this process sees, which is what the config's key
    ``counts`` says. Raises `ModelError`."""
    first = device_of(name, key)
    if first.type != "cuda" or count == 1:
        return (first,)
    if first.index is not None:
        raise ModelError(f"{key}: {name} is one GPU, and {counts}={count}; set it to cuda")
    if (there := torch.cuda.device_count()) < count:
        raise ModelError(f"{counts}={count}: this process sees {there} GPUs; take fewer")
    return tuple(torch.device("cuda", index) for index in range(count))


def attention_of(config: Any) -> str | dict[str, str] | None:
    """transformers' attention that computes what the model's authors did: ours for the families that it is right for,
    of those that see for the decoder; of others transformers' own choice (None), but for a soft cap, which its choice
    does not know."""
    if config.model_type in PACKED:
        import penstock.services.modeling.attention  # noqa: F401  # it makes itself known to transformers

        beside = dict.fromkeys(getattr(config, "sub_configs", {}), "sdpa")
        return beside | {"": OUR_ATTENTION, "text_config": OUR_ATTENTION} if beside else OUR_ATTENTION
    return "eager" if soft_cap(config.get_text_config()) else None


def sees(config: Any) -> bool:
    """The model of transformers' ``config`` is one of words and pictures."""
    from transformers import AutoModelForImageTextToText

    return config.get_text_config() is not config and type(config) in AutoModelForImageTextToText._model_mapping


def has_own_code(config: Any) -> bool:
    """transformers' ``config`` is of a class that came with the model, and so will its code be."""
    return type(config).__module__.startswith("transformers_modules.")


def _runs_own_code(path: str) -> bool:
    """Code that comes with the model at ``path`` may run, and transformers has none for it: where it has, that is what
    we know. Raises `OSError`."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if not own_code.trusted():
        return False
    name, revision = named(path)
    told, _ = PretrainedConfig.get_config_dict(name, revision=revision)
    return told.get("model_type") not in CONFIG_MAPPING_NAMES


@contextmanager
def loading(path: str, what: str, key: str) -> Iterator[None]:
    """Around the loading of ``what`` of the model at ``path``, which the config's ``key`` gives. Raises `ModelError`;
    code that came with a model may raise anything."""
    try:
        yield
    except (OSError, ValueError, ImportError) as error:
        raise ModelError(not_loaded(path, what, error, key)) from error
    except Exception as error:
        if not own_code.trusted():
            raise
        raise ModelError(not_loaded(path, what, error, key)) from error


TOLD = ("input_ids", "attention_mask", "position_ids", "use_cache")
"""What a model is called with."""


def _check_takes(model: Any, path: str, key: str) -> None:
    """Raises `ModelError` where a ``model`` with code of its own cannot be called as others are."""
    takes = signature(type(model).forward).parameters
    if any(each.kind is Parameter.VAR_KEYWORD for each in takes.values()):
        return
    if lacking := [name for name in TOLD if name not in takes]:
        raise ModelError(
            f"{key}: {path} has code of its own, and the forward of its {type(model).__name__} takes no {lacking[0]}, "
            "with which models are called; mend its code, or take a model that transformers knows"
        )


@torch.no_grad()
def _compute_buffers(model: Any, make: Callable[[], Any]) -> None:
    """Buffers that a ``model``'s own code computes as it is made, and that no file has, are as in one that ``make``
    makes: transformers loads into a model without memory, where nothing can be computed, and knows them of its own
    models alone."""
    saved = model.state_dict().keys()
    if lost := {name: buffer for name, buffer in model.named_buffers() if name not in saved}:
        made = dict(make().named_buffers())
        for name, buffer in lost.items():
            buffer.copy_(made[name])


Head = Literal["language", "value"]
"""What a model's hidden states become: logits, or one number a token."""


def with_head(config: Any, head: Head) -> Any:
    """transformers' class for models with that head; ``config`` is told of it. A model of words and pictures is whole:
    its weights then have the names, and a checkpoint the layout, that engines know it by."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    language = AutoModelForImageTextToText if sees(config) else AutoModelForCausalLM
    if head == "language":
        return language
    config.num_labels = 1
    return with_values(config, language)


def check_whole(config: Any, path: str, key: str = "model.path") -> None:
    """Raises `ModelError` where the files of the model at ``path``, of transformers' ``config``, have codes in the
    place of weights (FP8, MXFP4), from which nobody can go on training."""
    told = getattr(config, "quantization_config", None) or {}
    if told:
        method = told.get("quant_method") if isinstance(told, dict) else getattr(told, "quant_method", None)
        raise ModelError(
            f"{key}: {path} is quantized ({getattr(method, 'value', method)}), and only whole weights can be trained: "
            "take a copy in bfloat16, which the hub often has, or write one with transformers (from_pretrained with "
            "dequantize, then save_pretrained)"
        )


def load_model(path: str, dtype: str, device: torch.device, key: str = "model.path", head: Head = "language") -> Any:
    """A causal language model of transformers, from a folder or a hub name, which the config's ``key`` gives; or that
    model with another ``head``: a "value" one that the files lack is 0, since no state is worth more than another yet.
    Buffers that its files fill are fp32. Raises `ModelError`."""
    config = load_config(path, key)
    config._attn_implementation = attention_of(config)  # what the file names may be missing, or not take our masks
    own, (name, revision) = has_own_code(config), named(path)
    with loading(path, "model", key):
        kind = with_head(config, head)
        model, found = kind.from_pretrained(
            name,
            revision=revision,
            config=config,
            dtype=DTYPES[dtype],
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # told below, by the key
            trust_remote_code=own,
        )
    for name, there, wanted in sorted(found["mismatched_keys"], reverse=True):
        raise ModelError(
            f"{key}: in the files of {path} {name} has the shape {list(there)}, and the model wants {list(wanted)}"
        )
    if own:
        _check_takes(model, path, key)
        _compute_buffers(model, lambda: kind.from_config(config, dtype=DTYPES[dtype], trust_remote_code=True))
    lacking = {name: each for name, each in model.named_parameters() if name in found["missing_keys"]}
    if head == "value":
        with torch.no_grad():
            for name in [name for name in lacking if not name.startswith(f"{model.base_model_prefix}.")]:
                lacking.pop(name).zero_()
    if lacking:
        raise ModelError(f"{key}: {_not_whole(path, list(lacking), found['unexpected_keys'])}")
    if rounded := widen_buffers(model):
        fill_buffers(model, rounded, folder_of(path, key))
    take_packed_rows(model)
    fuse_norms(model)
    return model.to(device)


def _not_whole(path: str, lacking: list[str], beside: Iterable[str]) -> str:
    """transformers would draw what is ``lacking`` at random; ``beside`` is what the files have and no model takes."""
    scores = max((name for name in beside if name.startswith("score.")), default="")
    why = f"they have {scores}, so it is a critic or a reward model" if scores else "is it whole, and of this type?"
    more = f", nor {len(lacking) - 1} other weights" if len(lacking) > 1 else ""
    return f"the files of {path} have no {lacking[0]}{more}: {why}"


MASTER = torch.float32
"""What is trained is fp32 whatever is computed with and published: small updates would vanish in 16 bits."""


def empty_model(path: str, head: Head = "language", key: str = "model.path") -> Any:
    """As `load_model`, in fp32, without memory for its parameters and buffers."""
    from transformers import GenerationConfig

    config = load_config(path, key)
    check_whole(config, path, key)
    own = has_own_code(config)
    with loading(path, "model", key), torch.device("meta"):
        model = with_head(config, head).from_config(
            config, dtype=MASTER, attn_implementation=attention_of(config), trust_remote_code=own
        )
    if own:
        _check_takes(model, path, key)
    take_packed_rows(model)
    fuse_norms(model)
    if head == "value":
        return model
    try:
        name, revision = named(path)
        model.generation_config = GenerationConfig.from_pretrained(name, revision=revision)
    except OSError:
        pass  # a model need not have one
    model.tie_weights()
    return model


def vocabulary_of(model: Any) -> int:
    """Tokens that ``model`` knows: ids are below."""
    found: int = model.config.get_text_config().vocab_size
    return found


def load_config(path: str, key: str = "model.path") -> Any:
    """The model's own config, with the run's `own_positions`. Raises `ModelError`."""
    from transformers import AutoConfig

    with loading(path, "config", key):
        name, revision = named(path)
        found = AutoConfig.from_pretrained(name, revision=revision, trust_remote_code=_runs_own_code(path))
    try:
        own_positions.apply(path, found)
    except ValueError as error:
        raise ModelError(str(error)) from None
    return found


def load_tokenizer(path: str, template: Mapping[str, Any] | None = None, key: str = "model.path") -> Any:
    """The tokenizer of the model at ``path``, which the config's ``key`` gives; with the ``chat_template`` that may be
    in the run's ``template`` as its own. Raises `ModelError`."""
    from transformers import AutoTokenizer

    with loading(path, "tokenizer", key):  # mistral-common's knows of no chat template
        name, revision = named(path)
        found = AutoTokenizer.from_pretrained(
            name, revision=revision, mistral_format=False, trust_remote_code=own_code.trusted()
        )
    if own := (template or {}).get("chat_template"):
        found.chat_template = own
    return found


TRIED = "The answer: 3 + 4 = 7, naïve façade, 你好!"


_TOKENIZERS = ("tokenizer*", "vocab*", "*.model")
"""Files of them; a model that reads ids alone needs none."""


def tried_by(tokenizer: Any) -> list[int]:
    """`TRIED` without marks around it: what begins a text is each one's own affair."""
    return list(tokenizer(TRIED, add_special_tokens=False)["input_ids"])


def check_vocabulary(policy: str, path: str, key: str) -> None:
    """That the model at ``path``, which the config's ``key`` gives, reads the tokens of the ``policy``'s. Raises
    `ModelError`."""
    if path == policy:
        return
    try:
        ours = load_tokenizer(policy)
    except ModelError:
        return  # it is told under its own key, or lies on another machine
    folder = Path(path)
    has_one = not folder.is_dir() or any(True for kind in _TOKENIZERS for _ in folder.glob(kind))
    if has_one and tried_by(ours) != tried_by(load_tokenizer(path, key=key)):
        raise ModelError(
            f"{key}: {path} has another tokenizer than the policy, {policy}: it would read other words than were said; "
            "take a model of the same family"
        )
    known, said = (load_config(name, key).get_text_config().vocab_size for name in (path, policy))
    if known < min(len(ours), said):
        raise ModelError(f"{key}: {path} knows {known} tokens, and the policy, {policy}, has {len(ours)}")


def not_loaded(path: str, what: str, error: BaseException, key: str = "model.path") -> str:
    """Why the ``what`` of the model at ``path`` cannot be loaded, and what to do, in one line."""
    folder = Path(path)
    if "trust_remote_code" in str(error) and not own_code.trusted():
        return (
            f"{key}: {path} has code of its own, by its author, without which its {what} cannot be loaded: it would "
            "run in every process of the run, with all that you may do; read its *.py and set "
            "model.trust_remote_code=true, or take a model that transformers knows"
        )
    if folder.is_dir():
        lacks = "" if (folder / "config.json").is_file() else "; it has no config.json, so it is no model's folder"
        return f"{key}: cannot load the {what} in {path}: {' '.join(str(error).split())[:300]}{lacks}"
    if not may_be_on_hub(path):
        return f"{key}: no such folder: {path}; give a folder in transformers' layout, or a name on the hub"
    offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0") else ""
    return (
        f"{key}: cannot load the {what} of {path!r}: it is neither a folder here, nor could it be had from the Hugging "
        f"Face hub{offline}: {' '.join(str(error).split())[:200]}"
    )


_TWICE = ["consolidated*", "original/*", "metal/*"]
"""Weights that a repository has once more, for other libraries."""


def folder_of(path: str, key: str = "model.path") -> Path:
    """Where the files of the model at ``path`` are, a folder or a hub name, which the config's ``key`` gives. Raises
    `ModelError`."""
    if Path(path).is_dir():
        return Path(path)
    from huggingface_hub import snapshot_download

    offline = os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0")
    try:
        wanted = ["*.safetensors", "*.json", *(["*.py"] if own_code.trusted() else [])]
        name, revision = named(path)
        got = snapshot_download(
            name, revision=revision, allow_patterns=wanted, ignore_patterns=_TWICE, local_files_only=offline
        )
        return Path(got)
    except Exception as error:  # the hub's own errors are of many kinds, and all say that it cannot be had
        raise ModelError(not_loaded(path, "model", error, key)) from error
