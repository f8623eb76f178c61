"""Buffers that a model's files fill and nothing trains, such as the biases by which some mixtures choose experts. They
are fp32 whatever is computed in, as trainers and engines have them: rounded, they choose other experts."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from penstock.services.modeling.weight_files import WeightFiles


def persistent_buffers(model: Any) -> dict[str, torch.nn.Buffer]:
    """Those that files fill and nothing trains, by their names, as views; not what is computed from the config, nor
    whole numbers, which count or order something. Of a cut model they are whole on every rank."""
    return {
        f"{prefix}.{name}".lstrip("."): torch.nn.Buffer(buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and buffer.is_floating_point()
    }


def widen_buffers(model: Any) -> list[str]:
    """Makes all of them fp32. Returns the names of those that were not."""
    rounded = [name for name, buffer in persistent_buffers(model).items() if buffer.dtype != torch.float32]
    for name in rounded:
        prefix, _, last = name.rpartition(".")
        module = model.get_submodule(prefix)
        module._buffers[last] = module._buffers[last].float()
    return rounded


@torch.no_grad()
def fill_buffers(model: Any, names: Iterable[str], folder: Path) -> None:
    """Those with these ``names`` are what the files in ``folder`` say, where they say it."""
    with WeightFiles(folder, model) as files:
        for name in names:
            if name in files:
                buffer = model.get_buffer(name)
                buffer.copy_(files.block(name, (slice(None),) * buffer.ndim))
