"""vLLM is shown pictures by each version's own towers. It wants a torchvision for that, built for the torch that is
installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.pipeline.tools.doctor_engine import _trainers
from penstock.protocols.experience import PICTURE, Prompt, Sampling
from penstock.services.modeling.load import load_model
from penstock.services.modeling.sight import forget_seen, give_sight
from penstock.services.modeling.towers import towers
from penstock.services.modeling.version_weights import version_of
from penstock.services.rollout.config import RolloutConfig, VllmEngineConfig
from penstock.services.rollout.engines.base import Request
from penstock.services.rollout.service import make_engine
from penstock.services.turns.tokenizer import Tokenizer
from tests import families, seeing, shown
from tests.engines.workbench import CLOSE

pytestmark = pytest.mark.vllm
WIDE = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
"""The narrowest heads that vLLM takes on a CPU."""
CPU = torch.device("cpu")


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"])
@pytest.mark.parametrize("kv", ["keep", "recompute"])
def test_what_a_picture_shows_is_what_the_versions_towers_find(
    family: str, kv: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torchvision")
    turns = {"rope_type": "default", "mrope_section": [8, 4, 4], "mrope_interleaved": family.startswith("qwen3_vl")}
    monkeypatch.setattr(families, "BASE", families.BASE | WIDE)
    text_family, more = families.SEEING[family]
    if "moe_intermediate_size" in more:  # vLLM pads others on a CPU, and then does not load them
        more = more | {"moe_intermediate_size": 96}
    more = more | {"head_dim": 32, "rope_parameters": {**turns, "rope_theta": 1e4}}
    monkeypatch.setitem(families.SEEING, family, (text_family, more))
    monkeypatch.setitem(families._EYES, "out_hidden_size", 128)
    seeing.write(family, tmp_path)
    text, path = Tokenizer(str(tmp_path)), str(tmp_path)
    config = VllmEngineConfig(
        type="vllm", max_length=128, max_sequences=8, kv_on_update=kv, vllm={"enforce_eager": True}
    )
    engine = make_engine(RolloutConfig(engine=config), path, "float32", text, pictures=True, towers_learn=True)
    model = load_model(path, "float32", CPU).eval()
    give_sight(model, path, "float32", CPU)
    pictures = (shown.picture(shown.COLOURS["r"], (40, 56)),)
    prompt = Prompt(index=0, messages=[{"role": "user", "content": f"ab{PICTURE}cd"}], pictures=pictures)
    try:
        for version in range(3):
            with torch.no_grad():
                for parameter in (each for tower in towers(model).values() for each in tower.parameters()):
                    parameter.add_(0.3 * version * torch.randn_like(parameter))
            forget_seen(model)
            engine.swap(engine.prepare({name: each.clone() for name, each in version_of(model).items()}), version)
            request = Request(version, 1, text.encode(prompt), Sampling(n=2, max_new_tokens=8), pictures=pictures)
            engine.submit(request)
            done: list[Any] = []
            while engine.pending():
                done += engine.step()
            for completion in done:
                assert np.abs(_trainers(model, request, completion, 1.0) - completion.logprobs).max() < CLOSE
    finally:
        engine.close()
