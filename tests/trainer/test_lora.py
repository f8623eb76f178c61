"""Adapters: what is trained, what is published, and what is saved."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from penstock.pipeline.config import ConfigError, load
from penstock.pipeline.config.load import as_overrides
from penstock.pipeline.models.tiny import make_tokenizer
from penstock.pipeline.preflight.lora import look
from penstock.pipeline.preflight.report import Report
from penstock.pipeline.run.evaluate import evaluate
from penstock.pipeline.tools.merge import merge
from penstock.protocols.digests import Gmac
from penstock.services.learning import checkpoint
from penstock.services.learning.config import CheckpointConfig
from penstock.services.modeling.adapter_files import check_addition
from penstock.services.modeling.decoder_shape import described_by
from penstock.services.modeling.load import ModelError
from penstock.services.modeling.lora import Merged
from penstock.services.modeling.parallel.fsdp import forward
from penstock.services.modeling.parallel.world import World
from penstock.services.modeling.whole_weights import AdapterBase
from penstock.services.runtime.errors import SetupError
from penstock.services.trainer.adapter_off import with_reference
from penstock.services.trainer.config import TrainerConfig
from penstock.services.trainer.learner import Learner
from penstock.services.trainer.rank_setup import load_policy
from penstock.services.weights.layout import view_weights
from penstock.services.weights.sender.shard_exporter import ShardExporter
from tests import families
from tests.conftest import TINY
from tests.trainer.steps import Tokenizer, a_step

CPU = torch.device("cpu")
WORLD = World(CPU)


@pytest.fixture
def start(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**TINY)).save_pretrained(tmp_path / "start")
    return tmp_path / "start"


def learner(base: Path, path: Path | None = None, dtype: str = "float32", **lora: Any) -> Learner:
    config = TrainerConfig.model_validate({"optimizer": {"lr": 1e-2}, "lora": {"rank": 4, "alpha": 8} | lora})
    return Learner(load_policy(str(path or base), str(base), WORLD, dtype, config), config, 1.0, WORLD)


def published(of: Learner, dtype: str = "float32") -> dict[str, torch.Tensor]:
    source = ShardExporter(of.published, dtype, 4096, WORLD, Gmac.of_run("test"))
    buffer = torch.zeros(source.layout.nbytes, dtype=torch.uint8)
    for _ in source.buckets(buffer, hashed=True):
        pass
    again = torch.zeros_like(buffer)
    source.write(again)
    assert torch.equal(buffer, again)
    return view_weights(source.layout, buffer)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(torch.arange(12)[None]).logits
        return found


def test_a_version_is_read_while_the_next_step_has_gathered_the_weights(start: Path) -> None:
    """In bf16 FSDP wraps also what lies on one device, and has another tensor in a layer while it computes."""
    trained = learner(start, dtype="bfloat16")
    trained.train(a_step(0))
    merged = {name: weight for name, weight in trained.published.items() if isinstance(weight, Merged)}
    whole = {name: weight.local().clone() for name, weight in merged.items()}
    seen, swapped = [0], [0]
    layer = trained.model.model.layers[1].self_attn.q_proj.base_layer
    at_rest = layer.weight

    def publish(*_: Any) -> None:
        swapped[0] += layer.weight is not at_rest
        layer.weight.data.zero_()  # as before it is filled, or once its memory is another's
        with ThreadPoolExecutor(1) as other:
            for name, weight in merged.items():
                assert torch.equal(other.submit(weight.local).result(), whole[name]), name
                seen[0] += 1

    layer.register_forward_hook(publish)
    trained.accumulate(a_step(1))
    assert seen[0] and swapped[0], "the test has looked at nothing"


@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_the_adapter_alone_is_trained_and_published_merged(start: Path, variant: str) -> None:
    one = learner(start, variant=variant)
    plain = Qwen3ForCausalLM.from_pretrained(start)
    for name, weight in published(one).items():  # it adds nothing yet
        torch.testing.assert_close(weight, plain.get_parameter(name).detach(), rtol=1e-6, atol=1e-7)
    frozen = {name: p.detach().clone() for name, p in one.model.named_parameters() if not p.requires_grad}
    for seed in range(3):
        one.train(a_step(seed))
    assert one.parameters and all(".lora_" in name for name in one.parameters)
    assert all(torch.equal(p, frozen[name]) for name, p in one.model.named_parameters() if name in frozen)
    plain.load_state_dict(published(one), strict=False)
    assert (logits(plain) - logits(Qwen3ForCausalLM.from_pretrained(start))).abs().max() > 1e-2, "it has learned"
    torch.testing.assert_close(logits(plain), logits(one.model), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_it_is_merged_as_peft_merges(start: Path, variant: str) -> None:
    one = learner(start, variant=variant, targets=["q_proj", "up_proj"])
    one.train(a_step(1))
    mine, layers = published(one), [module for module in one.model.modules() if hasattr(module, "lora_A")]
    assert len(layers) == 4 == sum(isinstance(weight, Merged) for weight in one.published.values())
    for layer in layers:
        layer.merge()
    for name, parameter in one.model.named_parameters():
        if ".base_layer." in name:
            torch.testing.assert_close(mine[name.replace(".base_layer", "")], parameter.detach())


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"targets": ["*.layers.[1-9].self_attn.*", "up_proj"]}, {"0.up", "1.up", "1.q", "1.k", "1.v", "1.o"}),
        ({"exclude": ["model.layers.0.*", "k_proj", "*.mlp.*"]}, {"1.q", "1.v", "1.o"}),
        ({"targets": ["q_proj", "v_proj"], "exclude": ["v_proj"]}, {"0.q", "1.q"}),
    ],
)
def test_layers_are_named_by_patterns_and_left_out(
    start: Path, tmp_path: Path, given: dict[str, list[str]], wanted: set[str]
) -> None:
    """The plan counts as many numbers, and whoever goes on from the checkpoint has the same layers."""
    one = learner(start, **given)
    names = {name.removeprefix("model.layers.") for name in one.parameters if ".lora_A." in name}
    assert {f"{name[0]}.{name.split('_proj')[0].rpartition('.')[2]}" for name in names} == wanted
    shape = described_by("", Qwen3Config(**TINY).to_dict())
    assert shape is not None
    counted = shape.adapter(4, given.get("targets", ()), given.get("exclude", ()))
    assert counted == pytest.approx(sum(parameter.numel() for parameter in one.parameters.values()))
    one.train(a_step(1))
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    for again in (learner(start, path, **given), learner(start, path)):
        torch.testing.assert_close(logits(again.model), logits(one.model))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
def test_the_adapter_alone_is_merged_by_who_receives_it_as_the_trainer_merges(
    start: Path, variant: str, dtype: str
) -> None:
    lora = {"variant": variant, "targets": ["q_proj", "down_proj"]}
    whole, alone = (learner(start, dtype=dtype, publish=how, **lora) for how in ("merged", "adapter"))
    for each in (whole, alone):
        each.train(a_step(1))
    sent = published(alone, "float32")
    assert all(".lora_" in name for name in sent)
    made = AdapterBase(str(start), dtype).whole(sent, CPU)
    wanted = published(whole, dtype)
    assert set(made) == set(wanted)
    for name, weight in wanted.items():
        assert made[name].dtype == weight.dtype
        torch.testing.assert_close(made[name], weight, rtol=2**-8 if dtype == "bfloat16" else 1e-6, atol=1e-7)
    assert AdapterBase(str(start), dtype).whole(wanted, CPU) is wanted, "what is whole is left alone"
    del sent["model.layers.0.self_attn.q_proj.lora_A.weight"]
    sent["model.layers.7.self_attn.q_proj.lora_A.weight"] = torch.zeros(4, 32)
    with pytest.raises(ModelError, match=r"has no model.layers.7.self_attn.q_proj.weight"):
        AdapterBase(str(start), dtype).whole(sent, CPU)


def test_who_merges_has_all_that_the_trainer_publishes(tmp_path: Path) -> None:
    """Also what nobody trains, in fp32; and no more of the files than the model has."""
    families.write("deepseek_v3", tmp_path)
    file = tmp_path / "model.safetensors"
    save_file(load_file(file) | {"model.layers.4.eh_proj.weight": torch.zeros(4, 4)}, file, {"format": "pt"})
    whole, alone = (learner(tmp_path, dtype="bfloat16", publish=how) for how in ("merged", "adapter"))
    made = AdapterBase(str(tmp_path), "bfloat16").whole(published(alone), CPU)
    wanted = published(whole, "bfloat16")
    assert {name: made[name].dtype for name in made} == {name: weight.dtype for name, weight in wanted.items()}
    assert all(torch.equal(made[name], weight) for name, weight in wanted.items()), "the adapter adds nothing yet"
    assert torch.float32 in {weight.dtype for weight in wanted.values()}


@pytest.mark.parametrize(
    "odd", [{"alpha_pattern": {"q_proj": 64}}, {"rank_pattern": {"q_proj": 2}}, {"init_lora_weights": "pissa_niter_4"}]
)
def test_one_of_pefts_that_adds_otherwise_is_refused(start: Path, odd: dict[str, Any]) -> None:
    """It would be another adapter here, and nothing would tell."""
    LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], **odd).save_pretrained(start / "adapter")
    with pytest.raises(SetupError, match=rf"^trainer\.lora\.start: .* says {next(iter(odd))}=.* merge it with peft"):
        learner(start, start=str(start / "adapter"))
    LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian").save_pretrained(start / "plain")
    check_addition(start / "plain", "")


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_a_checkpoint_is_an_adapter_that_peft_loads(start: Path, tmp_path: Path, variant: str) -> None:
    one = learner(start, variant=variant)
    for seed in range(2):
        one.train(a_step(seed))
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    assert (
        sum(file.stat().st_size for file in path.glob("*.safetensors"))
        < 0.4 * (start / "model.safetensors").stat().st_size
    )
    base = Qwen3ForCausalLM.from_pretrained(start)
    loaded = [PeftModel.from_pretrained(base, path)]
    if variant == "lora":  # transformers' own loader knows no lengths of DoRA's
        (path / "tokenizer.json").unlink()
        loaded.append(AutoModelForCausalLM.from_pretrained(path))
    for model in loaded:
        torch.testing.assert_close(logits(model), logits(one.model), rtol=1e-4, atol=1e-5)

    again = learner(start, path, variant=variant)
    checkpoint.restore(again, path)
    assert again.version == 2
    one.train(a_step(5)), again.train(a_step(5))
    for name, parameter in one.parameters.items():
        assert torch.equal(parameter, again.parameters[name]), name


def test_what_the_base_says_of_sampling_is_in_the_merged_model_as_it_was(start: Path, tmp_path: Path) -> None:
    """transformers reads a temperature without ``do_sample``, and refuses to write it."""
    told = {"temperature": 0.6, "top_p": 0.9}
    (start / "generation_config.json").write_text(json.dumps(told))
    saver = checkpoint.Saver(
        learner(start), make_tokenizer(set("ab")), tmp_path / "checkpoints", CheckpointConfig(keep=1)
    )
    path = saver.begin().result()
    saver.close()
    merge(path, tmp_path / "merged")
    merge(path, tmp_path / "small", "bfloat16")
    merge(tmp_path / "merged", tmp_path / "again", "bfloat16")  # a whole checkpoint
    whole, *small = (load_file(tmp_path / name / "model.safetensors") for name in ("merged", "small", "again"))
    assert all(torch.equal(each[name], weight.bfloat16()) for each in small for name, weight in whole.items())
    assert {path.name for path in (tmp_path / "again").iterdir()} == {p.name for p in (tmp_path / "small").iterdir()}
    assert told.items() <= json.loads((tmp_path / "merged" / "generation_config.json").read_text()).items()


def test_what_is_frozen_takes_no_more_bits_than_are_computed_with(start: Path) -> None:
    one = learner(start, dtype="bfloat16")
    one.train(a_step(1))
    assert one.model.model.rotary_emb.inv_freq.dtype == torch.float32, "rotations are not rounded"
    kinds = {p.requires_grad: p.dtype for p in one.model.parameters()}
    assert kinds == {True: torch.float32, False: torch.bfloat16}
    base = Qwen3ForCausalLM.from_pretrained(start, dtype=torch.bfloat16).get_parameter("model.embed_tokens.weight")
    assert torch.equal(published(one, "bfloat16")["model.embed_tokens.weight"], base)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (
            {"targets": ["q_projection"]},
            "trainer.lora.targets: no layer is called q_projection; linear ones are down_proj",
        ),
        ({"targets": ["embed_tokens"]}, "trainer.lora.targets: model.embed_tokens is a Embedding"),
        ({"targets": ["*.layers.7.*"]}, r"trainer.lora.targets: no layer is called \*.layers.7.\*; linear ones are"),
        ({"targets": ["*norm"]}, r"trainer.lora.targets: no linear layer is called \*norm"),
        ({"exclude": ["q_projection"]}, "trainer.lora.exclude: no layer is called q_projection"),
        ({"targets": ["q_proj"], "exclude": ["*.self_attn.*"]}, "trainer.lora.exclude: nothing is left"),
        ({"start": "nowhere"}, "trainer.lora: cannot read nowhere/adapter_config.json"),
    ],
)
def test_what_does_not_fit_is_told_by_its_key(start: Path, wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(SetupError, match=words):
        learner(start, **wrong)


def test_another_rank_than_the_checkpoints_is_told(start: Path, tmp_path: Path) -> None:
    one = learner(start)
    saver = checkpoint.Saver(one, Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1))
    path = saver.begin().result()
    saver.close()
    with pytest.raises(SetupError, match=r"trainer.lora.rank: .* has shape \(4, 64\), this adapter's has \(8, 64\)"):
        learner(start, path, rank=8)


def test_a_matrix_that_is_shared_is_refused(tmp_path: Path) -> None:
    """The head of a tied model is its embedding: an adapter on it would never be published."""
    Qwen3ForCausalLM(Qwen3Config(**TINY, tie_word_embeddings=True)).save_pretrained(tmp_path)
    with pytest.raises(SetupError, match=r"trainer.lora.targets: lm_head shares its matrix with another layer"):
        learner(tmp_path, targets=["lm_head"])


def test_another_variant_than_the_files_is_told(start: Path, tmp_path: Path) -> None:
    saver = checkpoint.Saver(
        learner(start, variant="dora"), Tokenizer(), tmp_path / "checkpoints", CheckpointConfig(keep=1)
    )
    path = saver.begin().result()
    saver.close()
    with pytest.raises(SetupError, match=r"trainer.lora: .* has .*magnitude.*, which this adapter has not"):
        learner(start, path)
    (path / "adapter_model.safetensors").write_bytes(b"torn")
    with pytest.raises(SetupError, match="trainer.lora: cannot read"):
        learner(start, path)


def test_layers_that_are_not_there_are_told_before_a_run_with_those_that_are(start: Path) -> None:
    given = {"model": {"type": "pretrained", "path": str(start)}, "trainer.lora": {"targets": ["q_proj", "v_prj"]}}
    report = Report()
    look(load(Path("configs/quickstart.yaml"), as_overrides(given)), report)
    (said,) = report.problems
    assert said.startswith("trainer.lora.targets: no layer is called v_prj; linear ones are down_proj, ")


def test_a_runs_folder_in_a_checkpoints_place_is_told_the_newest_one(tmp_path: Path) -> None:
    run = tmp_path / "runs" / "first"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.yaml").write_text("model: {type: tiny}\nprompts: {train: {type: sort}, eval: {type: sort}}\n")
    for command in (
        lambda: merge(run, tmp_path / "out"),
        lambda: evaluate(Console(), str(run), run / "config.yaml", []),
    ):
        with pytest.raises(ConfigError, match="is the folder of a run; there is no checkpoint in it yet"):
            command()
    (run / "checkpoints" / "step-000004").mkdir()
    with pytest.raises(ConfigError, match="its newest checkpoint is .*/runs/first/checkpoints/step-000004"):
        merge(run, tmp_path / "out")


@pytest.mark.parametrize("variant", ["lora", "dora"])
def test_with_its_adapter_switched_off_the_policy_is_the_reference(start: Path, variant: str) -> None:
    made, plain = (
        learner(start, variant=variant),
        Learner(Qwen3ForCausalLM.from_pretrained(start), TrainerConfig.model_validate({}), 1.0, WORLD),
    )
    step = a_step(0)

    def of(one: Learner) -> list[Any]:
        return one.evaluate(step, lambda rows: forward(one.model, rows, 0.7))

    reference, learning = of(plain), {name for name, p in made.model.named_parameters() if p.requires_grad}
    made.train(step)
    passed = with_reference(made, step, 0.7)
    found, alone = passed.token_values["reference"], made.flops.total
    for mine, wanted, now in zip(found, reference, of(made), strict=True):
        np.testing.assert_allclose(mine, wanted, atol=1e-5)
        assert np.abs(now - wanted).max() > 1e-3
    assert learning == {name for name, p in made.model.named_parameters() if p.requires_grad}
    made.train(passed)
    with_pass = made.flops.total
    made.train(step)
    assert with_pass == pytest.approx(made.flops.total + alone) and alone > 0, "the pass is the step's"


def test_what_a_reference_in_the_trainer_cannot_be_is_refused() -> None:
    quick = Path(__file__).parents[2] / "configs" / "quickstart.yaml"
    here, lora = "reference.in_trainer=true", "trainer.lora={rank: 4}"
    load(quick, [here, lora, "trainer.algorithm.kl.coefficient=0.1"])
    for more, said in (
        ([], "only an adapter can be switched off"),
        ([lora, "reference.path=x"], "leave out reference.path"),
        ([lora, "model.experts=4", "rollout.sampling.routing_replay=true"], "would send its tokens as the policy's"),
        ([lora, "trainer.algorithm.advantage={type: gae}"], "a critic learns beside the trainer"),
        ([lora, "replay.filter={type: column, column: reference}"], "replay.filter.column: with reference.in_trainer"),
    ):
        with pytest.raises(ConfigError, match=said):
            load(quick, [here, *more])
