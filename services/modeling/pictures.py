"""Pictures as a model's processor reads them: the tokens that stand for one, and the numbers that its towers take."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch

from penstock.services.data.picture_files import PictureError, open_pictures, size_of, sizes_of
from penstock.services.modeling.load import ModelError, load_config, load_tokenizer, not_loaded, sees
from penstock.services.runtime import own_code
from penstock.services.runtime.hub_names import named
from penstock.services.runtime.install import install
from penstock.services.runtime.kept import Kept

TRIED = (64, 48), (123, 457), (900, 20)
"""Sizes by which it is tried whether a processor counts right."""
KEPT = 1024
"""Sizes of pictures whose tokens are remembered."""


class PictureReader:
    """The processor of the model at ``path``, of which the config's ``key`` speaks; its ``tokenizer`` is read from
    there too, unless it is given. Videos are none of its business, so that it wants no torchvision. Raises
    `ModelError`."""

    def __init__(self, path: str, tokenizer: Any = None, key: str = "model.path") -> None:
        self._processor = _load(path, tokenizer or load_tokenizer(path, key=key), key)
        config = load_config(path, key)
        ends = [(f"{of}_start_token_id", f"{of}_end_token_id") for of in ("vision", "image")]
        ids = next(([getattr(config, name) for name in pair] for pair in ends if hasattr(config, pair[0])), [])
        self._frame = [self._processor.tokenizer.convert_ids_to_tokens(id) for id in ids if id is not None]
        """What the family puts around a picture; nothing: its processor does, or nobody."""
        self._token = placeholder(config)
        self._word = self._processor.tokenizer.convert_ids_to_tokens(self._token)
        self._expansions: Kept[list[int]] = Kept(KEPT)

    @property
    def mark(self) -> str:
        """What stands for one picture in words, before it is made tokens."""
        return str(self._processor.image_token)

    @property
    def mark_id(self) -> int:
        """The token of `mark`."""
        return int(self._processor.tokenizer.convert_tokens_to_ids(self.mark))

    @property
    def folds(self) -> bool:
        """A picture's tokens can be found again in those of a prompt: they do not join with what stands beside them."""
        return "\n" not in getattr(self._processor, "full_image_sequence", "")

    @property
    def framed_mark(self) -> str:
        """`mark`, with what the family's own template puts around it."""
        return self.mark.join(self._frame) if self._frame else self.mark

    def encode(self, text: str, pictures: Sequence[bytes], begun: bool) -> np.ndarray:
        """int32 ``[tokens]`` of ``text`` with a `mark` for each of ``pictures``, which becomes as many tokens as that
        picture has. ``begun``: the text says itself what begins one. Raises `PictureError`."""
        self._check_count(text.count(self.mark), len(pictures))
        if self._word != self.mark and self._word in text:
            raise PictureError(f"the prompt has {self._word}, which stands for a part of a picture: leave it out")
        if self.folds:  # as the processor would, which looks at every pixel first
            ids = self._processor.tokenizer(text, add_special_tokens=not begun)["input_ids"]
            return self.expand(np.array(ids, np.int32), pictures)
        sizes = list(sizes_of(pictures))
        if not self._sequence:
            return self._apart(self._read(text, list(map(_blank, sizes)), add_special_tokens=not begun), pictures)
        words = text.replace(self.mark, self._sequence)
        return self._apart(self._processor.tokenizer(words, add_special_tokens=not begun)["input_ids"], pictures)

    def expand(self, ids: np.ndarray, pictures: Sequence[bytes]) -> np.ndarray:
        """int32 ``[tokens]``: ``ids`` with each picture's tokens in the place of its `mark_id`. Raises
        `PictureError`."""
        places = np.flatnonzero(ids == self.mark_id)
        if self._word != self.mark and self._token in ids:
            raise PictureError(f"what shows pictures has {self._word}, which stands for a part of one: leave it out")
        self._check_count(len(places), len(pictures))
        parts = np.split(ids, places)
        found = [*parts[:1]]
        for number, (picture, part) in enumerate(zip(pictures, parts[1:], strict=True)):
            try:
                found += [np.array(self.expansion(picture), np.int32), part[1:]]
            except PictureError as error:
                raise PictureError(f"picture {number}: {error}") from error
        return self._apart(np.concatenate(found), pictures)

    def check_bare(self, ids: np.ndarray) -> None:
        """Raises `PictureError` where ``ids`` of words have what stands for a picture, or for a part of one."""
        for token, word in ((self.mark_id, self.mark), (self._token, self._word)):
            if token in ids:
                raise PictureError(f"the words say {word}, which stands for a picture: leave it out")

    def _check_count(self, marks: int, pictures: int) -> None:
        if marks != pictures:
            raise PictureError(
                f"{pictures} pictures, and {self.mark} {marks} times in what shows them: leave it out of the words; if "
                "it is not in them, the chat template does not show each picture once: give another as "
                "model.chat_template"
            )

    def _apart(self, given: Any, pictures: Sequence[bytes]) -> np.ndarray:
        """As int32. Raises `PictureError` where two pictures touch that must not: of a family with frames, runs of a
        picture's tokens are what positions go by."""
        ids = np.array(given, np.int32)
        if self._frame:
            runs = int(np.count_nonzero(np.diff((ids == self._token).astype(np.int8), prepend=0) == 1))
            if runs != len(pictures):
                raise PictureError(
                    f"{len(pictures)} pictures became {runs} runs of {self.mark}: the chat template "
                    f"(model.chat_template) must put {' and '.join(self._frame)} around each"
                )
        return ids

    def numbers(self, *pictures: bytes) -> dict[str, torch.Tensor]:
        """What the family's ``get_image_features`` is given for ``pictures``. Raises `PictureError`."""
        found = self._call(self.mark * len(pictures), list(open_pictures(pictures)))
        return {name: torch.as_tensor(np.asarray(of)) for name, of in found.items() if name not in _OF_TEXT}

    def vectors(self, picture: bytes) -> int:
        """How many its towers make of one picture, each for a token of its `expansion`. Raises `PictureError`."""
        return self.expansion(picture).count(self._token)

    def expansion(self, picture: bytes) -> list[int]:
        """The tokens that stand for a picture in the place of the token of `mark`, which follow from its size alone.
        Raises `PictureError`."""
        return self.expansion_of(size_of(picture))

    def expansion_of(self, size: tuple[int, int]) -> list[int]:
        """As `expansion`, of any picture of this width and height."""
        return self._expansions.get(size, lambda: self._expanded(size))

    def _expanded(self, size: tuple[int, int]) -> list[int]:
        count = self._count(size) if self._repeats else -1  # -1 too of one that the processor refuses, saying why
        return [self._token] * count if count > 0 else self._of_blank(size)

    @cached_property
    def _repeats(self) -> bool:
        """A picture is its token over and over, as often as the processor says of its size."""
        every = [(size, self._of_blank(size)) for size in TRIED]
        return all(set(found) == {self._token} and len(found) == self._count(size) for size, found in every)

    @cached_property
    def _sequence(self) -> str:
        """Of a family that does not fold: the words that stand for each picture, of whatever size; empty: none do."""
        words: str = getattr(self._processor, "full_image_sequence", "")
        ids = self._processor.tokenizer(words, add_special_tokens=False)["input_ids"]
        return words if all(self._of_blank(size) == ids for size in TRIED) else ""

    def _of_blank(self, size: tuple[int, int]) -> list[int]:
        return self._read(self.mark, [_blank(size)], add_special_tokens=False)

    def _count(self, size: tuple[int, int]) -> int:
        """What vLLM asks too; -1: this family's processor does not say."""
        ask = getattr(self._processor, "_get_num_multimodal_tokens", None)
        try:
            return int(ask(image_sizes=[[size[1], size[0]]])["num_image_tokens"][0]) if ask else -1
        except (TypeError, ValueError, LookupError, AttributeError):
            return -1

    def _read(self, text: str, images: Sequence[Any], **how: Any) -> list[int]:
        return list(self._call(text, images, **how)["input_ids"][0])

    def _call(self, text: str, images: Sequence[Any], **how: Any) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = self._processor(images=images, text=[text], **how)
        except (ValueError, TypeError, IndexError, OSError) as error:
            raise PictureError(f"the model's processor cannot take the picture: {error}") from error
        return found


