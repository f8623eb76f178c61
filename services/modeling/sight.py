"""What a model of words and pictures sees, and how its decoder is told.

Towers that stand still (`towers.py`) are a copy of their own beside a trainer's model, so what they find in a picture
is computed once, in whatever shape the decoder is cut, and ranks whose rows show nothing need not take part. Those that
learn are the model's own: they look anew in each pass, at all its pictures at once, and where it shows none at a blank
one whose gradient is 0, since all ranks that share them take part in each. Whoever has a model whole looks with that.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch

from penstock.protocols.experience import Trajectory
from penstock.services.data.picture_files import PictureError, blank_picture
from penstock.services.modeling.decoder_shape import SEEN_BYTES
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.pictures import PictureReader, placeholder
from penstock.services.modeling.pinned import to_device
from penstock.services.modeling.tower_copy import TowerCopy
from penstock.services.modeling.towers import learns, towers
from penstock.services.runtime.kept import Kept


class Looking(Protocol):
    """Who has the towers that look."""

    def base(self) -> Any:
        """transformers' base model that they are within."""

    def beside(self) -> list[torch.Tensor]:
        """What it has on the device for them, beside the model that is told."""


class _Own:
    """The ``model`` that is told itself."""

    def __init__(self, model: Any) -> None:
        self._model = model

    def base(self) -> Any:
        """See `Looking.base`."""
        return self._model.base_model

    def beside(self) -> list[torch.Tensor]:
        """See `Looking.beside`."""
        return []


