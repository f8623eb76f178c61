"""A run that reaches further than its model's config.json says: engine, trainer and checkpoint alike."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM, Gemma3TextConfig, Qwen3Config

from penstock.pipeline.config import ConfigError, PretrainedModel, load
from penstock.pipeline.resources.model_shape import shape_of
from penstock.services.modeling.lengths import positions_of
from penstock.services.modeling.load import ModelError, empty_model, load_config, load_model
from penstock.services.rollout.config import SamplingConfig, VllmEngineConfig
from penstock.services.runtime import own_positions
from penstock.services.runtime.own_positions import Positions
from tests.engines.test_conformance import check
from tests.engines.workbench import Workbench, make_models

YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}


@pytest.fixture(autouse=True)
def nothing_said() -> Iterator[None]:
    yield
    own_positions.say(Positions(), ())


def a_config(folder: Path, **model: Any) -> Path:
    path = folder / "run.yaml"
    data = {"type": "hub", "path": "json", "files": ["rows.jsonl"], "prompt_key": "q", "truth_key": "a"}
    own = {"type": "pretrained", "path": str(folder), "dtype": "float32", **model}
    path.write_text(json.dumps({"model": own, "prompts": {"train": data}}))
    return path


@pytest.mark.parametrize("engine", ["torch", pytest.param("vllm", marks=[pytest.mark.vllm, pytest.mark.slow])])
def test_answers_beyond_what_the_file_says_are_transformers_own(tmp_path: Path, engine: str) -> None:
    (there, _) = make_models(tmp_path, Qwen3Config)
    load(a_config(tmp_path, max_position_embeddings=192, rope_parameters=YARN))
    mine = load_model(str(tmp_path), "float32", torch.device("cpu"))
    assert positions_of(mine.config) == 256 and mine.config.rope_parameters["rope_theta"] > 1
    config = AutoConfig.from_pretrained(tmp_path)
    config.max_position_embeddings, config.rope_parameters = 192, config.rope_parameters | YARN
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, config=config, dtype=torch.float32)
    ids = torch.arange(2, 202)[None]
    torch.testing.assert_close(mine(ids).logits, plain(ids).logits)
    assert not torch.allclose(there(ids[:, :100]).logits, plain(ids[:, :100]).logits, atol=1e-3)
    options: dict[str, Any] = {"type": engine, "max_length": 250, "max_sequences": 4}
    if engine == "vllm":
        options["vllm"] = {"enforce_eager": True}
    bench = Workbench(tmp_path, [mine, mine], options, SamplingConfig())
    try:
        bench.publish(0)
        tokens = np.random.default_rng(0).integers(2, bench.vocabulary, 200).astype(np.int32)
        request = bench.request(np.random.default_rng(0), tokens, max_new_tokens=40)
        for completion in bench.run(request):
            check(bench, tokens, completion)
    finally:
        bench.engine.close()


def test_they_are_the_trainers_the_plans_and_the_checkpoints(tmp_path: Path) -> None:
    make_models(tmp_path, Qwen3Config)
    config = load(a_config(tmp_path, max_position_embeddings=4096))
    assert positions_of(empty_model(str(tmp_path)).config) == 4096
    shape = shape_of(config)
    assert shape and shape.max_length == 4096
    load_model(str(tmp_path), "float32", torch.device("cpu")).save_pretrained(tmp_path / "checkpoint")
    load(a_config(tmp_path))
    assert positions_of(load_config(str(tmp_path))) == 128
    assert positions_of(load_config(str(tmp_path / "checkpoint"))) == 4096


def test_a_model_of_another_kind_is_told_so(tmp_path: Path) -> None:
    Gemma3TextConfig().save_pretrained(tmp_path)
    load(a_config(tmp_path, rope_parameters=YARN))
    with pytest.raises(ModelError, match="model.rope_parameters: gemma3_text has one for each kind of layer"):
        load_config(str(tmp_path))


def test_positions_are_stretched_from_those_that_were_learned(tmp_path: Path) -> None:
    make_models(tmp_path, Qwen3Config)
    yarn = {"rope_type": "yarn", "factor": 4.0}
    load(a_config(tmp_path, max_position_embeddings=512, rope_parameters=yarn))
    found = load_config(str(tmp_path))
    assert found.rope_parameters["original_max_position_embeddings"] == 128 and positions_of(found) == 512
    with pytest.raises(ConfigError, match="model.rope_parameters: not with trainer.lora"):
        load(a_config(tmp_path, rope_parameters=yarn), ["trainer.lora={rank: 4}"])


def test_what_cannot_be_is_refused() -> None:
    for given, said in (
        ({"rope_type": "dynamic", "factor": 2.0}, "rope_type='dynamic' is not the same for all lengths"),
        ({"rope_type": "yarn"}, "factor=None: yarn wants how far"),
        ({"type": "yarn", "factor": 2.0}, "how positions are stretched is rope_type"),
        ({"factor": 2.0}, "how positions are stretched is rope_type"),
    ):
        with pytest.raises(ValidationError, match=said):
            PretrainedModel(path="x", rope_parameters=given)
    with pytest.raises(ValidationError, match="max_position_embeddings is set by model.max_position_embeddings"):
        VllmEngineConfig(vllm={"hf_overrides": {"max_position_embeddings": 9}})
