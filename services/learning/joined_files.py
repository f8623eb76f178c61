"""A checkpoint's weights that ranks have written in parts, as whole files: what transformers and engines read.

torch joins matrices; of a tensor without dimensions it makes a 0, and of whole numbers an error. Those, such as the
bounds of Gemma 4's towers, are buffers that each rank has whole: one has written them, and they get a file of
their own.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.checkpoint.hf_storage import consolidate_safetensors_files

from penstock.services.modeling.weight_files import INDEX

FILE_BYTES = 5 << 30
"""Weights go into files of about this size, as transformers' own do."""


def numbered(sizes: Mapping[str, int]) -> dict[str, int]:
    """Which file each weight, of so many bytes, goes into, counted from 1."""
    numbers, room = {}, FILE_BYTES
    number = 1
    for name, size in sizes.items():
        if size > room and room < FILE_BYTES:
            number, room = number + 1, FILE_BYTES
        numbers[name], room = number, room - size
    return numbers


def join_weights(parts: Path, folder: Path, files: Mapping[str, int]) -> None:
    """Writes the weights in ``parts`` into ``folder``, each into its file by ``files``, and an index."""
    whole = _unjoined(parts)
    joined = {name: number for name, number in files.items() if name not in whole}
    index: dict[str, Any] = {"metadata": {"total_size": 0}, "weight_map": {}}
    if joined:
        consolidate_safetensors_files(str(parts), str(folder), joined)
        index = json.loads((folder / INDEX).read_text())
    if not whole:
        return
    named: dict[str, str] = index["weight_map"]
    count = len(set(named.values())) + 1
    new = {old: _file(number, count) for number, old in enumerate(sorted(set(named.values())), 1)}
    for old, name in new.items():
        (folder / old).rename(folder / name)
    save_file(whole, folder / _file(count, count), {"format": "pt"})
    index["weight_map"] = {name: new[old] for name, old in named.items()} | dict.fromkeys(whole, _file(count, count))
    index["metadata"]["total_size"] += sum(tensor.nbytes for tensor in whole.values())
    (folder / INDEX).write_text(json.dumps(index, indent=2))


def _file(number: int, count: int) -> str:
    return f"model-{number:05d}-of-{count:05d}.safetensors"


def _unjoined(parts: Path) -> dict[str, torch.Tensor]:
    """Those that torch does not join."""
    found: dict[str, torch.Tensor] = {}
    for path in parts.glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118  # it is no mapping
                part = file.get_slice(name)
                if not part.get_shape() or "F" not in part.get_dtype():
                    found[name] = file.get_tensor(name)
    return found