class Sight:
    """Of a model whose decoder reads what its towers see where ``token`` stands; its processor lies at ``path``. The
    towers are those of ``looking``, and take floating-point numbers of ``dtype``, on ``device``. They ``learn``: what
    they find is not remembered. Raises `ModelError` when the first picture comes."""

    def __init__(
        self, path: str, token: int, looking: Looking, dtype: torch.dtype, device: torch.device,
        key: str = "model.path", learn: bool = False,
    ) -> None:  # fmt: skip
        self._token, self._path, self._key = token, path, key
        self._looking, self._dtype, self._device, self.learns = looking, dtype, device, learn
        self._reader: PictureReader | None = None
        self._found: Kept[_Found] = Kept(SEEN_BYTES, lambda found: found.nbytes)
        self._blank: dict[str, torch.Tensor] | None = None
        """What is given to the towers where rows show nothing."""
        self._shown: torch.Tensor | None = None
        """bool ``[rows, length]``: where rows show something, of the forward pass that was asked for last."""

    def forget(self) -> None:
        """What was found: the weights have changed."""
        self._found.clear()

    def share(self, other: Sight) -> None:
        """What either finds both remember: their towers are alike, whatever becomes of the weights."""
        self._found = other._found

    def resting(self) -> list[torch.Tensor]:
        """Forgets what was found, which lies on the device; returns what else does, beside the model."""
        self.forget()
        return self._looking.beside()

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
        distinct = list(dict.fromkeys(picture for row in pictures for picture in row))
        found = dict(zip(distinct, self._looks(distinct), strict=True))
        every = [found[picture] for row in pictures for picture in row]
        base = self._seeing()[0]
        shows = (tokens == self._token) & real.bool() & ~sampled
        self._check(shows.sum(1).tolist(), [sum(found[picture].tokens for picture in row) for row in pictures])
        begins = dict(zip(distinct, accumulate((each.tokens for each in found.values()), initial=0), strict=False))
        of_each = [torch.arange(found[p].tokens) + begins[p] for row in pictures for p in row]
        wanted = torch.full(tokens.shape, -1, device=tokens.device)
        wanted = wanted.masked_scatter(shows, torch.cat(of_each).to(tokens.device))
        """Which vector of those that were found is read there; -1: none."""
        positions = None
        if hasattr(base, "get_rope_index"):
            grids = torch.cat([each.grid for each in every if each.grid is not None]).to(tokens.device)
            positions = base.get_rope_index(
                tokens, mm_token_type_ids=shows.int(), image_grid_thw=grids, attention_mask=real
            )[0]
        if at is not None:
            member, place = at[0].clamp(min=0), at[1]
            wanted = wanted[member, place].masked_fill(at[0] < 0, -1)
            positions = None if positions is None else positions[:, member, place]
        self._shown = wanted >= 0
        inputs = _told([*found.values()], wanted[self._shown])
        taken = inspect.signature(type(base).forward).parameters
        inputs |= {name: self._shown.int() for name in ("token_type_ids", "mm_token_type_ids") if name in taken}
        return inputs if positions is None else inputs | {"position_ids": positions}

    def nothing(self, tokens: torch.Tensor) -> dict[str, Any]:
        """As `inputs`, of rows of ``tokens`` ``[rows, length]`` that show nothing: towers that learn take part."""
        self._shown = torch.zeros_like(tokens, dtype=torch.bool)
        if self._blank is None:
            self._blank = self._given([blank_picture()])
        return _told(self._seen(self._blank, 1), torch.zeros(0, dtype=torch.int64, device=tokens.device))

    def check(self, tokens: np.ndarray, sampled: np.ndarray, pictures: Sequence[bytes]) -> None:
        """Raises `PictureError` where ``tokens``, less those that were ``sampled``, have more or fewer places than
        ``pictures`` need."""
        places = int(np.count_nonzero((tokens == self._token) & ~sampled))
        with torch.no_grad():
            self._check([places], [sum(found.tokens for found in self._looks(pictures))])

    def _check(self, places: list[int], vectors: list[int]) -> None:
        if places != vectors:
            raise PictureError(
                f"{self._key}: rows have {places} places for {vectors} vectors of their pictures: whoever made their "
                f"tokens reads pictures otherwise than {self._path}; give all the same processor files, and the same "
                "version of transformers"
            )

    def _looks(self, pictures: Sequence[bytes]) -> list[_Found]:
        """What the towers find in each of ``pictures``, of which there is at least one."""
        if self.learns:
            return self._look(pictures)
        with torch.no_grad():
            return [self._found.get(picture, partial(self._look_at, picture)) for picture in pictures]

    def _look_at(self, picture: bytes) -> _Found:
        (found,) = self._look([picture])
        return found

    def _look(self, pictures: Sequence[bytes]) -> list[_Found]:
        """By one call of the family's own code. Raises `PictureError`."""
        counts = map(self._seeing()[1].vectors, pictures) if len(pictures) > 1 else (1,)
        return self._seen(self._given(pictures), *counts)

    def _given(self, pictures: Sequence[bytes]) -> dict[str, torch.Tensor]:
        """What the family's code is given for ``pictures``."""
        base, reader = self._seeing()
        taken = inspect.signature(base.get_image_features).parameters
        return {name: self._placed(of) for name, of in reader.numbers(*pictures).items() if name in taken}

    def _seen(self, given: dict[str, torch.Tensor], *counts: int) -> list[_Found]:
        """What the towers find in what is ``given``, of pictures that have so many vectors each; of one whatever it
        has."""
        said = self._looking.base().get_image_features(**given, return_dict=True)
        every = _flat(said.pooler_output)
        if len(counts) == 1:
            counts = (len(every),)
        elif sum(counts) != len(every):
            raise PictureError(
                f"{self._key}: {self._path} makes {len(every)} vectors of pictures of {list(counts)} tokens"
            )
        layers = getattr(said, "deepstack_features", None)
        deep = None if layers is None else [_flat(layer).split(list(counts)) for layer in layers]
        grids, listed = given.get("image_grid_thw"), not isinstance(said.pooler_output, torch.Tensor)
        return [
            _Found(
                vectors,
                listed,
                None if deep is None else tuple(layer[number] for layer in deep),
                None if grids is None else grids[number : number + 1],
            )
            for number, vectors in enumerate(every.split(list(counts)))
        ]

    def _placed(self, values: torch.Tensor) -> torch.Tensor:
        there = to_device(values, self._device)
        return there.to(self._dtype) if values.is_floating_point() else there

    def _seeing(self) -> tuple[Any, PictureReader]:
        self._reader = self._reader or PictureReader(self._path, key=self._key)
        return self._looking.base(), self._reader


