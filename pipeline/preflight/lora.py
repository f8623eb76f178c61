"""The adapters that are trained, and those that they begin as."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.report import Report
from penstock.protocols.columns import PROCESS, VALUES
from penstock.services.learning.adapter_config import AdapterConfig
from penstock.services.modeling.adapter_files import CONFIG, FILE, check_addition, read_shape
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install

if TYPE_CHECKING:  # it imports torch
    from penstock.services.modeling.load import Head


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is wrong."""
    path = config.model.path if isinstance(config.model, PretrainedModel) else ""
    if config.trainer.lora:
        _look("trainer.lora", config.trainer.lora, path, "language", config.model.dtype, report)
    if config.critic.lora and config.with_critic:
        head: Head = "value" if config.critic_column == VALUES else "language"
        _look("critic.lora", config.critic.lora, config.critic.path or path, head, config.model.dtype, report)
    if config.critic_column == PROCESS and _codes(config.reference_quantized) != _codes(config.critic.lora):
        report.problems.append(
            "critic.lora.quantize: process rewards are made beside the reference, and one of the two has matrices in 4 "
            "bits that the other has whole; give critic.lora the quantize, targets and exclude of trainer.lora, and "
            "leave reference.path out, or name the whole model there"
        )


def _codes(lora: AdapterConfig | None) -> tuple[Any, ...] | None:
    """Which matrices lie in 4 bits; None: none do."""
    return (lora.quantize, lora.targets, lora.exclude) if lora and lora.quantize else None


def _look(key: str, lora: AdapterConfig, path: str, head: Head, dtype: str, report: Report) -> None:
    """At the adapter ``lora`` of the model at ``path``, which the config's ``key`` says."""
    if find_spec("peft") is None:
        report.lacks_package(f"{key}: peft is not installed; run: {install('lora')}")
    if lora.quantize and find_spec("bitsandbytes") is None:
        report.lacks_package(f"{key}.quantize: bitsandbytes is not installed; run: {install('qlora')}")
    if lora.start:
        with report.collect():
            _fits(Path(lora.start), lora, dtype, key, head)
    if find_spec("peft") and (lora.targets or lora.exclude) and (Path(path) / "config.json").is_file():
        with report.collect():
            _finds(path, lora, head, key)


def _finds(path: str, lora: AdapterConfig, head: Head, key: str) -> None:
    """The layers that it names, in the model at ``path``. Raises `SetupError`."""
    from penstock.services.modeling.load import empty_model
    from penstock.services.modeling.lora import Adapter, inject

    inject(empty_model(path, head), replace(Adapter.of(lora, key=key), folder=None), path)


def _fits(folder: Path, lora: AdapterConfig, dtype: str, key: str = "trainer.lora", head: Head = "language") -> None:
    for name in (CONFIG, FILE):
        if not (folder / name).is_file():
            raise SetupError(f"{key}.start: {folder} has no {name}, so it is no adapter in peft's layout")
    found = read_shape(folder, f"{key}.start")
    if found.valued != (head == "value"):
        kinds = "a critic of values", "a language model"
        whose, wanted = kinds if found.valued else kinds[::-1]
        raise SetupError(f"{key}.start: the adapter in {folder} is of {whose}; name one of {wanted}, or leave it out")
    check_addition(folder, f"{key}.start")
    if found.quantize and found.quantize != lora.quantize:  # one of peft's own says nothing of it
        raise SetupError(
            f"{key}.quantize: the adapter in {folder} was trained beside a model in 4 bits; set it to {found.quantize}"
        )
    if found.quantize and found.dtype != dtype:
        raise SetupError(
            f"model.dtype={dtype}: the adapter in {folder} was trained beside matrices in 4 bits that were made of "
            f"{found.dtype}; set it to that"
        )
    for name in ("rank", "alpha", "variant"):
        value, mine = getattr(found, name), getattr(lora, name)
        if value not in (mine, None):
            raise SetupError(f"{key}.{name}={mine}: the adapter in {folder} has {name} {value}; set {key}.{name} to it")