_OF_TEXT = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "num_crops")


def _blank(size: tuple[int, int]) -> Any:
    from PIL import Image

    return Image.new("RGB", size)


def placeholder(config: Any) -> int:
    """The token that stands where a model of transformers' ``config`` reads what its towers have seen; -1: it sees
    nothing."""
    if not sees(config):
        return -1
    found = getattr(config, "image_token_id", None)
    return getattr(config, "image_token_index", -1) if found is None else found


def _load(path: str, tokenizer: Any, key: str) -> Any:
    import transformers
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

    name = PROCESSOR_MAPPING_NAMES.get(load_config(path, key).model_type)
    if name is None:
        raise ModelError(f"{key}: transformers has no processor of pictures for {path}; its prompts must be text")
    try:
        import PIL  # noqa: F401

        repository, revision = named(path)
        family = getattr(transformers, name)
        wanted = inspect.signature(family.__init__).parameters
        images = transformers.AutoImageProcessor.from_pretrained(
            repository, revision=revision, trust_remote_code=own_code.trusted()
        )
        try:
            written, _ = family.get_processor_dict(repository, revision=revision)
        except (OSError, ValueError):
            written = {}  # a model need not have a file of it beside its image processor's
        told = {name: written[name] for name in wanted if name in written and name not in family.get_attributes()}
        return type(name, (family,), {"check_argument_for_proper_class": _lenient})(
            **told | {"image_processor": images, "tokenizer": tokenizer}
        )
    except ImportError as error:
        remedy = f"run: {install('pictures')}"
        if "torchvision" in f"{error} {error.__cause__}".lower() or find_spec("PIL"):
            remedy = f"it wants torchvision, built for torch {torch.__version__}: install that"
        raise ModelError(f"{key}: transformers' {name}, which reads pictures, cannot be had; {remedy}") from error
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise ModelError(not_loaded(path, "image processor", error, key)) from error


def _lenient(self: Any, name: str, given: Any) -> Any:
    """In the place of transformers' check: what hears, or sees videos, may be missing."""
    return type(given)
