"""Critics of every family that can be trained, also where transformers has no such class: what they say of words."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.services.critic.config import CriticConfig
from penstock.services.critic.learner import CriticLearner
from penstock.services.learning.checkpoint import Saver
from penstock.services.learning.config import CheckpointConfig, Penalties
from penstock.services.modeling.load import load_model
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.values import value_head
from tests import families
from tests.trainer.steps import Tokenizer, a_step

CPU = torch.device("cpu")


@pytest.mark.parametrize("family", [*families.TEXT, *families.SEEING])
def test_it_has_the_policys_body_says_what_its_own_code_does_and_is_whole_in_a_checkpoint(
    family: str, tmp_path: Path
) -> None:
    policy = dict(families.write(family, tmp_path / "policy").named_parameters())
    model = load_trainable(str(tmp_path / "policy"), World(CPU), CPU, "float32", "value")
    own = {name: parameter for name, parameter in model.named_parameters() if name in policy}
    assert policy.keys() - own.keys() <= {"lm_head.weight", "embed_out.weight"}
    assert all(torch.equal(parameter, policy[name]) for name, parameter in own.items())
    with torch.no_grad():
        value_head(model).weight.normal_(generator=torch.Generator().manual_seed(0))
    learner, step = CriticLearner(model, CriticConfig(), 50, 1.0, 1.0, Penalties()), a_step(0)
    found = learner.values(step)
    saved = Saver(learner, Tokenizer(), tmp_path / "run", CheckpointConfig(keep=1)).begin().result()
    again = load_model(str(saved), "float32", CPU, head="value").eval()
    assert all(torch.equal(value, again.get_parameter(name)) for name, value in model.named_parameters())
    for trajectory, values in zip(step.trajectories[:3], found, strict=False):
        ids = torch.from_numpy(trajectory.tokens[None].astype(np.int64))
        with torch.no_grad():
            wanted = again(input_ids=ids, attention_mask=torch.ones_like(ids)).logits[0, :-1, 0].numpy()
        said = trajectory.loss_mask == 1
        np.testing.assert_allclose(values[said], wanted[said[1:]], rtol=1e-4, atol=1e-4)
