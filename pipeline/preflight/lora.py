"""The adapter that is trained, and the one that it begins as."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from penstock.pipeline.config import Config, PretrainedModel
from penstock.pipeline.preflight.report import Report
from penstock.services.modeling.adapter_files import CONFIG, FILE, read_shape
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install
from penstock.services.trainer.config import LoraConfig


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is wrong."""
    lora = config.trainer.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        report.lacks_package(f"trainer.lora: peft is not installed; run: {install('lora')}")
    if lora.quantize and find_spec("bitsandbytes") is None:
        report.lacks_package(f"trainer.lora.quantize: bitsandbytes is not installed; run: {install('qlora')}")
    if lora.start:
        with report.collect():
            _fits(Path(lora.start), lora, config.model.dtype)
    path = config.model.path if isinstance(config.model, PretrainedModel) else ""
    if find_spec("peft") and (lora.targets or lora.exclude) and (Path(path) / "config.json").is_file():
        with report.collect():
            _finds(path, lora)


def _finds(path: str, lora: LoraConfig) -> None:
    """The layers that it names, in the model at ``path``. Raises `SetupError`."""
    from penstock.services.modeling.load import empty_model
    from penstock.services.modeling.lora import Adapter, inject

    inject(empty_model(path), replace(Adapter.of(lora), folder=None), path)


def _fits(folder: Path, lora: LoraConfig, dtype: str) -> None:
    for name in (CONFIG, FILE):
        if not (folder / name).is_file():
            raise SetupError(f"trainer.lora.start: {folder} has no {name}, so it is no adapter in peft's layout")
    found = read_shape(folder, "trainer.lora.start")
    if found.quantize and found.quantize != lora.quantize:  # one of peft's own says nothing of it
        raise SetupError(
            f"trainer.lora.quantize: the adapter in {folder} was trained beside a model in 4 bits; set it to "
            f"{found.quantize}"
        )
    if found.quantize and found.dtype != dtype:
        raise SetupError(
            f"model.dtype={dtype}: the adapter in {folder} was trained beside matrices in 4 bits that were made of "
            f"{found.dtype}; set it to that"
        )
    for key in ("rank", "alpha", "variant"):
        value, mine = getattr(found, key), getattr(lora, key)
        if value not in (mine, None):
            raise SetupError(
                f"trainer.lora.{key}={mine}: the adapter in {folder} has {key} {value}; set trainer.lora.{key} to it"
            )
