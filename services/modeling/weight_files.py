"""The safetensors files of a model in transformers' layout, read in parts: a rank takes its own rows and no more. The
matrices of a layer's experts are read as the one tensor that the model has of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from penstock.services.modeling.experts import counted, is_experts, matrices_of
from penstock.services.modeling.families import TURNED
from penstock.services.modeling.file_names import names_in_files
from penstock.services.runtime.files import let_read

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PART_BYTES = 2 << 30
"""So much of a model is copied at a time to be written."""


class WeightFiles:
    """``folder``'s tensors by the names that ``model``, which may be without memory, has for them; None: by the files'
    own. Empty where it has no safetensors. A context: files are open as long as it is."""

    def __init__(self, folder: Path, model: Any = None) -> None:
        self._folder, self._model, self._stack = folder, model, ExitStack()
        self._open: dict[str, Any] = {}
        self._file_of: dict[str, str] = {}
        self._own: dict[str, str] = {}
        """Of those that the files call otherwise: how."""
        self._experts: dict[str, int] = {}
        self._turned: frozenset[str] = frozenset()

    def __enter__(self) -> WeightFiles:
        index = self._folder / INDEX
        if (self._folder / SINGLE).is_file():  # an index beside it is of other files: so transformers has it
            self._file_of = dict.fromkeys(self._file(SINGLE).keys(), SINGLE)
        elif index.is_file():
            self._file_of = json.loads(index.read_text())["weight_map"]
        if self._model is not None:
            self._own = names_in_files(self._model, self._file_of)
            renamed = set(self._own.values())
            kept = {name: file for name, file in self._file_of.items() if name not in renamed}
            self._file_of = kept | {name: self._file_of[own] for name, own in self._own.items()}
        self._experts = counted(self._file_of)
        if self._model is not None and self._model.config.model_type in TURNED:
            every = self._model.state_dict().items()
            experts = {name: value.shape for name, value in every if name in self and is_experts(name, value)}
            # transformers writes them as they are in memory, and reads both. One alone may be square, and tell nothing.
            if any(self.shape(name) != tuple(shape) for name, shape in experts.items()):
                self._turned = frozenset(experts)
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def names(self) -> list[str]:
        """Of all tensors, as the model calls them."""
        parts = {part for name, count in self._experts.items() for n in range(count) for part in matrices_of(name, n)}
        return [*(name for name in self._file_of if name not in parts), *self._experts]

    def __contains__(self, name: object) -> bool:
        return name in self._file_of or name in self._experts

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the whole tensor."""
        if (experts := self._experts.get(name)) is None:
            found = tuple(self._slice(name).get_shape())
            return (found[0], found[2], found[1]) if name in self._turned else found
        shapes = [self._slice(part).get_shape() for part in matrices_of(name, 0)]
        return experts, sum(rows for rows, _ in shapes), shapes[0][1]

    def block(self, name: str, block: tuple[slice, ...]) -> torch.Tensor:
        """A part of it, in the file's dtype, on the host."""
        if name in self._turned:
            first, rows, columns = block
            turned: torch.Tensor = self._slice(name)[first, columns, rows]
            return turned.mT
        if (experts := self._experts.get(name)) is None:
            found: torch.Tensor = self._slice(name)[block]
            return found
        first, *inner = block
        numbers = range(*first.indices(experts))
        each = [torch.cat([self._slice(part)[:] for part in matrices_of(name, number)]) for number in numbers]
        return torch.stack(each)[(slice(None), *inner)]

    def _slice(self, name: str) -> Any:
        return self._file(self._file_of[name]).get_slice(self._own.get(name, name))

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = self._stack.enter_context(safe_open(self._folder / name, framework="pt"))
        return self._open[name]


def save_in_parts(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], part_bytes: int = PART_BYTES) -> None:
    """``tensors``, by the files' own names, as a model's files in ``folder``: ``part_bytes`` of them are copied at a
    time (one tensor at least), with an index where there are several."""
    parts: list[list[str]] = []
    held: dict[str, torch.Tensor] = {}

    def write() -> None:
        save_file(held, folder / f"part-{len(parts)}.safetensors", {"format": "pt"})
        parts.append([*held])
        held.clear()

    size = 0
    for name, tensor in tensors:
        if held and size + tensor.nbytes > part_bytes:
            write()
            size = 0
        # Cloned: safetensors refuses tensors that share memory, as those of one buffer do.
        held[name], size = tensor.detach().clone(memory_format=torch.contiguous_format), size + tensor.nbytes
    write()
    let_read(folder)
    names = {
        name: f"model-{number + 1:05d}-of-{len(parts):05d}.safetensors"
        for number, part in enumerate(parts)
        for name in part
    }
    if len(parts) == 1:
        (folder / "part-0.safetensors").rename(folder / SINGLE)
        return
    for number, part in enumerate(parts):
        (folder / f"part-{number}.safetensors").rename(folder / names[part[0]])
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": names}))
