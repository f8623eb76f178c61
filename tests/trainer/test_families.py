"""Families of models, each with random weights: what docs/models.md says of one is so."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import ApertusConfig, ApertusForCausalLM

from penstock.protocols.digests import Gmac
from penstock.protocols.experience import Trajectory
from penstock.services.learning.model_learner import ModelLearner
from penstock.services.modeling.dropout import without_dropout
from penstock.services.modeling.experts import as_in_files
from penstock.services.modeling.families import BOTH_WAYS, MIXTURES, STAGED, TENSOR, TENSOR_WHOLE, is_recurrent
from penstock.services.modeling.load import load_config, load_model, with_head
from penstock.services.modeling.logprobs import layout_of, logprobs
from penstock.services.modeling.lora import Adapter
from penstock.services.modeling.norms import fuse_norms
from penstock.services.modeling.packing import Layout, plan_rows
from penstock.services.modeling.parallel import start
from penstock.services.modeling.parallel.fsdp import check_shares_rows
from penstock.services.modeling.parallel.start import load_trainable
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.tiled_mlp import tile_mlps
from penstock.services.modeling.towers import towers
from penstock.services.modeling.version_weights import weight_names
from penstock.services.rollout.engines.base import EngineError, refuse_partial
from penstock.services.rollout.engines.torch.fitting import fitting_model
from penstock.services.rollout.engines.torch.hosted import HostedModel
from penstock.services.rollout.engines.torch.hybrid import HybridModel
from penstock.services.rollout.engines.torch.native import NativeModel
from penstock.services.rollout.engines.torch.recomputed import RecomputedModel
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.config import TrainerConfig
from penstock.services.weights.layout import view_weights
from penstock.services.weights.sender.shard_exporter import ShardExporter
from tests import families
from tests.conftest import TINY, make_group

CPU = torch.device("cpu")
KINDS = {"own": NativeModel, "hosted": HostedModel, "hybrid": HybridModel, "recomputed": RecomputedModel}


def test_the_page_has_every_family_that_is_tried_here() -> None:
    assert families.SAID.keys() == families.TEXT.keys() | families.SEEING.keys()


def test_files_that_lack_weights_are_refused_rather_than_drawn_at_random(tmp_path: Path) -> None:
    """A critic's checkpoint, say, is no policy; and a classifier of two kinds is no critic."""
    families.write("qwen3", tmp_path / "policy")
    critic = with_head(load_config(str(tmp_path / "policy")), "value")
    config = load_config(str(tmp_path / "policy"))
    config.num_labels = 2
    critic.from_config(config).save_pretrained(tmp_path / "scores")
    lacks = r"no lm_head.weight: they have score.weight, so it is a critic or a reward model"
    for load in (load_trainable, lambda path, world, device, dtype: load_model(path, dtype, device)):
        with pytest.raises(SetupError, match=lacks):
            load(str(tmp_path / "scores"), World(CPU), CPU, "float32")
    with pytest.raises(SetupError, match=r"score.weight has the shape \[2, \d+\], and the model wants \[1, \d+\]"):
        load_model(str(tmp_path / "scores"), "float32", CPU, "critic.path", "value")
    whole = load_model(str(tmp_path / "policy"), "float32", CPU, "critic.path", "value")
    assert not whole.score.weight.any()