@dataclass(frozen=True)
class _Found:
    """What the towers have found in one picture: ``vectors`` ``[tokens, size]``, each of which the decoder reads in a
    placeholder's place."""

    vectors: torch.Tensor
    listed: bool
    """The family gives them as a list, by picture."""
    deep: tuple[torch.Tensor, ...] | None
    """What some of its layers are given beside them, of the same shape each."""
    grid: torch.Tensor | None
    """int64 ``[1, 3]``: frames, rows and columns of patches, of families whose positions go by them."""

    @property
    def tokens(self) -> int:
        """Places that it takes."""
        return len(self.vectors)

    @property
    def nbytes(self) -> int:
        """Of memory."""
        return sum(part.nbytes for part in (self.vectors, *(self.deep or ())))


def _flat(found: Any) -> torch.Tensor:
    """Vectors, ``[some, size]``, which a family gives picture by picture."""
    return found.flatten(0, -2) if isinstance(found, torch.Tensor) else torch.cat([_flat(each) for each in found])


def _told(found: Sequence[_Found], chosen: torch.Tensor) -> dict[str, Any]:
    """How a family's base model is told of those vectors that were ``chosen`` among all that were ``found``, as if one
    call had given them."""

    def together(parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))[chosen]

    vectors, deep = together([each.vectors for each in found]), [each.deep for each in found]
    layers = None if deep[0] is None else [[together(layer)] for layer in zip(*deep, strict=True)]
    outputs = SimpleNamespace(pooler_output=[vectors] if found[0].listed else vectors, deepstack_features=layers)
    return {"mm_encoder_outputs": {"image": outputs}}


def give_sight(model: Any, path: str, dtype: str, device: torch.device, key: str = "model.path") -> bool:
    """``model``, which has all its weights, in ``dtype``, on ``device``, can be shown pictures, where it sees; its
    processor lies at ``path``. Returns whether."""
    return _attach(model, path, _Own(model), dtype, device, key)


def give_learners_sight(model: Any, path: str, dtype: str, device: torch.device, key: str = "model.path") -> None:
    """As `give_sight`, to one that is trained, which may be cut, and which began as what lies at ``path``."""
    learn = any(map(learns, towers(model).values()))
    looking: Looking = _Own(model) if learn else TowerCopy(path, DTYPES[dtype], device)
    _attach(model, path, looking, dtype, device, key, learn)


def _attach(
    model: Any, path: str, looking: Looking, dtype: str, device: torch.device, key: str = "model.path",
    learn: bool = False,
) -> bool:  # fmt: skip
    if not can_be_shown(model):
        return False
    Sight(path, placeholder(model.config), looking, DTYPES[dtype], device, key, learn).attach(model)
    return True


def can_be_shown(model: Any) -> bool:
    """``model`` sees, and its decoder can be told what its towers have found."""
    base = model.base_model
    told = "mm_encoder_outputs" in inspect.signature(type(base).forward).parameters
    return placeholder(model.config) >= 0 and told and hasattr(base, "get_placeholder_mask")


def sight_of(model: Any) -> Sight | None:
    """What ``model`` sees with; None: it cannot be shown pictures."""
    return getattr(model, "penstock_sight", None)


def forget_seen(model: Any) -> None:
    """Of pictures: the weights of ``model`` have changed."""
    if sight := sight_of(model):
        sight.forget()


def check_shown(model: Any, trajectories: Sequence[Trajectory]) -> None:
    """Raises `PictureError` where ``model`` sees more or less in pictures of ``trajectories`` than their prompts have
    places for."""
    sight = sight_of(model)
    if sight and (shown := [trajectory for trajectory in trajectories if trajectory.pictures]):
        for trajectory in shown:
            sight.check(trajectory.tokens, trajectory.loss_mask == 1, trajectory.pictures)


def resting_sight(model: Any) -> list[torch.Tensor]:
    """What ``model`` has on its device for its sight, where that is left to others: it remembers no picture."""
    sight = sight_of(model)
    return sight.resting() if sight else []


def _other_than(token: int) -> int:
    return token - 1 if token else 1
