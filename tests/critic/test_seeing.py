"""Critics that are shown pictures: values are those of the family's own code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.protocols.experience import PICTURE, Prompt, Trajectory
from penstock.services.modeling.by_trajectory import by_trajectory
from penstock.services.modeling.load import load_model
from penstock.services.modeling.logprobs import layout_of
from penstock.services.modeling.packing import plan_rows
from penstock.services.modeling.sight import give_sight
from penstock.services.modeling.values import value_head, values
from penstock.services.turns.tokenizer import Tokenizer
from tests import seeing, shown

CPU = torch.device("cpu")


def critic_at(folder: Path) -> Any:
    """Whose head says something."""
    model = load_model(str(folder), "float32", CPU, head="value").eval()
    with torch.no_grad():
        value_head(model).weight.normal_(generator=torch.Generator().manual_seed(0))
    return model


def told(folder: Path, *pictures: bytes) -> Trajectory:
    """An answer to a prompt that shows them."""
    content = f"ab{PICTURE * len(pictures)}cd"
    prompt = Prompt(index=0, messages=[{"role": "user", "content": content}], pictures=pictures)
    begin = Tokenizer(str(folder)).encode(prompt)
    tokens = np.concatenate([begin, np.array([5, 6, 7], np.int32)])
    mask = np.concatenate([np.zeros(len(begin), np.uint8), np.ones(3, np.uint8)])
    return Trajectory(
        tokens, mask, np.zeros(len(tokens), np.float32), mask.astype(np.int32) - 1, pictures=pictures
    )  # fmt: skip


@torch.no_grad()
def by_its_own_code(folder: Path, model: Any, trajectory: Trajectory) -> np.ndarray:
    """float32 ``[tokens - 1]``: of the state behind each token but the last."""
    return model(**seeing.told_by_its_processor(folder, model, trajectory)).logits[0, :-1, 0].numpy()


@pytest.mark.parametrize("family", seeing.SHOWN)
def test_a_value_is_of_what_the_picture_shows(family: str, tmp_path: Path) -> None:
    seeing.write(family, tmp_path)
    plain, model = critic_at(tmp_path), critic_at(tmp_path)
    assert give_sight(model, str(tmp_path), "float32", CPU)
    red, white = (shown.picture(shown.COLOURS[name], (40, 56)) for name in "rw")
    trajectories = [told(tmp_path, *pictures) for pictures in ((red,), (white,), (red, white))]
    rows = plan_rows(trajectories, [0, 1, 2], 512, CPU, layout_of(model, trajectories))
    with torch.no_grad():
        found = by_trajectory(trajectories, rows, lambda each: values(model, each))
    for trajectory, mine in zip(trajectories, found, strict=True):
        said = trajectory.loss_mask == 1
        own = by_its_own_code(tmp_path, plain, trajectory)[said[1:]]
        assert np.abs(mine[said] - own).max() < 1e-5 and not mine[~said].any()
    if family != "gemma3":  # whose projector is 0 in a model that nobody has trained
        assert np.abs(found[0] - found[1]).max() > 1e-4, "they differ in the picture alone"
