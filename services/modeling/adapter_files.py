"""An adapter's files, in peft's layout. Imports no torch."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.services.runtime.errors import SetupError

CONFIG, FILE = "adapter_config.json", "adapter_model.safetensors"
BASE = "penstock_base.json"
"""What the model was when the adapter was trained, where that is not as its files are; peft knows of no such thing."""


@dataclass(frozen=True)
class AdapterShape:
    """What `CONFIG` and `BASE` say: in the words of `trainer.lora`, and the ``base`` that it was made for ("" where it
    is not said; ``alpha`` None); ``dtype``: of what was in 4 bits; ``valued``: it is a critic's."""

    rank: int
    alpha: int | None
    targets: tuple[str, ...]
    variant: str
    base: str
    quantize: str | None = None
    dtype: str = ""
    valued: bool = False


def read_shape(folder: Path, key: str) -> AdapterShape:
    """Of the adapter in ``folder``, which the config's ``key`` names. Raises `SetupError`."""
    path = folder / CONFIG
    try:
        found: dict[str, Any] = json.loads(path.read_text())
        if (path := folder / BASE).is_file():
            found |= json.loads(path.read_text())
        return AdapterShape(
            found["r"],
            found.get("lora_alpha"),
            tuple(sorted(found.get("target_modules") or ())),
            "dora" if found.get("use_dora") else "rslora" if found.get("use_rslora") else "lora",
            "@".join(filter(None, (found.get("base_model_name_or_path"), found.get("revision")))),
            found.get("quantize"),
            found.get("dtype", ""),
            found.get("task_type") == "TOKEN_CLS",
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise SetupError(f"{key}: cannot read {path}: {type(error).__name__}: {error}") from error


DRAWN = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Ways of peft to begin an adapter that leave the model beside it as its files are."""


def check_addition(folder: Path, key: str) -> None:
    """Raises `SetupError` where the adapter in ``folder``, which the config's ``key`` names, is not added to its model
    as one trained here is: to the model as its files are, with one rank and one alpha."""
    found: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    odd = next((name for name in ("rank_pattern", "alpha_pattern") if found.get(name)), None)
    if odd is None and found.get("init_lora_weights") not in DRAWN:
        odd = "init_lora_weights"
    if odd:
        why = "its model is changed as it begins" if odd == "init_lora_weights" else "some layers have another one"
        raise SetupError(
            f"{key}: {folder / CONFIG} says {odd}={json.dumps(found[odd])}: {why}, which is not known here; merge it "
            "with peft first (merge_and_unload), and give what that makes as the model's path"
        )


def write_base(folder: Path, dtype: str) -> None:
    """Says beside the adapter in ``folder`` that its model's matrices lay in 4 bits, and what they were read from."""
    (folder / BASE).write_text(json.dumps({"quantize": "nf4", "dtype": dtype}) + "\n")