@pytest.mark.parametrize("family", [*families.TEXT, *families.SEEING])
def test_a_family_is_what_the_page_says(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks, shared, adapter, engine = families.SAID[family]
    own = families.write(family, tmp_path).eval()
    whole: list[Any] = []
    monkeypatch.setattr(start, "load_model", lambda *given: whole.append(given) or load_model(*given))
    learned = load_trainable(str(tmp_path), World(CPU), CPU, "float32").train()
    assert bool(whole) == (family in WHOLE)
    without_dropout(learned)
    assert bool(towers(learned)) == (family in families.SEEING)
    _learns(learned, own)
    for name, parameter in learned.named_parameters():
        assert (parameter.grad is None) == name.startswith(tuple(f"{tower}." for tower in towers(learned))), name

    in_files = {name for name, _ in as_in_files(learned.config.model_type, learned.state_dict())}
    assert (in_files == load_file(tmp_path / "model.safetensors").keys()) == (family not in RENAMED)

    version = _as_published(learned)
    refuse_partial(version.keys(), str(tmp_path))
    config = load_config(str(tmp_path))
    made: Any = fitting_model(config, 4, 32, torch.float32, CPU, None)
    assert type(made) is KINDS[engine]
    if isinstance(made, HostedModel | RecomputedModel):
        ids = torch.arange(2, 30)
        with torch.no_grad():
            found, wanted = made.logits(made.prepare(version), ids), own(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
    fuse_norms(own, wanted=True)
    if isinstance(made, HostedModel | RecomputedModel):
        with torch.no_grad():
            assert torch.equal(own(input_ids=ids[None]).logits[0], wanted), "norms as a GPU has them"
    assert is_recurrent(config.get_text_config()) == (family in RECURRENT)
    known = {"T": family in TENSOR | TENSOR_WHOLE, "P": family in STAGED, "E": family in MIXTURES}
    known["S"] = ranks == "yes" and not (family in BOTH_WAYS or is_recurrent(config.get_text_config()))
    assert {letter for letter in known if known[letter]} == set(shared.split())
    if "S" not in shared and ranks == "yes":
        with pytest.raises(SetupError, match="sequence_parallel: it cuts packed rows"):
            check_shares_rows(learned)

    def half(what: Adapter | None) -> Any:
        return load_trainable(str(tmp_path), World(CPU), CPU, "bfloat16", adapter=what)

    if ranks == "no":
        with pytest.raises(SetupError, match="has no list of layers to cut"):
            half(None)
    if adapter == "no":
        with pytest.raises(SetupError, match="trainer.lora"):
            half(Adapter(4, 8, ()))
        return
    trained = [name for name, parameter in half(Adapter(4, 8, ())).named_parameters() if parameter.requires_grad]
    assert trained and all(".lora_" in name for name in trained)
    assert not any(name.startswith(tower) for name in trained for tower in towers(learned))


@pytest.mark.parametrize("model", families.PARTLY)
def test_engines_want_the_projections_that_a_model_has(model: str, tmp_path: Path) -> None:
    families.config_of(model).save_pretrained(tmp_path)
    names = weight_names(str(tmp_path))
    refuse_partial(names, str(tmp_path))
    with pytest.raises(EngineError, match="comes without its up_proj"):
        refuse_partial(names - {"model.layers.0.mlp.up_proj.weight"}, str(tmp_path))


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
def test_nobody_goes_on_from_codes_in_the_place_of_weights(method: str, tmp_path: Path) -> None:
    """Their names and shapes may be those of weights."""
    families.write("deepseek_v3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"quantization_config": {"quant_method": method}}))
    with pytest.raises(SetupError, match=rf"model.path: {tmp_path} is quantized \({method}\), and only whole"):
        load_trainable(str(tmp_path), World(CPU), CPU, "float32")


WHOLE = {"minimax_m2", "falcon_h1"}
"""Of which each rank reads all on its host."""
UNTILED = {"qwen3_moe", "gpt_oss", "minimax_m2", "olmoe", "nemotron_h", "opt", "gpt2", "qwen3_vl_moe_text"}
"""Of which feed-forward parts are experts alone, or are called otherwise than others'."""
RENAMED = {
    "gemma3",
    "mistral3",
    "internvl",
    "qwen2_vl",
    "qwen2_5_vl",
    "minimax_m2",
    "granitemoehybrid",
    "nemotron_h",
    "gpt_neox",
}
"""transformers has other names for what files have: read whole by each rank, and written as transformers has them."""
RECURRENT = {
    "qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5", "qwen3_5_moe", "lfm2", "granitemoehybrid", "falcon_h1",
    "nemotron_h",
}  # fmt: skip


def _as_published(learned: Any) -> dict[str, torch.Tensor]:
    """What an engine is sent of it in fp32; in 16 bits, of what transformers keeps whole, the same."""
    published = ModelLearner(learned, TrainerConfig(), 1).published
    gmac = Gmac.of_run("test")
    source, half = (ShardExporter(published, dtype, 4096, World(CPU), gmac) for dtype in ("float32", "bfloat16"))
    buffer = torch.zeros(source.layout.nbytes, dtype=torch.uint8)
    source.write(buffer)
    whole = {weight.name for weight in half.layout.weights if weight.dtype == "float32"}
    assert whole == {name for name, weight in published.items() if isinstance(weight, torch.nn.Buffer)}
    return view_weights(source.layout, buffer)


def _learns(learned: Any, own: Any) -> None:
    """Log-probabilities are those of the family's own code, sequence by sequence, however rows lie; and gradients those
    of separate rows, with feed-forward parts in tiles too. Leaves them."""
    random = np.random.default_rng(0)
    groups = [make_group(random, number, 3) for number in range(2)]
    found = [t for group in groups for t in group.trajectories]
    numbers = [group.number for group in groups for _ in group.trajectories]
    apart, packed, *masked = (
        _gradients(learned, own, found, numbers, layout) for layout in ("apart", "packed", layout_of(learned))
    )
    untiled = learned.config.get_text_config().model_type in UNTILED
    with pytest.raises(SetupError, match="key: .* has no feed-forward part") if untiled else nullcontext():
        tile_mlps(learned, 8, "key")
        masked.append(_gradients(learned, own, found, numbers, layout_of(learned)))
    for shared in (packed, *masked):
        for name, gradient in apart.items():
            gap = float((shared[name] - gradient).norm())
            assert gap <= 1e-4 * float(gradient.norm()) + 1e-6, name


def _gradients(
    learned: Any, own: Any, found: list[Trajectory], numbers: list[int], layout: Layout
) -> dict[str, torch.Tensor]:
    seen = 0
    learned.zero_grad()
    for rows in plan_rows(found, numbers, 128, CPU, layout):
        values = logprobs(learned, rows, 1.0)
        values.sum().backward()
        for k, index in enumerate(rows.index):
            ids = torch.from_numpy(found[index].tokens.astype(np.int64))
            with torch.no_grad():
                logs = own(input_ids=ids[None]).logits[0].log_softmax(-1)
            wanted = logs[:-1].gather(-1, ids[1:, None])[:, 0][torch.from_numpy(found[index].loss_mask[1:] == 1)]
            torch.testing.assert_close(values[k][rows.mask[k]].detach(), wanted, atol=1e-5, rtol=1e-5)
            seen += 1
    assert seen == len(found)
    return {name: parameter.grad for name, parameter in learned.named_parameters() if parameter.grad is not None}


def test_a_state_without_dimensions_is_read(tmp_path: Path) -> None:
    """Apertus has numbers of its activation among its buffers."""
    torch.manual_seed(0)
    plain = ApertusForCausalLM(ApertusConfig(**TINY))
    plain.save_pretrained(tmp_path)
    found = load_trainable(str(tmp_path), World(CPU), CPU, "float32").state_dict()
    assert all(torch.equal(found[name], value) for name, value in plain.state_dict().items())
