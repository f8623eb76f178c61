"""A model's sizes, as its config.json has them, are those that transformers makes of it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.pipeline.config import load
from penstock.pipeline.resources.host import host_needs
from penstock.pipeline.resources.memory import critic_gib, kv_tokens, plan
from penstock.pipeline.resources.model_shape import critic_shape, shape_of
from penstock.pipeline.resources.trainer_memory import trainer_parts
from penstock.services.modeling.decoder_shape import Shape, described_by
from penstock.services.modeling.experts import experts_of, mixture_layers
from penstock.services.modeling.families import LATENT, LINEAR, PLAIN, STAGED, TIED, UNCOUNTED
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.load import load_config, with_head
from penstock.services.modeling.towers import towers
from penstock.services.runtime.gpus import GIB
from tests import families

QWEN = Path("pipeline/resources/models/Qwen--Qwen3-8B/config.json")


FACTORS = [1.0] * (json.loads(QWEN.read_text())["head_dim"] // 2)
LONG = {
    "rope_type": "longrope", "factor": 10.0, "short_factor": FACTORS, "long_factor": FACTORS,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def shaped(folder: Path, described: dict[str, Any]) -> Shape:
    (folder / "config.json").write_text(json.dumps(described))
    found = shape_of(load(Path("configs/grpo-8b.yaml"), [f"model.path={folder}"]))
    assert found
    return found


@pytest.mark.parametrize(
    ("rope", "positions"),
    [
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}, 131072),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e6}}, 81920),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 40960),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}}, 40960),
        ({"rope_scaling": LONG}, 4096),
        ({"rope_scaling": None}, 40960),
    ],
)
def test_positions_are_those_that_a_run_has(tmp_path: Path, rope: dict[str, Any], positions: int) -> None:
    shape = shaped(tmp_path, json.loads(QWEN.read_text()) | rope)
    assert (shape.max_length, positions_of(load_config(str(tmp_path)))) == (positions, positions)
    keys = [f"model.path={tmp_path}", f"rollout.engine.max_length={positions}", "run.gpu_gib=null"]
    assert not plan(load(Path("configs/grpo-8b.yaml"), keys)).problems


@pytest.mark.parametrize("family", sorted((PLAIN | STAGED | TIED) - LINEAR - LATENT - UNCOUNTED))
def test_a_head_is_the_embedding_where_transformers_says_so(tmp_path: Path, family: str) -> None:
    """Gemma's files, for one, do not say it."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    described = json.loads(QWEN.read_text()) | {"model_type": family}
    del described["tie_word_embeddings"]
    if family == "qwen3_moe":
        described |= {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    assert shaped(tmp_path, described).tied == CONFIG_MAPPING[family]().tie_word_embeddings
    assert not shaped(tmp_path, described | {"tie_word_embeddings": False}).tied


@pytest.mark.parametrize("family", [*families.TEXT, *families.SEEING])
def test_a_family_is_counted_rightly_or_not_at_all(family: str) -> None:
    config = families.config_of(family)
    shape = described_by(family, config.to_dict())
    assert (shape is None) == (family in NOT_COUNTED)
    if shape is None:
        return
    with torch.device("meta"):
        model = with_head(config, "language").from_config(config)
    seeing = {id(parameter) for tower in towers(model).values() for parameter in tower.parameters()}
    matrices = (
        parameter for name, parameter in model.named_parameters()
        if id(parameter) not in seeing and min(parameter.shape) > 1 and not name.endswith(("_bias", ".bias"))
    )  # fmt: skip
    assert shape.parameters == sum(matrix.numel() for matrix in matrices if matrix.ndim > 1)
    experts = experts_of(config.get_text_config())
    assert (shape.experts, shape.mixtures) == (experts, experts and len(mixture_layers(config.get_text_config())))


def test_what_a_stage_has_of_layers_that_differ() -> None:
    config = families.config_of("glm4_moe")
    config.num_hidden_layers, config.first_k_dense_replace = 6, 3
    shape = described_by("glm", config.to_dict())
    assert shape
    stages = [shape.stage(number, 3) for number in range(3)]
    assert [stage.mixtures for stage in stages] == [0, 1, 2]
    assert sum(stage.parameters for stage in stages) == shape.parameters


@pytest.mark.parametrize("layers", [3, 4, 10])
def test_every_fourth_layer_attends_where_a_file_does_not_say_which(layers: int) -> None:
    data = families.config_of("qwen3_next").to_dict() | {"num_hidden_layers": layers}
    del data["layer_types"]
    shape = described_by("next", data)
    assert shape and shape.attending == layers // 4 / layers


NOT_COUNTED = {
    "gemma4_text", "gemma4", "starcoder2", "lfm2", "granitemoehybrid", "falcon_h1", "nemotron_h", "opt", "gpt_neox",
    "gpt2",
}  # fmt: skip
"""Which the plan says it does not know: docs/memory.md."""


def test_towers_are_counted_as_often_as_they_are_there() -> None:
    config = load(Path("configs/geometry3k.yaml"), ["trainer.ranks=2"])
    shape = shape_of(config)
    assert shape and shape.sees and shape.towers == 668_684_288, "3,754,622,976 less the decoder's"
    blind = replace(shape, sees=False)
    seeing, words, nothing = (trainer_parts(each, config.trainer) for each in (shape, blind, replace(blind, towers=0)))
    assert seeing["towers that see"] == 2 * shape.towers / GIB and "towers that see" not in words
    assert seeing["pictures, as seen"] == 0.5 and "pictures, as seen" not in words
    assert words["towers"] == 2 * shape.towers / GIB, "fp32, over two ranks"
    assert words["published version"] - nothing["published version"] == pytest.approx(shape.towers / GIB)
    assert kv_tokens(blind, 80) < kv_tokens(replace(blind, towers=0), 80)
    learned = ["trainer.ranks=2", "trainer.train_towers=true", "trainer.sum_gradients=micro_batch"]
    whole, merger = (
        load(Path("configs/geometry3k.yaml"), [*learned, f"trainer.freeze={frozen}"])
        for frozen in ("[]", "['*.visual.blocks.*','*.visual.patch_embed.*']")
    )
    both = shape_of(whole)
    assert both == replace(shape, learned_towers=shape.towers) and both.learned == both.parameters + both.towers
    parts, still = (trainer_parts(each, whole.trainer) for each in (both, shape))
    assert not {"towers that see", "pictures, as seen"} & parts.keys() and parts["towers"] == still["towers"]
    assert parts["gradients"] - still["gradients"] == pytest.approx(2 * shape.towers / GIB), "fp32, over two ranks"
    assert parts["optimizer"] - still["optimizer"] == pytest.approx(4 * shape.towers / GIB)
    some = shape_of(merger)
    assert some and some.learned_towers == 36_708_608, "the merger of Qwen2.5-VL-3B alone: a norm and two matrices"
    keys = ["prompts.train.images_key=null", "prompts.eval.held_out.images_key=null"]
    assert shape_of(load(Path("configs/geometry3k.yaml"), keys)) == blind


def test_a_critics_towers_stand_still_whatever_the_policys_do() -> None:
    ppo = ["trainer.algorithm={preset: ppo}", "critic.offload=true"]
    blind = ["prompts.train.images_key=null", "prompts.eval.held_out.images_key=null"]
    plain, learned, words = (
        load(Path("configs/geometry3k.yaml"), [*ppo, *more]) for more in ([], ["trainer.train_towers=true"], blind)
    )
    shape = critic_shape(learned)
    assert shape and shape == shape_of(plain)
    gib = [critic_gib(config, 80) or 0.0 for config in (plain, learned, words)]
    assert gib[0] == gib[1] == pytest.approx(gib[2] + 2 * shape.towers / GIB + 0.5), (
        "a copy of them to see with, and what that has found"
    )
    needs = [host_needs(config) for config in (plain, learned)]
    assert needs[0] and needs[1] and needs[0].critic_offloaded == needs[1].critic_offloaded
    assert needs[0].critic_offloaded * GIB == pytest.approx(16 * shape.parameters + 4 * shape.towers, rel=1e-3)
