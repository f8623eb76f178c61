"""Tiny models of words and pictures that can be shown some."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.pipeline.models.characters import ALPHABET
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.protocols.experience import PICTURE, Prompt, Trajectory
from penstock.services.learning.batch import TrainingBatch
from penstock.services.modeling.load import load_config, load_model
from penstock.services.modeling.pictures import PictureReader, placeholder
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import TorchEngineConfig
from penstock.services.rollout.engines.torch.engine import TorchEngine
from penstock.services.turns.tokenizer import Tokenizer
from tests import families, shown

QWEN, GEMMA = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>", "<|video_pad|>"), ("<boi>", "<img>", "<eoi>")
INTERN = ("<img>", "<IMG_CONTEXT>", "</img>", "<video>")
GLM = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>")
SHOWN = ("qwen2_vl", "glm4v", "internvl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma3")
"""Families whose processors want no torchvision; so does `glm46v`'s, which is all that tells it from `glm4v`."""
READERS = {"glm4v": "Glm4vImageProcessor", "glm46v": "Glm46VImageProcessor"}
"""Whose image processor is no Qwen's."""


def write(family: str, folder: Path) -> Any:
    """The model, with a tokenizer of single letters, a chat template and a processor. Returns the tokenizer."""
    tokenizer = make_tokenizer(set(ALPHABET))
    ours = {"gemma": GEMMA, "glm": GLM, "intern": INTERN}
    words = next((words for name, words in ours.items() if family.startswith(name)), QWEN)
    tokenizer.add_special_tokens({"additional_special_tokens": list(words)})
    begin, pad, end = (tokenizer.convert_tokens_to_ids(word) for word in words[:3])
    mark = words[0] if words is GEMMA else words[1] if words is INTERN else "".join(words[:3])
    tokenizer.chat_template = (
        "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
        "{% for part in message.content %}{% if part.type == 'image' %}" + mark + "{% else %}{{ part.text }}{% endif %}"
        "{% endfor %}{% endif %}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    of = "image" if words is GLM else "vision"
    told: dict[str, Any] = {"image_token_id": pad, f"{of}_start_token_id": begin, f"{of}_end_token_id": end}
    if words is GEMMA:
        told = {"image_token_id": pad, "boi_token_index": begin, "eoi_token_index": end, "mm_tokens_per_image": 4}
        _update(folder / "tokenizer_config.json", extra_special_tokens=_GEMMA_NAMES)
        _update(folder / "preprocessor_config.json", image_processor_type="Gemma3ImageProcessor", size=_SQUARE)
        _update(folder / "processor_config.json", processor_class="Gemma3Processor", image_seq_length=4)
    elif words is INTERN:
        told = {"image_token_id": pad}
        _update(folder / "tokenizer_config.json", extra_special_tokens=_INTERN_NAMES)
        _update(folder / "preprocessor_config.json", image_processor_type="GotOcr2ImageProcessor", size=_SQUARE)
        _update(folder / "processor_config.json", processor_class="InternVLProcessor", image_seq_length=4)
    else:
        told["video_token_id"] = tokenizer.convert_tokens_to_ids(words[3])
        size = {"shortest_edge": 32 * 32, "longest_edge": 64 * 64}
        _update(
            folder / "preprocessor_config.json",
            image_processor_type=READERS.get(family, "Qwen2VLImageProcessor"), size=size,
            patch_size=families.PATCH, temporal_patch_size=2, merge_size=2,
        )  # fmt: skip
    families.write(family, folder, vocab_size=len(tokenizer), **told)
    return tokenizer


def engine(folder: Path, max_length: int = 96) -> tuple[TorchEngine, Tokenizer]:
    """What serves the model in ``folder``, and its tokenizer."""
    text, path = Tokenizer(str(folder)), str(folder)
    made = TorchEngine(
        TorchEngineConfig(max_sequences=8, max_length=max_length), load_config(path), "float32", {1},
        lambda ids: text.decode([ids])[0], path=path,
    )  # fmt: skip
    model = load_model(path, "float32", torch.device("cpu"))
    made.swap(made.prepare(version_of(model)), 0)
    return made, text


def told_by_its_processor(folder: Path, model: Any, trajectory: Trajectory) -> dict[str, torch.Tensor]:
    """What the family's own code, ``model``, is called with for the whole sequence."""
    ids = torch.from_numpy(trajectory.tokens[None].astype(np.int64))
    told = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if trajectory.pictures:
        read = [*map(PictureReader(str(folder)).numbers, trajectory.pictures)]
        told |= {name: torch.cat([each[name] for each in read]) for name in read[0]}
        places = ((ids == placeholder(model.config)) & (torch.from_numpy(trajectory.loss_mask) == 0)).int()
        told |= {"token_type_ids" if model.config.model_type == "gemma3" else "mm_token_type_ids": places}
    return told


def shown_step(step: TrainingBatch, folder: str) -> TrainingBatch:
    """``step``, whose second group is shown a picture, and the first of its third group two."""
    text, picture = Tokenizer(folder), shown.picture(shown.COLOURS["r"], (40, 56))
    trajectories = list(step.trajectories)
    for number, content in {4: PICTURE, 5: PICTURE, 6: PICTURE, 7: PICTURE, 8: PICTURE * 2}.items():
        pictures = (picture,) * content.count(PICTURE)
        prompt = Prompt(index=0, messages=[{"role": "user", "content": f"a{content}b"}], pictures=pictures)
        one, tokens = trajectories[number], text.encode(prompt)
        blank = np.zeros_like(tokens)
        trajectories[number] = replace(
            one,
            tokens=np.concatenate([tokens, one.tokens]),
            loss_mask=np.concatenate([blank.astype(one.loss_mask.dtype), one.loss_mask]),
            logprobs=np.concatenate([blank.astype(np.float32), one.logprobs]),
            versions=np.concatenate([blank - 1, one.versions]).astype(one.versions.dtype),
            pictures=pictures,
        )
    return replace(step, trajectories=trajectories)


_GEMMA_NAMES = {"image_token": "<img>", "boi_token": "<boi>", "eoi_token": "<eoi>"}
_INTERN_NAMES = {
    "start_image_token": "<img>", "context_image_token": "<IMG_CONTEXT>", "end_image_token": "</img>",
    "video_token": "<video>",
}  # fmt: skip
_SQUARE = {"height": 32, "width": 32}


def _update(path: Path, **told: Any) -> None:
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | told))
