"""GPUs as a command names them."""

from __future__ import annotations

import re

from penstock.pipeline.config import ConfigError
from penstock.services.runtime.gpu_kinds import DEVICES, Device


def devices_of(text: str) -> tuple[int, Device]:
    """``8xH100``. Raises `ConfigError`."""
    match = re.fullmatch(r"(\d+)\s*x\s*([\w-]+)", text.strip(), re.IGNORECASE)
    by_name = {name.lower(): device for name, device in DEVICES.items()}
    if not match or match[2].lower() not in by_name or not int(match[1]):
        raise ConfigError(f"--gpus: {text!r} is not like 8xH100; known kinds: {', '.join(DEVICES)}")
    return int(match[1]), by_name[match[2].lower()]
