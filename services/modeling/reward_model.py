"""A reward model as a scorer: a sequence classifier of transformers that grades whole answers, a group at a time."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.protocols.experience import Group
from penstock.services.modeling.dtypes import DTYPES
from penstock.services.modeling.load import attention_of, devices_of, has_own_code, load_config, load_tokenizer, loading
from penstock.services.modeling.resting import Resting
from penstock.services.modeling.spread import spread
from penstock.services.modeling.weight_files import WeightFiles
from penstock.services.runtime.errors import SetupError
from penstock.services.runtime.hub_names import named

BESIDE = ("lm_head.", "mtp.")
"""Beginnings of what may lie beside a reward model in its files: heads of the language model that it was."""


def look_at_head(path: str, key: str) -> None:
    """Raises `SetupError` where the files in the folder ``path``, which the config's ``key`` gives, are those of no
    reward model. Reads their names alone: it does not judge what has code of its own, or is no safetensors, or is
    called otherwise in files than in memory."""
    from transformers import AutoModelForSequenceClassification

    config = load_config(path, key)
    if has_own_code(config):
        return
    with loading(path, "reward model", key), torch.device("meta"):
        model = AutoModelForSequenceClassification.from_config(config)
    with WeightFiles(Path(path), model) as files:
        names, wanted = set(files.names), model.state_dict().keys()
    missing = wanted - names
    if not any(name.startswith(f"{model.base_model_prefix}.") for name in missing):
        _check_graded(model, path, missing, names - wanted, key)


def _check_graded(model: Any, path: str, missing: Collection[str], beside: Collection[str], key: str) -> None:
    """Raises `SetupError` where ``model``, as transformers makes it of the files at ``path``, is not what those were
    trained as: they have ``missing`` weights not, and others ``beside``."""
    if model.config.num_labels != 1:
        raise SetupError(f"{key}: {path} has {model.config.num_labels} labels; a reward model has one, its grade")
    known, base = (name for name, _ in model.named_parameters()), f"{model.base_model_prefix}."
    lacking = sorted((name for name in known if name in missing), key=lambda name: (name.startswith(base), name))
    heads = min((name for name in beside if not name.startswith((base, *BESIDE))), default="")
    if lacking:
        has = f"; they have {heads}, which it does not read" if heads else ""
        raise SetupError(
            f"{key}: the files of {path} have no {lacking[0]}, which {type(model).__name__} grades with{has}: it would "
            "be drawn at random; take a model that transformers' AutoModelForSequenceClassification has saved, or give "
            "its head that name"
        )
    if heads:
        raise SetupError(
            f"{key}: the files of {path} have {heads}, which {type(model).__name__} does not read: grades would be "
            "others than it was trained to give; take a model that transformers' AutoModelForSequenceClassification "
            "has saved, or write a scorer of your own for it"
        )


class RewardModel:
    """scorers: {preference: {scorer: reward_model, columns: {preference: trajectory}, options: {path: ORG/MODEL}}}

    ``column`` is the column that it writes, ``tokens_per_batch`` bounds a forward pass, padding included, and
    ``max_length`` what it reads: of a longer text, its end. The model's own tokenizer reads the text; where it has a
    chat template, the prompt and the answer are a chat. The grade is at the token that the model's own code takes: the
    last one, but for those that its ``pad_token_id`` names. ``gpus``: those that its layers are dealt out over.
    """

    def __init__(
        self, path: str, column: str = "preference", device: str = "auto", dtype: str = "bfloat16",
        tokens_per_batch: int = 8192, max_length: int = 8192, gpus: int = 1,
    ) -> None:  # fmt: skip
        from transformers import AutoModelForSequenceClassification

        key = "options.path"
        config, (name, revision) = load_config(path, key), named(path)
        config._attn_implementation = attention_of(config)
        with loading(path, "reward model", key):
            model, found = AutoModelForSequenceClassification.from_pretrained(
                name,
                revision=revision,
                config=config,
                dtype=DTYPES[dtype],
                output_loading_info=True,
                trust_remote_code=has_own_code(config),
            )
        _check_graded(model, path, found["missing_keys"], found["unexpected_keys"], key)
        self._tokenizer = load_tokenizer(path, key=key)
        # A model that declares padding is not graded at that, wherever it stands; one that does not, at the last token.
        self._settings = model.config.get_text_config()
        declared = self._settings.pad_token_id
        self._padding = declared if declared in range(self._settings.vocab_size) else None
        devices = devices_of(device, gpus, "options.device", "gpus")
        self._device, self._model = devices[0], model.eval()
        spread(self._model, devices, self._device, "gpus")  # where the grade is, its code asks of the ids
        self._column, self._budget, self._longest = column, tokens_per_batch, max_length
        self._resting = Resting(self._device)

    def at_once(self, groups: Sequence[Group]) -> int:
        """See `custom_scorer.SEVERAL`: as many as have, together, about the tokens of a forward pass."""
        sizes = itertools.accumulate(sum(len(each.tokens) for each in group.trajectories) for group in groups)
        return max(1, sum(size <= self._budget for size in sizes))

    def score_group(self, group: Group, columns: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """The grade of each trajectory: float32 ``[trajectories]``."""
        return self.score_groups([group], [columns])[0]

    def score_groups(
        self, groups: Sequence[Group], columns: Sequence[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """The same, of each of ``groups``."""
        texts = [self._encode(group, trajectory.text) for group in groups for trajectory in group.trajectories]
        grades = np.concatenate([self._grade(part) for part in self._batches(texts)])
        ends = itertools.accumulate(len(group.trajectories) for group in groups)
        return [{self._column: mine} for mine in np.split(grades, [*ends][:-1])]

    def sleep(self) -> None:
        """Gives its device's memory back, until `wake`."""
        self._resting.rest((), [*self._model.parameters(), *self._model.buffers()])

    def wake(self) -> None:
        """Takes its place on its device again."""
        self._resting.wake()

    def _encode(self, group: Group, answer: str) -> list[int]:
        prompt = group.prompt
        if getattr(self._tokenizer, "chat_template", None):
            asked = prompt.as_messages()
            chat = [*asked, {"role": "assistant", "content": answer}]
            found = self._tokenizer.apply_chat_template(chat, tools=prompt.tools, tokenize=True, return_dict=False)
        else:
            found = self._tokenizer(prompt.as_text() + answer)["input_ids"]
        return list(found)[-self._longest :]

    def _batches(self, texts: list[list[int]]) -> list[list[list[int]]]:
        """In order, each with at most `tokens_per_batch` tokens, or one text."""
        batches: list[list[list[int]]] = [[]]
        for text in texts:
            longest = max(len(text), *(len(other) for other in batches[-1]), 1)
            if batches[-1] and longest * (len(batches[-1]) + 1) > self._budget:
                batches.append([])
            batches[-1].append(text)
        return batches

    @torch.inference_mode()
    def _grade(self, texts: list[list[int]]) -> np.ndarray:
        padding = self._padding
        if padding is None:  # a classifier grades at the last token that is none: here at the last of all
            last = {text[-1] for text in texts if text}
            padding = self._settings.pad_token_id = next(each for each in itertools.count() if each not in last)
        longest = max(map(len, texts))
        rows = [text + [padding] * (longest - len(text)) for text in texts]
        mask = [[1] * len(text) + [0] * (longest - len(text)) for text in texts]
        inputs: dict[str, Any] = {
            "input_ids": torch.tensor(rows, device=self._device),
            "attention_mask": torch.tensor(mask, device=self._device),
        }
        return self._model(**inputs).logits[:, 0].float().cpu().numpy()
