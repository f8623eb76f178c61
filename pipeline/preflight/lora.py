"""The adapter that is trained, and the one that it begins as."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

from penstock.pipeline.config import Config
from penstock.pipeline.preflight.report import Report
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.install import install
from penstock.services.trainer.config import LoraConfig

FILES = ("adapter_config.json", "adapter_model.safetensors")


def look(config: Config, report: Report) -> None:
    """Adds to ``report`` what is wrong."""
    lora = config.trainer.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        report.here.append(f"trainer.lora: peft is not installed; run: {install('lora')}")
    if lora.start:
        with report.collect():
            _fits(Path(lora.start), lora)


def _fits(folder: Path, lora: LoraConfig) -> None:
    for name in FILES:
        if not (folder / name).is_file():
            raise SetupError(f"trainer.lora.start: {folder} has no {name}, so it is no adapter in peft's layout")
    try:
        found = json.loads((folder / FILES[0]).read_text())
        variant = "dora" if found.get("use_dora") else "rslora" if found.get("use_rslora") else "lora"
        given = {"rank": found.get("r"), "alpha": found.get("lora_alpha", lora.alpha), "variant": variant}
    except (OSError, ValueError, AttributeError) as error:
        raise SetupError(f"trainer.lora.start: cannot read {folder / FILES[0]}: {error}") from error
    for key, value in given.items():
        if value != (mine := getattr(lora, key)):
            raise SetupError(
                f"trainer.lora.{key}={mine}: the adapter in {folder} has {key} {value}; set trainer.lora.{key} to it"
            )
