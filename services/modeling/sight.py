"""What a model of words and pictures sees: its towers, frozen, in a copy of their own, and how the decoder is told.

Towers never change while a run trains (`towers.py`), so what they find in a picture is computed once, whoever trains,
scores or samples, in whatever shape the decoder is cut; and ranks whose rows show nothing need not take part.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from itertools import accumulate
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import nn

from penstock.protocols.experience import Trajectory
from penstock.services.data.picture_files import PictureError
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.load import ModelError, empty_model, folder_of, load_model
from penstock.services.modeling.pictures import PictureReader, placeholder
from penstock.services.modeling.towers import towers
from penstock.services.modeling.weight_files import WeightFiles
from penstock.services.runtime.kept import Kept

FOUND_BYTES = 512 << 20
"""Of what towers have found in pictures, so much is remembered; the oldest is forgotten."""


class Sight:
    """For models with the towers of the one at ``path``, whose decoder reads what they see where ``token`` stands; they
    are loaded when the first picture comes, in ``dtype``, on ``device``. Raises `ModelError` then."""

    def __init__(self, path: str, token: int, dtype: str, device: torch.device, key: str = "model.path") -> None:
        self._token = token
        self._path, self._dtype, self._device, self._key = path, dtype, device, key
        self._base: Any = None
        self._reader: PictureReader | None = None
        self._found: Kept[_Found] = Kept(FOUND_BYTES, lambda found: found.nbytes)
        self._shown: torch.Tensor | None = None
        """bool ``[rows, length]``: where rows show something, of the forward pass that was asked for last."""

    def resting(self) -> list[torch.Tensor]:
        """Forgets what was found, which lies on the device; returns what else does."""
        self._found.clear()
        every = towers(self._base).values() if self._base is not None else ()
        return [part for tower in every for part in (*tower.parameters(), *tower.buffers())]

    def attach(self, model: Any) -> None:
        """Has ``model``, which may be cut, take what `inputs` gives."""
        base, own, token = model.base_model, model.base_model.get_placeholder_mask, self._token

        def mask(input_ids: torch.Tensor | None, *rest: Any, **named: Any) -> Any:
            """A placeholder that the policy has sampled is a word like any other."""
            shown, self._shown = self._shown, None
            if shown is not None and input_ids is not None:
                input_ids = input_ids.masked_fill((input_ids == token) & ~shown, _other_than(token))
            return own(input_ids, *rest, **named)

        base.get_placeholder_mask = mask
        model.penstock_sight = self

    def inputs(
        self, tokens: torch.Tensor, real: torch.Tensor, sampled: torch.Tensor, pictures: Sequence[tuple[bytes, ...]],
        at: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        """What a model is called with beside ``tokens`` ``[sequences, longest]``, of which those are ``real`` where
        that is 1 (same shape, right-padded), and those no part of a sequence's ``pictures`` that were ``sampled``
        (bool, same shape). ``at``: the rows that it is called with have other places: int64 ``[rows, length]`` each,
        the sequence whose token stands there (-1: none), and which of its tokens. Raises `PictureError` where a
        sequence has not as many placeholders as its pictures need."""
        found = {picture: self._look(picture) for row in pictures for picture in row}
        every = [found[picture] for row in pictures for picture in row]
        base = self._loaded()[0]
        shows = (tokens == self._token) & real.bool() & ~sampled
        self._check(shows.sum(1).tolist(), [sum(found[picture].tokens for picture in row) for row in pictures])
        wanted = torch.full(tokens.shape, -1, device=tokens.device).masked_scatter(
            shows, _vectors(pictures, found).to(tokens.device)
        )
        """Which vector of those that were found is read there; -1: none."""
        positions = None
        if hasattr(base, "get_rope_index"):
            grids = torch.cat([each.numbers["image_grid_thw"] for each in every]).to(tokens.device)
            positions = base.get_rope_index(
                tokens, mm_token_type_ids=shows.int(), image_grid_thw=grids, attention_mask=real
            )[0]
        if at is not None:
            member, place = at[0].clamp(min=0), at[1]
            wanted = wanted[member, place].masked_fill(at[0] < 0, -1)
            positions = None if positions is None else positions[:, member, place]
        self._shown = wanted >= 0
        outputs = _chosen([each.outputs for each in found.values()], wanted[self._shown])
        inputs: dict[str, Any] = {"mm_encoder_outputs": {"image": outputs}}
        taken = inspect.signature(type(base).forward).parameters
        inputs |= {name: self._shown.int() for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
        return inputs if positions is None else inputs | {"position_ids": positions}

    def check(self, tokens: np.ndarray, sampled: np.ndarray, pictures: Sequence[bytes]) -> None:
        """Raises `PictureError` where ``tokens``, less those that were ``sampled``, have more or fewer places than
        ``pictures`` need."""
        places = int(np.count_nonzero((tokens == self._token) & ~sampled))
        self._check([places], [sum(self._look(picture).tokens for picture in pictures)])

    def _check(self, places: list[int], vectors: list[int]) -> None:
        if places != vectors:
            raise PictureError(
                f"{self._key}: rows have {places} places for {vectors} vectors of their pictures: whoever made their "
                f"tokens reads pictures otherwise than {self._path}; give all the same processor files, and the same "
                "version of transformers"
            )

    @torch.no_grad()
    def _look(self, picture: bytes) -> _Found:
        return self._found.get(picture, lambda: self._looked(picture))

    def _looked(self, picture: bytes) -> _Found:
        base, reader = self._loaded()
        numbers = reader.numbers(picture)
        taken = inspect.signature(base.get_image_features).parameters
        return _Found.of(base, {name: self._placed(of) for name, of in numbers.items() if name in taken})

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self._device, DTYPES[self._dtype] if values.is_floating_point() else None)

    def _loaded(self) -> tuple[Any, PictureReader]:
        if self._base is None or self._reader is None:
            self._reader = PictureReader(self._path, key=self._key)
            self._base = _load_towers(self._path, self._dtype, self._device, self._key)
        return self._base, self._reader


class _Found:
    """What the towers have found in one picture."""

    def __init__(self, outputs: Any, numbers: dict[str, torch.Tensor]) -> None:
        self.outputs, self.numbers = outputs, numbers
        vectors = _flat(outputs.pooler_output)
        self.tokens = sum(part.shape[:-1].numel() for part in vectors)
        """Vectors, each of which the decoder reads in a placeholder's place."""
        every = [*vectors, *_flat(outputs.deepstack_features or ())]
        self.nbytes = sum(part.nbytes for part in every)

    @classmethod
    def of(cls, base: Any, numbers: dict[str, torch.Tensor]) -> _Found:
        """By the family's own code."""
        found = base.get_image_features(**numbers, return_dict=True)
        deep = getattr(found, "deepstack_features", None)
        outputs = SimpleNamespace(pooler_output=found.pooler_output, deepstack_features=deep)
        return cls(outputs, {name: values for name, values in numbers.items() if not values.is_floating_point()})


def _flat(found: Any) -> list[torch.Tensor]:
    return [found] if isinstance(found, torch.Tensor) else [part for each in found for part in _flat(each)]


def _vectors(pictures: Sequence[tuple[bytes, ...]], found: Mapping[bytes, _Found]) -> torch.Tensor:
    """int64: of each sequence's ``pictures``, one after the other, the numbers of their vectors among all that were
    ``found``."""
    begins = dict(zip(found, accumulate((each.tokens for each in found.values()), initial=0), strict=False))
    of_each = [torch.arange(found[p].tokens) + begins[p] for row in pictures for p in row]
    return torch.cat([torch.zeros(0, dtype=torch.int64), *of_each])


def _chosen(outputs: list[Any], vectors: torch.Tensor) -> Any:
    """Those ``vectors`` of several pictures, as of one call: what is a list there has one entry."""

    def together(parts: list[Any]) -> Any:
        whole = torch.cat([part.flatten(0, -2) for each in parts for part in _flat(each)])[vectors]
        return whole if isinstance(parts[0], torch.Tensor) else [whole]

    deep = [each.deepstack_features for each in outputs]
    layers = None if deep[0] is None else [together(list(layer)) for layer in zip(*deep, strict=True)]
    return SimpleNamespace(pooler_output=together([each.pooler_output for each in outputs]), deepstack_features=layers)


def sight_of(model: Any, path: str, dtype: str, device: torch.device, key: str = "model.path") -> Sight | None:
    """Of ``model``, which lies at ``path``; None where it cannot be shown pictures."""
    return Sight(path, placeholder(model.config), dtype, device, key) if can_be_shown(model) else None


def give_sight(model: Any, path: str, dtype: str, device: torch.device, key: str = "model.path") -> None:
    """``model``, which is the one at ``path``, can be shown pictures, where it sees."""
    if sight := sight_of(model, path, dtype, device, key):
        sight.attach(model)


def can_be_shown(model: Any) -> bool:
    """``model`` sees, and its decoder can be told what its towers have found."""
    base = model.base_model
    told = "mm_encoder_outputs" in inspect.signature(type(base).forward).parameters
    return placeholder(model.config) >= 0 and told and hasattr(base, "get_placeholder_mask")


def check_shown(model: Any, trajectories: Sequence[Trajectory]) -> None:
    """Raises `PictureError` where ``model`` sees more or less in pictures of ``trajectories`` than their prompts have
    places for."""
    sight: Sight | None = getattr(model, "penstock_sight", None)
    if sight and (shown := [trajectory for trajectory in trajectories if trajectory.pictures]):
        for trajectory in shown:
            sight.check(trajectory.tokens, trajectory.loss_mask == 1, trajectory.pictures)


def resting_sight(model: Any) -> list[torch.Tensor]:
    """What ``model`` has on its device for its sight, where that is left to others: it remembers no picture."""
    sight: Sight | None = getattr(model, "penstock_sight", None)
    return sight.resting() if sight else []


def _other_than(token: int) -> int:
    return token - 1 if token else 1


def _load_towers(path: str, dtype: str, device: torch.device, key: str) -> Any:
    """The base model with its towers alone: what else there is of it has no memory."""
    model = empty_model(path, key=key)
    names = {name: [name for name, _ in tower.named_parameters(prefix=name)] for name, tower in towers(model).items()}
    with WeightFiles(folder_of(path, key), model) as files:
        if any(name not in files for each in names.values() for name in each):
            return _only_towers(load_model(path, dtype, torch.device("cpu"), key), device)
        for place in names:
            tower = _made(model.get_submodule(place), DTYPES[dtype]).to(device)
            for name, parameter in tower.named_parameters():
                whole = tuple(slice(None) for _ in parameter.shape)
                parameter.data.copy_(files.block(f"{place}.{name}", whole))
            parent, _, own = place.rpartition(".")
            setattr(model.get_submodule(parent), own, tower.requires_grad_(False).eval())
    return model.base_model


def _made(tower: Any, dtype: torch.dtype) -> Any:
    """A tower in memory, with whatever it computes from its config."""
    if hasattr(type(tower), "_from_config"):
        return type(tower)._from_config(tower.config, dtype=dtype)
    if any(True for _ in tower.buffers()):
        raise ModelError(f"model.path: {type(tower).__name__} keeps numbers that no file has; prompts must be text")
    return tower.to_empty(device="cpu").to(dtype)


def _only_towers(model: Any, device: torch.device) -> Any:
    kept = {id(module) for tower in towers(model).values() for module in tower.modules()}
    for module in model.modules():
        if id(module) in kept:
            continue
        for name, parameter in list(module._parameters.items()):
            if parameter is not None:
                module._parameters[name] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    for tower in towers(model).values():
        tower.requires_grad_(False).eval().to(device)
    return model.base_model
